#!/usr/bin/env bash
# snippets.sh <source dir> <work dir> <C++ compiler> <C compiler> <python> <include flag>...
#
# Every block of C++, C and Python in README and docs compiles, as it is printed. One that is no whole program stands in
# the file of snippets/ named after its page, at the line that says so; several of a page stand there in their order. A
# file without a block, and a block without a file, are complained about.
set -euo pipefail
source=$1 work=$2 cxx=$3 cc=$4 python=$5
shift 5
frames=$source/tests/structure/snippets
rm -rf "$work" && mkdir -p "$work"
bad=0 count=0
complain() { echo "$1"; bad=1; }

compile() {  # <file>
  case $1 in
    *.cpp) "$cxx" -std=c++20 -Wall -Wextra -fsyntax-only "$@" ;;
    *.c) "$cc" -std=c99 -Wall -Wextra -fsyntax-only "$@" ;;
    *.py) "$python" -c 'import ast, sys; ast.parse(open(sys.argv[1]).read(), sys.argv[1])' "$1" ;;
  esac
}

cd "$source"
while read -r page; do
  name=${page//\//_}
  name=${name%.md}
  for language in cpp c python; do
    suffix=${language/python/py}
    # Each block in a file of its own, its lines numbered as in the page.
    awk -v language="$language" -v out="$work/$name" -v suffix="$suffix" -v page="$page" '
      /^```/ && inside { inside = 0; next }
      /^```/ { inside = 1; hit = substr($0, 4) == language; if (hit) file = out "." ++n ".part." suffix; next }
      inside && hit { if (!(file in begun)) { begun[file] = 1; if (suffix != "py") print "#line " NR " \"" page "\"" > file }; print > file }' "$page"
    frame=$frames/$name.$suffix
    parts=$(find "$work" -name "$name.*.part.$suffix" | sort -V)
    [[ -n $parts ]] || { [[ ! -e $frame ]] || complain "$frame: $page has no such block"; continue; }
    used=()
    while read -r part; do
      count=$((count + 1))
      if grep -q 'int main(' "$part" || [[ $suffix == py ]]; then
        compile "$part" "$@" || complain "$page: a program does not compile"
      else
        used+=("$part")
      fi
    done <<<"$parts"
    if ((${#used[@]})); then
      [[ -e $frame ]] || { complain "$page: a block has no file $frame to stand in"; continue; }
      whole=$work/$name.$suffix
      awk '
        FILENAME != ARGV[ARGC - 1] { if (FNR == 1) ++parts; text[parts] = text[parts] $0 "\n"; next }
        /^ *\/\/ snippet$/ || /^ *\/\* snippet \*\/$/ { printf "%s", text[++seen]; next }
        { print }
        END { exit seen < parts }' "${used[@]}" "$frame" >"$whole" || complain "$frame: more blocks than lines for them"
      compile "$whole" "$@" || complain "$page: its blocks do not compile"
    elif [[ -e $frame ]]; then
      complain "$frame: no block stands in it"
    fi
  done
done < <(find README.md examples docs -name '*.md' | sort)
echo "$count blocks"
((count > 0)) || exit 1
exit $bad

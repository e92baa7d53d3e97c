#!/usr/bin/env bash
# documents.sh <source dir>
#
# Links inside the documents lead somewhere (files and headings), the table of environment variables names exactly what
# the code reads, the page of errors names every code, and every page of docs/ can be reached from docs/README.md.
set -euo pipefail
cd "$1"
bad=0
complain() { echo "$1"; bad=1; }
pages=$(find README.md CONTRIBUTING.md CHANGELOG.md docs examples tools bench tests -name '*.md' | sort)

headings() {  # <file>: the anchors of its headings
  awk '/^```/ { code = !code } !code && /^#+ / {
    sub(/^#+ +/, ""); line = tolower($0); gsub(/[^a-z0-9 _-]/, "", line); gsub(/ /, "-", line); print line }' "$1"
}

links=0
while read -r page; do
  folder=$(dirname "$page")
  while read -r target; do
    [[ -n $target && $target != *://* && $target != mailto:* ]] || continue
    links=$((links + 1))
    file=${target%%#*} anchor=
    [[ $target == *#* ]] && anchor=${target#*#}
    path=$page
    [[ -n $file ]] && path=$folder/$file
    if [[ ! -e $path ]]; then
      complain "$page: '$target' leads nowhere"
    elif [[ -n $anchor ]] && ! headings "$path" | grep -qxF -- "$anchor"; then
      complain "$page: '$target' names no heading"
    fi
  done < <(awk '/^```/ { code = !code } !code' "$page" | grep -oE '\]\([^) ]+\)|src="[^"]+"' | sed -E 's/^\]\(//; s/\)$//; s/^src="//; s/"$//')
done <<<"$pages"

# Environment variables.
in_code=$(grep -rhoE 'getenv\("[A-Z0-9_]+"\)' include src examples bench tools tests --include='*.?pp' --include='*.cu*' |
  sed -E 's/.*"(.*)".*/\1/' | grep -v '^BIFOLIO_PROBE_' | sort -u)
in_table=$(grep -oE '^\| `[A-Z0-9_]+`' docs/environment.md | tr -d '|` ' | sort -u)
[[ $in_code == "$in_table" ]] ||
  complain "docs/environment.md and the code's getenv calls differ (< code, > page):
$(diff <(echo "$in_code") <(echo "$in_table") || true)"
indirect=$(grep -rnE 'getenv\([^"]' include src examples bench tools tests --include='*.?pp' || true)
[[ -z $indirect ]] || complain "getenv without a literal name cannot be documented: $indirect"

# Build options.
in_build=$(grep -ohE '^ *(option\(|set\()(BIFOLIO_[A-Z_]+|BUILD_SHARED_LIBS|CMAKE_BUILD_TYPE) .*' CMakeLists.txt cmake/*.cmake |
  grep -E 'option\(|CACHE' | sed -E 's/^ *(option|set)\(([A-Z_]+) .*/\2/' | sort -u)
in_table=$(grep -oE '^\| `[A-Z_]+`' docs/options.md | tr -d '|` ' | sort -u)
[[ -n $in_build && $in_build == "$in_table" ]] ||
  complain "docs/options.md and the build files differ (< build files, > page):
$(diff <(echo "$in_build") <(echo "$in_table") || true)"

# Packages of others name the version that is built.
version=$(sed -nE 's/^ *VERSION ([0-9.]+)$/\1/p' CMakeLists.txt)
for recipe in packaging/vcpkg/bifolio/vcpkg.json packaging/conan/conanfile.py; do
  grep -qE "version\"?[ :=]+\"$version\"" "$recipe" || complain "$recipe does not name version $version"
done
grep -qF "v$version" README.md || complain "README.md does not name v$version"

# Error codes.
codes=$(awk '/enum class errc/ { on = 1; next } on && /}/ { exit } on' include/bifolio/error.hpp |
  sed -E 's,//.*,,' | grep -oE '^ *[a-z_]+' | tr -d ' ')
for code in $codes; do
  grep -qF "\`$code\`" docs/errors.md || complain "docs/errors.md does not explain '$code'"
done
[[ -n $codes ]] || complain "no error code was found in error.hpp"

# Every page can be reached.
while read -r page; do
  [[ $page == docs/README.md ]] || grep -qF "(${page#docs/})" docs/README.md ||
    complain "docs/README.md does not lead to $page"
done < <(find docs -name '*.md')

echo "$(wc -l <<<"$pages") pages, $links links"
exit $bad

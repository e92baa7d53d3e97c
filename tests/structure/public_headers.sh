#!/usr/bin/env bash
# public_headers.sh <source dir> <compiler> <include option>...
#
# Each public header compiles alone and twice in a row, without warnings; none includes a package that is an
# implementation matter; the umbrella header names them all, except those of detail/, which only other public headers
# and the library include.
set -euo pipefail
source=$1 compiler=$2
shift 2
warnings=(-Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wpedantic -Werror)
bad=0
count=0
for path in "$source"/include/bifolio/*.hpp "$source"/include/bifolio/detail/*.hpp; do
  name=${path#"$source"/include/}
  count=$((count + 1))
  if ! printf '#include <%s>\n#include <%s>\n' "$name" "$name" |
    "$compiler" -std=c++20 "${warnings[@]}" "$@" -x c++ -fsyntax-only -; then
    echo "$name does not compile alone"
    bad=1
  fi
  # The files that it pulls in, direct or not.
  foreign=$(printf '#include <%s>\n' "$name" | "$compiler" -std=c++20 "$@" -x c++ -M - | tr ' ' '\n' |
    grep -E '/omp\.h$|/(oneapi/)?tbb/|/xsimd/|/cuda[^/]*\.h|/doctest' | grep -vE '/include/bifolio/' || true)
  if [[ -n $foreign ]]; then
    printf '%s includes what no public header may:\n%s\n' "$name" "$foreign"
    bad=1
  fi
  if [[ $name != bifolio/bifolio.hpp && $name != bifolio/detail/* ]] && ! grep -qF "#include <$name>" "$source/include/bifolio/bifolio.hpp"; then
    echo "bifolio/bifolio.hpp does not include $name"
    bad=1
  fi
done
# Programs, tests, pages and other users do without detail/.
for folder in bench docs examples tests tools README.md CONTRIBUTING.md; do
  if [[ -e $source/$folder ]] && grep -rnE '#[ \t]*include[ \t]*[<"]bifolio/detail/' "$source/$folder"; then
    echo "$folder includes a header of bifolio/detail/, which is private to the library"
    bad=1
  fi
done
echo "$count headers"
((count > 0)) || exit 1
exit $bad

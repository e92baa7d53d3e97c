#!/usr/bin/env bash
# public_headers.sh <source dir> <compiler> <include option>...
#
# Each public header compiles alone and twice in a row, without warnings; none includes a package that is an
# implementation matter; the umbrella header names them all.
set -euo pipefail
source=$1 compiler=$2
shift 2
warnings=(-Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wpedantic -Werror)
bad=0
count=0
for path in "$source"/include/bifolio/*.hpp; do
  name=bifolio/$(basename "$path")
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
  if [[ $name != bifolio/bifolio.hpp ]] && ! grep -qF "#include <$name>" "$source/include/bifolio/bifolio.hpp"; then
    echo "bifolio/bifolio.hpp does not include $name"
    bad=1
  fi
done
echo "$count headers"
((count > 0)) || exit 1
exit $bad

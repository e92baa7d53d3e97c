#!/usr/bin/env bash
# exports.sh <nm> <shared library> <header> <C compiler> <C++ compiler>
#
# The header compiles as C99 and as C++11, without warnings; the library exports the functions that the header declares,
# all of them, and nothing else.
set -euo pipefail
nm=$1 library=$2 header=$3 cc=$4 cxx=$5
warnings=(-Wall -Wextra -Wpedantic -Wconversion -Werror)
include=-I$(dirname "$(dirname "$(dirname "$header")")")
echo '#include <bifolio/c/bifolio.h>' | "$cc" -std=c99 "${warnings[@]}" "$include" -x c -fsyntax-only -
echo '#include <bifolio/c/bifolio.h>' | "$cxx" -std=c++11 "${warnings[@]}" "$include" -x c++ -fsyntax-only -
declared=$("$cc" -std=c99 -E -P "$header" | tr '\n' ' ' | grep -oE '\bbifolio_[a-z_]+\(' | tr -d '(' | sort -u)
exported=$("$nm" -D --defined-only "$library" | awk '{ print $NF }' | grep -v '^_\(init\|fini\)$' | sed 's/@.*//' | sort -u)
diff <(echo "$declared") <(echo "$exported") || { echo "< declared, > exported"; exit 1; }
count=$(wc -l <<<"$exported")
echo "$count functions"
((count > 50))

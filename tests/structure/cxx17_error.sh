#!/usr/bin/env bash
# cxx17_error.sh <compiler> <include flag>...
#
# <bifolio/bifolio.hpp> compiled as C++17 gives one error, and it names the flag.
set -euo pipefail
compiler=$1
shift
if said=$(echo '#include <bifolio/bifolio.hpp>
int main() {}' | "$compiler" -std=c++17 "$@" -x c++ -fsyntax-only - 2>&1); then
  echo "it compiled"
  exit 1
fi
echo "$said"
[[ $(grep -c 'error:' <<<"$said") == 1 && $said == *"-std=c++20"* ]]

#!/usr/bin/env bash
# clang_warnings.sh <source dir> <scratch dir> <clang++> <include option>...
#
# Clang has no warning about any source of tests/. The release build is GCC's, whose -Wshadow is not the same, and the
# thread sanitizer's has a part of the tests.
set -euo pipefail
source=$1 scratch=$2 compiler=$3
shift 3
cd "$source"
mkdir -p "$scratch"
options=(-std=c++20 -Wall -Wextra -Wshadow -Wconversion -Wsign-conversion -Wpedantic -Werror -Wno-unknown-warning-option
  -DNDEBUG -DBIFOLIO_STATIC_DEFINE -DDOCTEST_CONFIG_SUPER_FAST_ASSERTS "$@" -Isrc -Itests -Itests/fuzz -I. -Ibench -Iexamples/generate -Iexamples/serve
  -Itools/block_map -Itools/selftest -Itools/trace_replay)
# What the build defines for single tests: paths and numbers.
mapfile -t names < <(grep -rohE '\bBIFOLIO_[A-Z0-9_]+="' tests --include=CMakeLists.txt | tr -d '="' | sort -u)
options+=("${names[@]/%/=\"\"}")
options=("${options[@]/#BIFOLIO_/-DBIFOLIO_}" -DBIFOLIO_RANDOM_OPERATIONS=1 -DBIFOLIO_CASE_STEP=1)
# Most of the time goes to the same headers.
printf '#include <%s>\n' doctest/doctest.h nlohmann/json.hpp bifolio/bifolio.hpp algorithm array atomic cmath cstring \
  filesystem fstream functional map memory numeric optional random set span sstream string thread unordered_map vector \
  >"$scratch/common.hpp"
"$compiler" "${options[@]}" -x c++-header "$scratch/common.hpp" -o "$scratch/common.pch"
mapfile -t files < <(find tests -name '*.cpp' -not -path 'tests/structure/*' -not -path 'tests/install/*' | sort)
echo "${#files[@]} files"
((${#files[@]} > 100)) || exit 1
printf '%s\0' "${files[@]}" |
  xargs -0 -n 8 -P 2 "$compiler" "${options[@]}" -fsyntax-only -include-pch "$scratch/common.pch"

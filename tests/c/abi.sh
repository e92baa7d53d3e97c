#!/usr/bin/env bash
# abi.sh <abidiff> <source dir> <shared library> <build dir>: the C interface still serves programs that were built with
# the last tag's. Compares with the library of that tag, which is built without CUDA and with one instruction set.
set -uo pipefail
abidiff=$1 source=$2 library=$3 build=$4
skip() { echo "SKIPPED: $1"; exit 77; }
[[ -n $abidiff && $abidiff != *-NOTFOUND ]] || skip "there is no abidiff here (Debian's abigail-tools)"
tag=$(git -C "$source" describe --tags --abbrev=0 --match 'v*' 2>/dev/null) || skip "the sources have no tag to compare with"
git -C "$source" cat-file -e "$tag:src/c" 2>/dev/null || skip "$tag has no C interface"
mkdir -p "$build"
if [[ ! -e $build/$tag/lib/libbifolio_c.so ]]; then
  rm -rf "$build/tree"
  mkdir "$build/tree"
  git -C "$source" archive "$tag" | tar -x -C "$build/tree" || exit 1
  cmake -S "$build/tree" -B "$build/tree/build" -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DBIFOLIO_CUDA=OFF -DBIFOLIO_ISAS=baseline \
    -DBIFOLIO_BUILD_TESTS=OFF -DBIFOLIO_BUILD_EXAMPLES=OFF -DBIFOLIO_BUILD_BENCH=OFF -DBIFOLIO_BUILD_TOOLS=OFF &&
    cmake --build "$build/tree/build" --target bifolio_c || { echo "the library of $tag could not be built"; exit 1; }
  mkdir -p "$build/$tag/lib"
  cp -L "$build/tree/build/src/c/libbifolio_c.so" "$build/$tag/lib/libbifolio_c.so"
fi
# Bit 8 of the status: a change that old programs do not survive.
"$abidiff" --headers-dir1 "$build/tree/include/bifolio/c" --headers-dir2 "$source/include/bifolio/c" \
  "$build/$tag/lib/libbifolio_c.so" "$library"
status=$?
if ((status & 8)); then
  echo "the binary interface changed since $tag"
  exit 1
fi
((status & 3)) && exit 1
exit 0

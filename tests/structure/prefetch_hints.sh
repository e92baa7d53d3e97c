#!/usr/bin/env bash
# prefetch_hints.sh <objdump> <object>...
#
# Asking ahead is worth a factor of two to six to the block pool (docs/concepts.md), and GCC deletes functions that do
# nothing else. So the pool's object, one of those given, must hold prefetch instructions, of any kind.
set -euo pipefail
objdump=$1
shift
for object in "$@"; do
  [[ $object == */block_pool.cpp.o* ]] || continue
  count=$("$objdump" -d "$object" | grep -cE '\bprefetch(w|nta|t[012])\b|\bprfm\b' || true)
  echo "$count in $(basename "$object")"
  ((count > 0)) && exit 0
  echo "the block pool prefetches nothing"
  exit 1
done
echo "no object of block_pool.cpp was given"
exit 1

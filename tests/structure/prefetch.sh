#!/usr/bin/env bash
# prefetch.sh <objdump> <object>...
#
# Decode lives on fetching the next block through the block table ahead of time. GCC deletes a small function that does
# nothing but prefetch, without a word; so at least one of the objects must hold the instruction, towards L2 or beyond
# (x86: prefetcht1/t2; Arm: prfm ...l2/l3...).
set -euo pipefail
objdump=$1
shift
total=0
for object in "$@"; do
  count=$("$objdump" -d "$object" | grep -cE '\bprefetcht[12]\b|\bprfm\s+pldl[23]' || true)
  echo "$count in $(basename "$object")"
  total=$((total + count))
done
((total > 0)) || { echo "no prefetch towards L2 is left in the kernel objects"; exit 1; }

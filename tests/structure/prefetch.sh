#!/usr/bin/env bash
# prefetch.sh <objdump> <object>...
#
# Decode lives on fetching the next block through the block table ahead of time. GCC deletes a small function that does
# nothing but prefetch, without a word; so at least one of the objects must hold the instruction (x86: prefetcht0/t1/t2;
# Arm: prfm pld...).
set -euo pipefail
objdump=$1
shift
total=0
for object in "$@"; do
  count=$("$objdump" -d "$object" | grep -cE '\bprefetcht[012]\b|\bprfm\s+pldl[123]' || true)
  echo "$count in $(basename "$object")"
  total=$((total + count))
done
((total > 0)) || { echo "no prefetch is left in the kernel objects"; exit 1; }

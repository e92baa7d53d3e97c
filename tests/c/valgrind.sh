#!/usr/bin/env bash
# valgrind.sh <valgrind> <program>: the program runs without an error or a leak under valgrind, with the kernels of the
# plainest instruction set, because valgrind knows no AVX-512.
set -uo pipefail
valgrind=$1 program=$2
if [[ -z $valgrind || $valgrind == *-NOTFOUND ]]; then
  echo "SKIPPED: there is no valgrind here"
  exit 77
fi
BIFOLIO_CPU_ISA=baseline "$valgrind" --quiet --error-exitcode=9 --leak-check=full --show-leak-kinds=definite,indirect \
  --errors-for-leak-kinds=definite,indirect "$program" >/dev/null

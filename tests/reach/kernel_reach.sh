#!/usr/bin/env bash
# Which kernels the suite has reached, and which not: exit status 1 when one was not.
#
#   kernel_reach.sh FOLDER [LIBRARY]
#
# FOLDER holds what the test programs wrote (tests/support/reach.hpp). LIBRARY is libbifolio_cuda.a: with it every
# compiled CUDA kernel, whatever its template parameters, must have been launched.
set -euo pipefail
folder=${1:?usage: kernel_reach.sh FOLDER [LIBRARY]}
library=${2-}
shopt -s nullglob
records=("$folder"/*.tsv)
if ((${#records[@]} == 0)); then
  echo "no test program has written into $folder" >&2
  exit 1
fi

awk -F'\t' '
  $1 == "has" && !($2 in count) { count[$2] = 0 }
  $1 == "reached" { count[$2] += $3 }
  END {
    for (kernel in count) {
      printf "%10d  %s\n", count[kernel], kernel | "sort -k2"
      if (count[kernel] == 0) missing++
    }
    close("sort -k2")
    if (missing) printf "%d kernels were not reached\n", missing
    exit missing > 0
  }' "${records[@]}" && status=0 || status=1

if [[ -n $library ]]; then
  compiled=$(mktemp)
  trap 'rm -f "$compiled"' EXIT
  # nvcc leaves one host function __device_stub_<mangled name of the kernel> for each.
  nm -C "$library" 2>/dev/null | sed -n 's/.* __device_stub_\(_Z[A-Za-z0-9_]*\)(.*/\1/p' | sort -u >"$compiled"
  if [[ ! -s $compiled ]]; then
    echo "nm finds no kernel in $library" >&2
    exit 1
  fi
  echo "compiled CUDA kernels by launches:"
  awk -F'\t' '
    FILENAME == ARGV[1] { count[$1] = 0; next }
    $1 == "launched" { count[$2] += $3 }
    END {
      for (kernel in count) {
        printf "%10d  %s\n", count[kernel], kernel | "sort -k2 | c++filt"
        if (count[kernel] == 0) missing++
      }
      close("sort -k2 | c++filt")
      if (missing) printf "%d compiled CUDA kernels were not launched\n", missing
      exit missing > 0
    }' "$compiled" "${records[@]}" || status=1
fi
exit $status

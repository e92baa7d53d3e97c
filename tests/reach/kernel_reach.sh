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

# Prints each kernel with its count, by name. Reads lines "has <tab> kernel" and "<verb> <tab> kernel <tab> count".
count_kernels() {  # <verb> <what was not done> <file>...
  local verb=$1 undone=$2
  shift 2
  awk -F'\t' -v verb="$verb" -v undone="$undone" '
    $1 == "has" && !($2 in count) { count[$2] = 0 }
    $1 == verb { count[$2] += $3 }
    END {
      list = "sort -k2 | c++filt"
      for (kernel in count) {
        printf "%10d  %s\n", count[kernel], kernel | list
        if (count[kernel] == 0) missing++
      }
      close(list)
      if (missing) printf "%d kernels were not %s\n", missing, undone
      exit missing > 0
    }' "$@"
}

status=0
count_kernels reached reached "${records[@]}" || status=1
if [[ -n $library ]]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  # nvcc leaves one host function __device_stub_<mangled name of the kernel> for each.
  nm -C "$library" 2>/dev/null | sed -n 's/.* __device_stub_\(_Z[A-Za-z0-9_]*\)(.*/has\t\1/p' | sort -u >"$work/compiled"
  if [[ ! -s $work/compiled ]]; then
    echo "nm finds no kernel in $library" >&2
    exit 1
  fi
  cat "${records[@]}" | grep '^launched' >"$work/launched" || true
  echo "compiled CUDA kernels by launches:"
  count_kernels launched launched "$work/compiled" "$work/launched" || status=1
fi
exit $status

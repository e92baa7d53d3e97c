#!/usr/bin/env bash
# Whether compiled CUDA kernels hold copies that the device refuses: exit status 1 when they do, 77 without cuobjdump.
#
#   machine_code.sh LIBRARY [CUOBJDUMP]
#
# LIBRARY: libbifolio_cuda.a, or an object of it. ptxas 13.0 wrote some copies to shared memory (LDGSTS) whose address
# has a uniform register beside the others, with an odd one as the descriptor. No device takes that: the kernel ends in
# an illegal instruction. No compiler says so, and a machine without a GPU does not notice.
set -euo pipefail
library=${1:?usage: machine_code.sh LIBRARY [CUOBJDUMP]}
cuobjdump=${2-$(command -v cuobjdump || ls /usr/local/cuda/bin/cuobjdump 2>/dev/null || true)}
if [[ -z $cuobjdump ]]; then
  echo "SKIPPED: there is no cuobjdump here"
  exit 77
fi
"$cuobjdump" -sass "$library" | awk '
  $1 == "Function" { kernel = $3 }
  /LDGSTS/ {
    ++copies
    if (/\+UR/ || /desc\[UR[0-9]*[13579]\]/) { ++bad[kernel]; ++refused }
  }
  END {
    for (kernel in bad) printf "%d copies of a refused form: %s\n", bad[kernel], kernel
    if (copies == 0) { print "no copies at all: is this the library?"; exit 1 }
    printf "%d of %d copies have a form that devices refuse\n", refused, copies
    exit refused > 0
  }'

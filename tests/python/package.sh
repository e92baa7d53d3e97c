#!/usr/bin/env bash
# package.sh <source dir> <instruction set>...
set -uo pipefail
cd "$1" || exit 1
shift
isas=$(IFS=';'; echo "$*")
tools/wheel "-DBIFOLIO_ISAS=$isas"
status=$?
if ((status == 3)); then
  echo "SKIPPED: the packages that build a wheel could not be installed"
  exit 77
fi
exit "$status"

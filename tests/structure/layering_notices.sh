#!/usr/bin/env bash
# layering_notices.sh <source dir> <scratch dir>
#
# Breaks one rule at a time in a copy of the tree and expects layering.sh to see it.
set -euo pipefail
source=$1 scratch=$2
here=$(dirname "${BASH_SOURCE[0]}")
rm -rf "$scratch"
mkdir -p "$scratch"
cp -r "$source/include" "$source/src" "$scratch"
bash "$here/layering.sh" "$scratch" >/dev/null || { echo "the untouched tree is refused"; exit 1; }

expect_complaint() {  # <file> <line to add>
  local file=$scratch/$1
  [[ -e $file ]] || { echo "$1 is gone; choose another file"; exit 1; }
  cp "$file" "$scratch/kept"
  echo "$2" >>"$file"
  if bash "$here/layering.sh" "$scratch" >/dev/null; then
    echo "not noticed: $2 in $1"
    exit 1
  fi
  cp "$scratch/kept" "$file"
}
expect_complaint include/bifolio/types.hpp '#include <bifolio/block_pool.hpp>'
expect_complaint include/bifolio/step.hpp '#include <bifolio/backend.hpp>'
expect_complaint include/bifolio/backend.hpp '#include <bifolio/scheduler.hpp>'
expect_complaint src/common/base/error.cpp '#include "cpu/executors.hpp"'
expect_complaint src/common/cache/manager.cpp '#include "common/engine/backend_registry.hpp"'
expect_complaint src/cuda/host/attention.cpp '#include "cpu/isa.hpp"'
expect_complaint src/cpu/executor.cpp '#include <bifolio/kv_cache_manager.hpp>'
expect_complaint src/cpu/executor.cpp '#include <omp.h>'
expect_complaint src/cpu/serial_executor.cpp '#include <xsimd/xsimd.hpp>'
echo "every broken rule was noticed"

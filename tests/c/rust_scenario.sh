#!/usr/bin/env bash
# rust_scenario.sh <rustc> <source dir> <library dir> <scratch dir> <reference>
#
# Builds the crate of bindings/rust, its own tests and its scenario with rustc alone, runs them, and compares the
# scenario's output.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
rustc=$1 source=$2 library=$3 scratch=$4 reference=$5
[[ -n $rustc && $rustc != *NOTFOUND && -x $rustc ]] || { echo "SKIPPED: rustc is not installed"; exit 77; }
mkdir -p "$scratch"
crate=$source/bindings/rust
flags=(--edition 2021 -D warnings -L "native=$library" -C "link-arg=-Wl,-rpath,$library" --out-dir "$scratch")
"$rustc" "${flags[@]}" -O --crate-type rlib --crate-name bifolio "$crate/src/lib.rs"
"$rustc" "${flags[@]}" --test --crate-name bifolio_tests "$crate/src/lib.rs"
"$rustc" "${flags[@]}" -O -L "$scratch" --extern "bifolio=$scratch/libbifolio.rlib" --crate-name rust_scenario \
  "$crate/examples/scenario.rs"
"$scratch/bifolio_tests" --quiet
bash "$here/same_output.sh" "$reference" "$scratch/rust_scenario"

#!/usr/bin/env bash
# go_scenario.sh <go> <source dir> <library dir> <scratch dir> <reference>
#
# Builds the module of bindings/go and its scenario without a network, runs the module's tests, and compares the
# scenario's output.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
go=$1 source=$2 library=$3 scratch=$4 reference=$5
[[ -n $go && $go != *NOTFOUND && -x $go ]] || { echo "SKIPPED: go is not installed"; exit 77; }
mkdir -p "$scratch"
export GOCACHE=$scratch/cache GOPATH=$scratch/path GOFLAGS=-mod=mod GOPROXY=off GO111MODULE=on CGO_ENABLED=1
# go's cache knows the flags of C code, and not the headers outside of the module.
sum=$(cksum <"$source/include/bifolio/c/bifolio.h" | cut -d ' ' -f 1)
export CGO_CFLAGS="-I$source/include -DBIFOLIO_HEADER_SUM=$sum" CGO_LDFLAGS="-L$library -Wl,-rpath,$library"
cd "$source/bindings/go"
"$go" vet ./...
"$go" test -count=1 ./...
"$go" build -o "$scratch/go_scenario" ./scenario
bash "$here/same_output.sh" "$reference" "$scratch/go_scenario"

#!/usr/bin/env bash
# abi.sh <abidiff> <abidw> <C compiler> <source dir> <build dir>: programs that were built with the header of this minor
# version still run, compared with tests/c/bifolio_c.abi. abi.sh --write <source dir>: writes that file anew, for a new
# minor version, or after a change that programs survive (a field at the end of a struct that begins with `size`).
#
# What is compared is a library made of the header alone: its functions with empty bodies, and a variable as long as
# each constant says. That the real library has just these functions is c_exports' to say.
set -uo pipefail
skip() { echo "SKIPPED: $1"; exit 77; }
if [[ $1 == --write ]]; then
  abidiff=abidiff abidw=abidw cc=gcc source=$2 build=$(mktemp -d) writes=1
else
  abidiff=$1 abidw=$2 cc=$3 source=$4 build=$5 writes=0
fi
for tool in "$abidiff" "$abidw"; do
  command -v "$tool" >/dev/null || skip "there is no abidiff here (Debian's abigail-tools)"
done
[[ $("$cc" -dumpmachine) == x86_64-linux* || $("$cc" -dumpmachine) == x86_64-*-linux* ]] || skip "the file is of x86-64"
expected=$source/tests/c/bifolio_c.abi
rm -rf "$build"
mkdir -p "$build"

# library <header> <name>: build/name.so. -aux-info gives one declaration a line, of the compiler's own reading.
library() {
  local header=$1
  echo "#include \"$header\"" >"$build/header.c"
  "$cc" -std=c99 -aux-info "$build/$2.declared" -fsyntax-only "$build/header.c" 2>/dev/null ||
    skip "$cc does not list declarations, as GCC does"
  {
    cat "$build/header.c"
    sed -nE 's|^/\* .*:[0-9]+:NC \*/ extern (.*\bbifolio_[a-z_]+ \(.*\));$|\1 { __builtin_trap(); }|p' "$build/$2.declared"
    "$cc" -std=c99 -E -P "$build/header.c" | tr '\n' ' ' | grep -oE 'enum \{[^}]*\}' | grep -oE '\bBIFOLIO_[A-Z0-9_]+' |
      sort -u | sed 's/.*/char bifolio_value_of_&[1000 + &];/'
  } >"$build/$2.c"
  (cd "$build" && "$cc" -std=c2x -g -fPIC -shared -o "$2.so" "$2.c") || exit 1  # without the path of the folder
}

header=$source/include/bifolio/c/bifolio.h
library "$header" now
if ((writes)); then
  "$abidw" --no-corpus-path --no-show-locs --no-comp-dir-path --no-elf-needed --no-parameter-names --out-file "$expected" "$build/now.so"
  status=$?
  rm -rf "$build"
  exit "$status"
fi
# New functions and constants are for new programs.
"$abidiff" --no-added-syms "$expected" "$build/now.so" || {
  echo "programs that were built with an earlier header of this minor version see another interface (CONTRIBUTING.md says what is allowed)"
  exit 1
}

# Would it notice? Each of these breaks programs.
flaws=('s/int32_t sliding_window;/int64_t sliding_window;/' 's/int64_t num_cached_tokens;/int64_t others, num_cached_tokens;/'
  's/BIFOLIO_NEVER = 2,/BIFOLIO_NEVER = 5,/' 's/typedef uint64_t bifolio_seq;/typedef int64_t bifolio_seq;/'
  's/bifolio_pool_digest(/bifolio_pool_hash(/')
for flaw in "${flaws[@]}"; do
  sed "$flaw" "$header" >"$build/flawed.h"
  cmp -s "$header" "$build/flawed.h" && { echo "the flaw $flaw changes nothing"; exit 1; }
  library "$build/flawed.h" flawed
  "$abidiff" --no-added-syms "$expected" "$build/flawed.so" >/dev/null && { echo "$flaw was not noticed"; exit 1; }
done
echo "as in $expected; ${#flaws[@]} made-up changes were noticed"

#!/usr/bin/env bash
# includes.sh <source dir> <include-what-you-use> <include option>...
#
# Each public header includes what it uses and nothing else. Forward declarations are left to the author. Not looked at
# are the umbrella header, and prefix_index.hpp, whose vector extensions the tool does not know.
set -euo pipefail
source=$1 tool=$2
shift 2
# What the tool asks for differs between its versions.
version=$("$tool" --version | sed -nE 's/^include-what-you-use ([0-9.]+).*/\1/p')
if [[ $version != 0.18 ]]; then
  echo "SKIPPED: include-what-you-use is $version, the headers are kept to what 0.18 says"
  exit 77
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Allowed: <version> for a macro that it defines, and <chrono> for what libstdc++ has in a part of it.
allowed='trace.hpp: (add #include <bits/chrono.h>|remove #include <chrono>)|tensor_view.hpp: remove #include <version>'
# A declared type counts as enough; the tool would have its header included.
declared='cache_engine.hpp: add .*(copy_audit|rotate_append).hpp|kv_cache_config.hpp: add .*copy_audit.hpp|model_cache.hpp: add .*rotate_append.hpp'

also=()
count=0
for path in "$source"/include/bifolio/*.hpp "$source"/include/bifolio/detail/*.hpp; do
  name=${path#"$source"/include/}
  case $name in bifolio/bifolio.hpp | bifolio/detail/prefix_index.hpp) continue ;; esac
  also+=(-Xiwyu "--check_also=$path")
  echo "#include <$name>" >>"$scratch/all.cpp"
  count=$((count + 1))
done
status=0
"$tool" -std=c++20 "$@" -Xiwyu --no_fwd_decls -Xiwyu --no_comments -Xiwyu --quoted_includes_first "${also[@]}" \
  "$scratch/all.cpp" >"$scratch/report" 2>&1 || status=$?
# It ends with 2 when it has something to say.
if ((status != 0 && status != 2)) || grep -qE 'error:|Assertion' "$scratch/report"; then
  cat "$scratch/report"
  exit 1
fi
found=$(awk -v prefix="$source/include/" '
  / should (add|remove) these lines:$/ {
    name = substr($1, length(prefix) + 1)
    what = index($1, prefix) == 1 ? $3 : ""
    next
  }
  /^The full include-list|^---/ { what = "" }
  what != "" && /^(- )?#include/ { sub(/^- /, ""); sub(/ *\/\/.*/, ""); print name ": " what " " $0 }' "$scratch/report" |
  grep -vE "$allowed|$declared" || true)
echo "$count headers"
((count > 20)) || exit 1
[[ -z $found ]] || { echo "$found"; exit 1; }

#!/usr/bin/env bash
# house_rules.sh <source dir>
#
# No flag that changes what numbers mean or that ties a binary to this machine; every source file starts with its
# licence, every header with #pragma once; no whitespace at line ends; the library's names lie in its ABI's namespace.
set -euo pipefail
cd "$1"
bad=0
complain() { printf '%s:\n%s\n' "$1" "$2"; bad=1; }

sources=$(find include src tests examples bench tools -type f \
  \( -name '*.hpp' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' -o -name '*.h' \) | sort)
builds=$(find CMakeLists.txt CMakePresets.json cmake src tests examples bench tools .ci -type f \
  \( -name CMakeLists.txt -o -name '*.cmake' -o -name '*.json' -o -path '*/.ci/run' -o -name 'test' -o -name 'demo' \) | sort)

flags='-march=native|-mtune=native|-mcpu=native|-Ofast|fast-math|-funsafe-math|-ffinite-math|add_compile_options|add_definitions|include_directories\(|link_libraries\('
found=$(xargs grep -nE -e "$flags" <<<"$builds" | grep -vE 'target_(include_directories|link_libraries)\(' || true)
[[ -z $found ]] || complain "native, fast-math or directory-wide flags" "$found"
found=$(xargs grep -nE '(pragma|attribute).*(fast-math|Ofast)' <<<"$sources" || true)
[[ -z $found ]] || complain "fast-math inside a source" "$found"

found=$(while read -r file; do head -n 1 "$file" | grep -q '^// SPDX-License-Identifier: Apache-2.0$' || echo "$file"; done <<<"$sources")
[[ -z $found ]] || complain "first line is not the licence" "$found"
found=$(grep -E '\.(hpp|cuh|h)$' <<<"$sources" | xargs grep -L '^#pragma once$' || true)
[[ -z $found ]] || complain "no #pragma once" "$found"
found=$(printf '%s\n' "$sources" "$builds" | xargs grep -nE '[[:blank:]]+$' || true)
[[ -z $found ]] || complain "whitespace at the end of a line" "$found"

# The library's names lie in an inline namespace of the version that last changed the ABI, so that two versions linked
# into one program meet as different symbols instead of one definition each at random.
abi=$(sed -nE 's/^  VERSION ([0-9]+)\.([0-9]+)\..*/v\1_\2/p' CMakeLists.txt)
found=$(grep -E '^(include|src)/' <<<"$sources" | xargs grep -nE '^namespace bifolio' | grep -vE "namespace bifolio::inline $abi( |::)" || true)
[[ -z $found ]] || complain "not in bifolio's inline namespace $abi" "$found"

count=$(wc -l <<<"$sources")
echo "$count source files looked at"
((count > 20)) || exit 1
exit $bad

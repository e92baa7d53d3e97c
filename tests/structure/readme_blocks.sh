#!/usr/bin/env bash
# readme_blocks.sh <page> <output dir> <most lines> [output]
#
# Writes the first ```cpp block to program.cpp, which may have that many lines, and with "output" the first ```text block
# after it to output.txt, each only when its contents changed.
set -euo pipefail
readme=$1 out=$2 most=$3
mkdir -p "$out"
block() {  # <language> <file>: the first block of that language, text only after a cpp block
  awk -v want="$1" '
    /^```/ && inside { if (hit) exit; inside = 0; next }
    /^```/ { inside = 1; language = substr($0, 4); if (language == "cpp") cpp = 1; hit = language == want && cpp; next }
    inside && hit' "$readme" >"$out/$2.new"
  [[ -s $out/$2.new ]] || { echo "$readme has no \`\`\`$1 block"; exit 1; }
  cmp -s "$out/$2.new" "$out/$2" || cp "$out/$2.new" "$out/$2"
  rm "$out/$2.new"
}
block cpp program.cpp
[[ ${4-} != output ]] || block text output.txt
lines=$(wc -l <"$out/program.cpp")
((lines <= most)) || { echo "the program of $readme has $lines lines"; exit 1; }

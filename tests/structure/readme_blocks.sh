#!/usr/bin/env bash
# readme_blocks.sh <README.md> <output dir>
#
# Writes the first ```cpp block to program.cpp and the first ```text block after it to output.txt, each only when its
# contents changed.
set -euo pipefail
readme=$1 out=$2
mkdir -p "$out"
block() {  # <language> <file>: the first block of that language, text only after a cpp block
  awk -v want="$1" '
    /^```/ && inside { if (hit) exit; inside = 0; next }
    /^```/ { inside = 1; language = substr($0, 4); if (language == "cpp") cpp = 1; hit = language == want && cpp; next }
    inside && hit' "$readme" >"$out/$2.new"
  [[ -s $out/$2.new ]] || { echo "README.md has no \`\`\`$1 block"; exit 1; }
  cmp -s "$out/$2.new" "$out/$2" || cp "$out/$2.new" "$out/$2"
  rm "$out/$2.new"
}
block cpp program.cpp
block text output.txt
lines=$(wc -l <"$out/program.cpp")
((lines <= 20)) || { echo "README's program has $lines lines"; exit 1; }

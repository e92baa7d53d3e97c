#!/usr/bin/env bash
# commands.sh <source dir> <work dir> <python> <program>...
#
# Every command that README and the pages show runs from a clean folder, with the built programs in the path: the lines of
# blocks marked sh, and those after "$ " in blocks marked text, which also say what they print: every line shown is in the
# output, numbers to three decimals, but for those that name the machine. Data that a page only names is made here. What
# runs elsewhere, or cannot run in a test, is in commands_elsewhere.txt, with the reason.
set -euo pipefail
source=$1 work=$2 python=$3
shift 3
rm -rf "$work" && mkdir -p "$work/bin" && cd "$work"
for program in "$@"; do ln -s "$program" "bin/$(basename "$program")"; done
export PATH=$work/bin:$PATH
ln -s "$source"/{examples,tests,tools} .
mkdir -p build/release/examples/generate && ln -s "$(command -v generate)" build/release/examples/generate/

# The data.
"$python" - <<'PY'
import json, random
draw = random.Random(1)
with open("conversation_trace.jsonl", "w") as trace:
    for i in range(400):
        ids = list(range(draw.randrange(4))) + [100 * i + j for j in range(draw.randrange(1, 6))]
        trace.write(json.dumps({"timestamp": 300 * i, "input_length": 512 * len(ids), "output_length": draw.randrange(1, 60),
                                "hash_ids": ids}) + "\n")
with open("AzureLLMInferenceTrace_conv.csv", "w") as trace:
    trace.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    for i in range(200):
        trace.write(f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0000000,{draw.randrange(1, 900)},{draw.randrange(1, 90)}\n")
with open("prompts.txt", "w") as prompts:
    prompts.write("In the beginning\nAnd it came to pass\n")
PY

# A line for each command; a loop is one command.
commands() {  # <page>
  awk '
    /^```/ && inside { inside = 0; next }
    /^```/ { inside = 1; kind = substr($0, 4); next }
    !inside { next }
    kind == "sh" && /^for / { loop = $0; next }
    kind == "sh" && loop != "" { loop = loop (loop ~ /do$/ ? " " : "; ") $0; if ($0 == "done") { print loop; loop = "" } next }
    kind == "sh" && NF { print; next }
    kind == "text" && /^\$ / { print substr($0, 3) }' "$1"
}
expected() {  # <page> <command>: the lines that the page shows after it
  COMMAND="\$ $2" awk '
    /^```/ { inside = !inside; hit = 0; next }
    inside && /^\$ / { hit = $0 == ENVIRON["COMMAND"]; next }
    inside && hit && NF && !/^(model|cache): / { print }' "$1"
}
rounded() { sed -E 's/([0-9]\.[0-9]{3})[0-9]+/\1/g; s/ +$//'; }

elsewhere=$source/tests/structure/commands_elsewhere.txt
declare -A used=()
bad=0 count=0 left=0
cd "$source"
pages=$(find README.md examples docs -name '*.md' | sort)
cd "$work"
while read -r page; do
  while IFS= read -r command; do
    skip=
    while IFS='|' read -r beginning reason; do
      [[ $beginning == \#* || -z $beginning ]] && continue
      if [[ $command == "$beginning"* ]]; then skip=$reason used[$beginning]=1; break; fi
    done <"$elsewhere"
    if [[ -n $skip ]]; then left=$((left + 1)); continue; fi
    count=$((count + 1))
    if ! timeout 120 bash -e -o pipefail -c "$command" </dev/null >out 2>&1; then
      echo "$page: this command failed: $command"
      tail -n 5 out
      bad=1
      continue
    fi
    rounded <out >rounded
    while IFS= read -r line; do
      grep -qxF -- "$line" rounded || { echo "$page: '$command' does not print: $line"; bad=1; }
    done < <(expected "$source/$page" "$command" | rounded)
  done < <(commands "$source/$page")
done <<<"$pages"
while IFS='|' read -r beginning reason; do
  [[ $beginning == \#* || -z $beginning || -n ${used[$beginning]-} ]] ||
    { echo "commands_elsewhere.txt: no page shows '$beginning'"; bad=1; }
done <"$elsewhere"
echo "$count commands ran, $left run elsewhere"
((count > 0)) || exit 1
exit $bad

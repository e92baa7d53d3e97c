#!/usr/bin/env bash
# isa_isolation.sh <nm> <isa> <object>...
#
# A kernel object of one instruction set may show the linker only tables (`bifolio::v<ABI>::cpu::<isa>::..._table`) and their
# accessor `bifolio::v<ABI>::cpu::<isa>::kernels()`. A weak symbol (an inline function, a template instance, a vtable) could be
# the copy that the linker keeps for everyone, and a machine without that instruction set would then die in it. For the
# same reason it may call nothing in C++ outside its own namespace.
set -euo pipefail
nm=$1 isa=$2
shift 2
bad=0
seen=0
for object in "$@"; do
  symbols=$("$nm" -C "$object")
  # Columns: [address] type name
  problems=$(awk -v own="^bifolio::v[0-9_]+::cpu::$isa::" '
    { line = $0; sub(/^[0-9a-f]* */, "", line); type = substr(line, 1, 1); name = substr(line, 3) }
    type ~ /[WwVvu]/ && name !~ /^__asan|^__ubsan|^__tsan/ { print "weak: " name; next }
    type ~ /[TRDBGSC]/ && name !~ (own "([a-z0-9_]*_table|kernels[(][)])$") {
      print "visible: " name; next }
    type == "U" && name ~ /::|\(/ && name !~ own { print "needs: " name }
  ' <<<"$symbols")
  if [[ -n $problems ]]; then
    printf '%s\n' "$object:" "$problems"
    bad=1
  fi
  seen=$((seen + 1))
done
if ((seen == 0)); then
  echo "no object of $isa was given"
  exit 1
fi
((bad == 0)) && echo "$seen objects of $isa show tables alone"
exit $bad

#!/bin/sh
# exit_code.sh <expected> <text to find in the output, may be empty> <command>...
expected=$1 text=$2
shift 2
output=$("$@")
code=$?
echo "$output"
if [ "$code" -ne "$expected" ]; then
  echo "exit code $code instead of $expected"
  exit 1
fi
case $output in
  *"$text"*) ;;
  *) echo "no '$text' in the output"; exit 1 ;;
esac

#!/usr/bin/env bash
# readme_program.sh <program> <expected output>
set -euo pipefail
"$1" | tee /dev/stderr | diff "$2" - && echo "README's program says what README says"

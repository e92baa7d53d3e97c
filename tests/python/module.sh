#!/usr/bin/env bash
# module.sh <source dir> <folder> <module> <Python> [argument of pytest]...: the tests of the Python package over the
# module of a build, without a wheel: `folder` gets a package of it and the sources.
set -uo pipefail
cd "$1" || exit 1
source=$PWD folder=$2 module=$3 python=$4
shift 4
"$python" -c 'import numpy, pytest' 2>/dev/null || { echo "SKIPPED: $python has no numpy and pytest"; exit 77; }
rm -rf "$folder"
mkdir -p "$folder" && cp -r python/bifolio "$folder" && cp "${module%/*}"/_core* "$folder/bifolio/" || exit 1
(($#)) || set -- "$source/python/tests"
cd "$folder" && PYTHONPATH=$folder "$python" -m pytest -q -p no:cacheprovider -rs "$@"

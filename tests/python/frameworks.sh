#!/usr/bin/env bash
# frameworks.sh <source dir>: the wheel that python_package built, with what needs PyTorch and transformers, under the
# Python that has them: BIFOLIO_FRAMEWORKS_PYTHON, or python3.
set -uo pipefail
cd "$1" || exit 1
python=${BIFOLIO_FRAMEWORKS_PYTHON-python3}
skip() { echo "SKIPPED: $1"; exit 77; }
wheel=$(ls -t build/wheel/*.whl 2>/dev/null | head -n 1)
[[ -n $wheel ]] || skip "there is no wheel; python_package builds it"
"$python" -c 'import torch, transformers' 2>/dev/null ||
  skip "$python does not have torch and transformers (pip install torch transformers)"
site=$PWD/build/wheel/site
rm -rf "$site"
"$python" -m pip install --quiet --upgrade --target "$site" --no-deps "$wheel" &&
  "$python" -m pip install --quiet --target "$site" pytest mypy pyzmq msgspec ml_dtypes ||
  skip "the wheel and the packages of its tests could not be installed for $python"
# Its own NumPy goes with torch, not the one that ml_dtypes brought.
rm -rf "$site"/numpy "$site"/numpy-* "$site"/numpy.libs
cd build/wheel && PYTHONPATH=$site "$python" -m pytest -q -p no:cacheprovider -rs "$OLDPWD/python/tests"

# SPDX-License-Identifier: Apache-2.0
"""The annotations of the package, by mypy."""

import os
import subprocess
import sys

import bifolio as bf
import pytest

pytest.importorskip("mypy", reason="mypy is not installed")


def mypy(*arguments, cwd):
    # Mypy gets a folder with this package alone: beside it may lie modules that mypy takes from its own library.
    alone = cwd / "alone"
    if not alone.exists():
        alone.mkdir()
        (alone / "bifolio").symlink_to(os.path.dirname(bf.__file__), target_is_directory=True)
    return subprocess.run([sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", "--follow-imports=silent",
                           "--no-error-summary", *arguments], capture_output=True, text=True, cwd=cwd,
                          env={**os.environ, "MYPYPATH": str(alone)})


def test_the_package_is_typed(tmp_path):
    # hf.py is left out: its classes come from transformers, which has annotations of its own to check.
    folder = os.path.dirname(bf.__file__)
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(".py") and name != "hf.py"]
    done = mypy(*(os.path.join("alone", "bifolio", name) for name in names), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_programs_that_use_it_wrongly_are_found(tmp_path):
    good = "import bifolio as bf\nc = bf.Cache(layers=1, q_heads=1, kv_heads=1, head_dim=8)\n"
    cases = {"c.open([1]).tokens[0].bit_length(); c.stats().cache.num_blocks + 1": True,
             "bf.Scheduler(c).submit([1], on_token=lambda t: print(t.token)) + 1": True,
             "{c.step([]).graph_key: 1}.get(None)": True, "c.step([]).graph_key + 1": False,
             "c.opne([1])": False, "bf.Cache(layers='two', q_heads=1, kv_heads=1, head_dim=8)": False,
             "c.open([1]).num_cached.upper()": False}
    for line, is_right in cases.items():
        (tmp_path / "program.py").write_text(good + line + "\n", encoding="utf-8")
        done = mypy("program.py", cwd=tmp_path)
        assert (done.returncode == 0) == is_right, (line, done.stdout, done.stderr)

# SPDX-License-Identifier: Apache-2.0
"""docs/python.md: every block of Python runs, one after another, in one program."""

import importlib.util
import json
import os
import pathlib
import re

import bifolio as bf
import numpy as np
import pytest

try:
    import torch
except ImportError:
    torch = None

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"
LAYERS, Q_HEADS, KV_HEADS, DIM, VOCAB = 32, 32, 8, 128, 100


def as_bits(array):
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


class layer_of_a_model:
    """Projections that depend on positions alone, in bfloat16: PyTorch's where it is, else NumPy's bits."""

    made = None

    def qkv(self, x, positions):
        positions = np.asarray(positions)
        if self.made is not None and np.array_equal(self.made[0], positions):
            return self.made[1]
        made = []
        for heads in (Q_HEADS, KV_HEADS, KV_HEADS):
            rows = np.sin(positions[:, None, None] * 0.1 + np.arange(heads)[None, :, None] + np.arange(DIM)[None, None, :])
            made.append(torch.from_numpy(rows).bfloat16() if torch is not None else as_bits(rows))
        layer_of_a_model.made = (positions, made)  # alike in all layers
        return made

    def out(self, x, attended):
        assert type(attended) is (torch.Tensor if torch is not None else np.ndarray)
        assert attended.shape[1:] == (Q_HEADS, DIM)
        return attended


def given():
    """What the page's programs take as given."""
    model = [layer_of_a_model() for _ in range(LAYERS)]

    def run_model(step):
        for i in (0, LAYERS - 1):  # a shallow model: 128 steps of 32 layers take their time
            x = step.attend(i, *model[i].qkv(None, step.positions))
        rows = np.asarray(step.sample_rows)
        logits = np.zeros((len(rows), VOCAB), np.float32)
        logits[np.arange(len(rows)), (np.asarray(step.positions)[rows] * 7 + x.shape[0]) % VOCAB] = 1
        return logits

    rng = np.random.default_rng(1)
    # Of the three sequences of the first step: the arrays of `attention` go with the q of its last layer.
    lens = np.array([300, 301, 301], np.int32)
    tables = np.arange(57, dtype=np.int32).reshape(3, 19)
    k_cache, v_cache = (rng.normal(size=(57, KV_HEADS, 16, DIM)).astype(np.float32) for _ in range(2))
    as_type = (lambda array: torch.from_numpy(array).bfloat16()) if torch is not None else as_bits
    parts = rng.normal(size=(6, Q_HEADS, 64)).astype(np.float32), rng.normal(size=(6, Q_HEADS)).astype(np.float32)
    names = dict(model=model, run_model=run_model, x=None, prompt_ids=np.arange(300) % VOCAB, t1=5, t2=6,
                 block_tables=tables, k_cache=as_type(k_cache), v_cache=as_type(v_cache), seq_lens=lens,
                 query_start_loc=np.concatenate([[0], np.cumsum(lens)]).astype(np.int32))
    names["out1"], names["lse1"] = names["out2"], names["lse2"] = parts
    return names


def write_trace(path):
    with open(path, "w", encoding="utf-8") as file:
        for i in range(60):
            ids = [j % 7 * 100 + j for j in range(i % 7, i % 7 + 4)]
            file.write(json.dumps(dict(timestamp=100 * i, input_length=2000, output_length=50, hash_ids=ids)) + "\n")


def blocks_of_python():
    if not PAGE.exists():
        pytest.skip("the documents are not next to the tests")
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_programs_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_trace("conversation.jsonl")
    names = given()
    ran = 0
    for block in blocks_of_python():
        if "transformers" in block and importlib.util.find_spec("transformers") is None:
            continue
        if "import torch" in block and torch is None:
            continue
        exec(compile(block, f"docs/python.md, block {ran + 1}", "exec"), names)
        ran += 1
    assert ran >= 3
    # What the first block, the sketch of the package, left behind.
    assert names["sched"].stats().scheduler.num_finished == 4
    assert capsys.readouterr().out.count("Token(request=") == 4 * 128
    assert names["out"].shape == (6, Q_HEADS, 64) and repr(names["a"]).startswith("Sequence(0, 300 tokens")
    assert len(names["b"].tokens) == 301 and names["b"].pending == []


def test_drawings_and_replays(tmp_path):
    write_trace(tmp_path / "trace.jsonl")
    said = bf.replay(tmp_path / "trace.jsonl", blocks=[8, 64], policies=["lru", "s3_fifo"], cache_only=True)
    assert [(row["policy"], row["blocks"]) for row in said.rows] == [("lru", 8), ("lru", 64), ("s3_fifo", 8), ("s3_fifo", 64)]
    assert said.rows[1]["hit_rate"] >= said.rows[0]["hit_rate"]
    assert "| lru" in repr(said) and said.html().lstrip().lower().startswith("<!doctype html")
    plot = said.plot()
    assert plot.startswith("<svg") and plot._repr_svg_() == plot
    plot.save(str(tmp_path / "plot.svg"))
    assert os.path.getsize(tmp_path / "plot.svg") == len(plot.encode())
    with pytest.raises(bf.Error, match="policy is 'best'"):
        bf.replay(tmp_path / "trace.jsonl", blocks=[8], policies=["best"])
    with pytest.raises(bf.Error, match="nowhere"):
        bf.replay("nowhere.jsonl", blocks=[8])
    cache = bf.Cache(layers=1, q_heads=1, kv_heads=1, head_dim=8, blocks=6, block_size=4, host_memory="1KiB")
    a = cache.open(range(7))
    before = cache.map()
    assert before.startswith("<svg")
    a.free()
    assert before.count(">A<") == cache.map().count(">A<") + 2  # its two blocks; the legend has one more

# SPDX-License-Identifier: Apache-2.0
"""The package as its users meet it: NumPy always, PyTorch where it is installed."""

import dataclasses
import gc
import json
import shutil
import subprocess

import bifolio as bf
import numpy as np
import pytest
from support import DIM, KV_HEADS, LAYERS, Q_HEADS, expected, make, rows, run

try:
    import torch
except ImportError:
    torch = None

def test_prompts_forks_and_decodes_agree_with_float64():
    cache = make()
    a = cache.open([5, 6, 7, 8, 9, 10], salt="tenant-7")
    assert repr(a) == "Sequence(0, 6 tokens, 0 cached)"
    b, c = a.fork(), a.fork()
    with cache.step([a, b.append(1), c.append(np.array([2, 3]))]) as step:
        out = run(step)
        assert isinstance(out, np.ndarray) and out.dtype == np.float32
        assert np.asarray(step.sample_rows).tolist() == [5, 12, 20]
    texts = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10, 1], [5, 6, 7, 8, 9, 10, 2, 3]]
    np.testing.assert_allclose(out, np.concatenate([expected(text) for text in texts]), atol=2e-6)
    with cache.step([a.append(4), c.append(4)]) as step:
        out = run(step)
    np.testing.assert_allclose(out[0], expected(texts[0] + [4])[-1], atol=2e-6)
    np.testing.assert_allclose(out[1], expected(texts[2] + [4])[-1], atol=2e-6)
    assert len(a) == 7 and a.pending == [] and c.tokens == [5, 6, 7, 8, 9, 10, 2, 3, 4]
    cache.check()


def test_a_prompt_is_found_again_in_its_scope_and_swapped_sequences_go_on():
    cache = make()
    prompt = list(range(10))
    with cache.step([cache.open(prompt, salt="x")]) as step:
        run(step)
    del step
    gc.collect()  # the sequence is gone, its blocks are cached
    assert cache.stats().cache.num_used_blocks == 0
    assert cache.open(prompt, salt="y").num_cached == 0
    again = cache.open(prompt, salt="x")
    assert again.num_cached == 8 and again.pending == [8, 9]
    with cache.step([again]) as step:
        np.testing.assert_allclose(run(step), expected(prompt)[8:], atol=2e-6)
    cache.swap_out([again])
    assert cache.stats().cache.num_swapped_sequences == 1
    with pytest.raises(bf.Error, match="swapped out"):
        cache.step([again.append(3)])
    cache.swap_in([again])
    with cache.step([again]) as step:
        np.testing.assert_allclose(run(step)[-1], expected(prompt + [3])[-1], atol=2e-6)
    assert cache.stats().prefix.num_hit_blocks == 2


def test_drafts_are_accepted_in_part_and_a_body_that_raises_takes_nothing():
    cache = make()
    a = cache.open([1, 2, 3])
    with pytest.raises(ZeroDivisionError):
        with cache.step([a]):
            1 / 0
    assert a.pending == [1, 2, 3] and cache.stats().cache.num_tokens == 3
    with cache.step([a]) as step:
        run(step)
    step = cache.step([a.append([7, 8, 9])])
    run(step)
    assert repr(step) == "Step(1 sequences, 3 tokens, open)"
    step.commit([1])
    assert a.tokens == [1, 2, 3, 7] and a.pending == []
    with pytest.raises(bf.Error, match="ended"):
        step.commit()
    with cache.step([a.append(5)]) as step:
        np.testing.assert_allclose(run(step)[0], expected([1, 2, 3, 7, 5])[-1], atol=2e-6)
    a.truncate(2)
    assert a.tokens == [1, 2] and cache._core.num_committed(a._seq) == 2


def test_arrays_are_neither_copied_nor_changed():
    cache = make()
    with cache.step([cache.open([1, 2, 3])]) as step:
        q, k, v = (rows(step, 0, what, heads) for what, heads in ((0, Q_HEADS), (1, KV_HEADS), (2, KV_HEADS)))
        fused = np.concatenate([q, k, v], axis=1)  # slices of one array need no copy
        out = np.full_like(q, np.nan)
        pointer = out.ctypes.data
        given = step.attend(0, fused[:, :4], fused[:, 4:6], fused[:, 6:], out=out)
        assert given is out and out.ctypes.data == pointer and not np.isnan(out).any()
        np.testing.assert_array_equal(fused, np.concatenate([q, k, v], axis=1))
        np.testing.assert_array_equal(out, step.attend(0, q, k, v))
        half = step.attend(0, q, k, v, scale=0.0)  # uniform attention
        np.testing.assert_allclose(half[-1, 0], v[:, 0].mean(0), atol=1e-6)


def test_refusals_have_the_sentence_of_the_library():
    cache = make(host_memory=None)
    with pytest.raises(bf.OutOfBlocks) as never:
        cache.open(range(1000))
    assert not never.value.retry_later
    keep = cache.open(range(76))
    with pytest.raises(bf.OutOfBlocks) as later:
        cache.open(range(20))
    assert later.value.retry_later
    keep.free()
    assert repr(keep) == "Sequence(freed)"
    for call in (keep.free, keep.fork, lambda: keep.append(1), lambda: cache.step([keep])):
        with pytest.raises(bf.Error, match="freed") as freed:
            call()
        assert freed.value.code == "not_found"
    with pytest.raises(bf.Error, match="no rows"):
        cache.step([])
    with pytest.raises(bf.Error, match="'7 apples' is no size"):
        make(memory="7 apples")
    with pytest.raises(bf.Error, match="known|cpu"):
        make(device="gpu")
    a = cache.open([1, 2])
    with cache.step([a]) as step:
        q, kv = np.zeros((2, Q_HEADS, DIM), np.float32), np.zeros((2, KV_HEADS, DIM), np.float32)
        with pytest.raises(bf.Error, match="float32, float16 and bfloat16"):
            step.attend(0, q.astype(np.float64), kv, kv)
        with pytest.raises(bf.Error, match="next to each other"):
            step.attend(0, np.zeros((2, DIM, Q_HEADS), np.float32).transpose(0, 2, 1), kv, kv)
        with pytest.raises(bf.Error, match=r"shape \[4, 8\]|tokens, heads, head_dim"):
            step.attend(0, q[0], kv, kv, out=q)
        with pytest.raises(bf.Error, match="num_heads of q is 2; the plan was made for 4"):
            step.attend(0, q[:, :2], kv, kv)
        with pytest.raises(bf.Error, match="num_heads of k is 4; the cache has 2 KV heads"):
            step.attend(0, q, q, q)
        with pytest.raises(bf.Error, match="k has 1 rows; the step has 2 tokens"):
            step.attend(0, q, kv[:1], kv[:1])
        with pytest.raises(bf.Error, match="layer 5"):
            step.attend(5, q, kv, kv)
        with pytest.raises(bf.Error, match="soft_cap is -1"):
            step.attend(0, q, kv, kv, soft_cap=-1.0)
        with pytest.raises(bf.Error, match="not committed"):
            a.free()
        with pytest.raises(TypeError):
            step.attend(0, "q", kv, kv, out=q)


def test_halves_and_codes_with_scales():
    for kv_dtype, bound in (("f16", 2e-3), ("i8-token", 3e-2)):
        cache = make(kv_dtype=kv_dtype)
        with cache.step([cache.open([1, 2, 3, 4, 5])]) as step:
            np.testing.assert_allclose(run(step), expected([1, 2, 3, 4, 5]), atol=bound)


def test_merge_joins_two_halves():
    rng = np.random.default_rng(1)
    logits, v = rng.normal(size=(3, 2, 10)), rng.normal(size=(10, 2, 4))

    def part(of):
        weights = np.exp(logits[:, :, of])
        return (np.einsum("qhk,khd->qhd", weights, v[of]) / weights.sum(-1, keepdims=True)).astype(np.float32), \
            np.log(weights.sum(-1)).astype(np.float32)

    out, lse = bf.merge(*part(slice(0, 4)), *part(slice(4, 10)))
    whole, whole_lse = part(slice(0, 10))
    np.testing.assert_allclose(out, whole, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-6)
    with pytest.raises(bf.Error, match="lse1"):
        bf.merge(out, lse[:, :1], out, lse)


def test_counters_as_metrics():
    cache = make()
    text = bf.metrics_text(cache, model="tiny", rank="0")
    assert '\nbifolio_blocks{model="tiny",rank="0"} 20\n' in text
    with pytest.raises(bf.Error, match="label"):
        bf.metrics_text(cache, **{"a-b": "x"})
    assert "20 blocks of 4 tokens" in repr(cache) and "cpu" in repr(cache)
    assert dataclasses.asdict(cache.stats())["cache"]["num_blocks"] == 20 and cache.stats().scheduler is None
    assert make(prefix=False).stats().prefix is None
    # Fields stand in the order of the library's counters.
    scheduler = bf.Scheduler(cache)
    with cache.step([cache.open(range(9))]) as step:
        run(step)
    cache.open(range(9)).fork()
    scheduler.submit([1, 2, 3])
    run(first := next(scheduler))
    first.sample([1])
    assert dataclasses.asdict(scheduler.stats()) == json.loads(cache._core.metrics_json(scheduler._core))


def test_steps_on_the_cpu_have_no_graph_key():
    cache = make()
    a, b = cache.open([1, 2, 3]), cache.open([4])
    with cache.step([a, b]) as step:
        assert step.graph_key is None
        run(step)
        assert step.graph_key is None
    with pytest.raises(bf.Error, match="the step has ended") as refused:
        step.graph_key
    assert refused.value.code == "failed_precondition"
    scheduler = bf.Scheduler(cache)
    scheduler.submit([1, 2, 3], max_new_tokens=2)
    for step in scheduler:
        run(step)
        assert step.graph_key is None
        step.sample([1])


def test_a_step_keeps_its_cache():
    cache = make()
    sequence = cache.open([1])
    step = cache.step([sequence])
    del cache, sequence
    gc.collect()
    run(step)
    step.commit()


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_torch_tensors_go_in_and_come_out():
    cache = make(dtype="bf16")
    text = [1, 2, 3, 4, 5, 6]
    with cache.step([cache.open(text)]) as step:
        positions = torch.from_dlpack(step.positions)
        assert positions.tolist() == list(range(6))
        q, k, v = (torch.from_numpy(rows(step, LAYERS - 1, what, heads)).bfloat16()
                   for what, heads in ((0, Q_HEADS), (1, KV_HEADS), (2, KV_HEADS)))
        out = step.attend(LAYERS - 1, q, k, v)
        assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
        assert (out.double().numpy() - expected(text) < 0.03).all()
        reference = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1).float(), k.transpose(0, 1).float().repeat_interleave(2, 0),
            v.transpose(0, 1).float().repeat_interleave(2, 0), is_causal=True).transpose(0, 1)
        torch.testing.assert_close(out.float(), reference, atol=0.02, rtol=0.02)


def test_promtool_finds_nothing_to_say_about_the_metrics():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    cache = make()
    requests = bf.Scheduler(cache, max_tokens_per_step=64)
    requests.submit([1, 2, 3, 4, 5], max_new_tokens=3)
    for step in requests:
        run(step)
        step.sample([7])
    for text in (bf.metrics_text(requests, model="a \"quoted\" name\\", device="cpu"), bf.metrics_text(cache)):
        assert text.count("# HELP") > 10
        said = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
        assert said.returncode == 0 and not said.stdout and not said.stderr, said.stdout + said.stderr

# SPDX-License-Identifier: Apache-2.0
"""Attention over arrays of one's own, and the planes of a cache."""

import bifolio as bf
import numpy as np
import pytest
from support import DIM, KV_HEADS, LAYERS, Q_HEADS, attention, make, plain_step, rows, run

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None
try:
    import torch
except ImportError:
    torch = None


def paged(layout="hnd", seed=3, dim=16, block_size=4):
    """Three sequences of 9, 4 and 17 tokens, of which 3, 4 and 1 are new, in shuffled blocks: the arguments, and the
    dense q, k and v of each."""
    rng = np.random.default_rng(seed)
    lens, new = [9, 4, 17], [3, 4, 1]
    num_blocks = 16
    k_cache, v_cache = (rng.normal(size=(num_blocks, KV_HEADS, block_size, dim)).astype(np.float32) for _ in range(2))
    tables = np.full((3, 6), 2147480000, np.int32)
    order = rng.permutation(num_blocks).astype(np.int32)
    dense, at = [], 0
    q = rng.normal(size=(sum(new), Q_HEADS, dim)).astype(np.float32)
    for i, (length, count) in enumerate(zip(lens, new)):
        blocks = -(-length // block_size)
        tables[i, :blocks], order = order[:blocks], order[blocks:]
        k, v = (c[tables[i, :blocks]].transpose(0, 2, 1, 3).reshape(-1, KV_HEADS, dim)[:length].astype(np.float64)
                for c in (k_cache, v_cache))
        dense.append((q[at:at + count].astype(np.float64), k, v))
        at += count
    if layout == "nhd":
        k_cache, v_cache = (np.ascontiguousarray(c.transpose(0, 2, 1, 3)) for c in (k_cache, v_cache))
    starts = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    return (q, (k_cache, v_cache), tables, np.array(lens, np.int32), starts), dense


def whole(dense, **options):
    parts = [attention(q, k, v, q.shape[2]**-0.5, **options) for q, k, v in dense]
    return np.concatenate([out for out, _ in parts]), np.concatenate([lse for _, lse in parts])


def test_attention_agrees_with_float64_in_both_orders_and_with_every_feature():
    for layout in ("hnd", "nhd"):
        arguments, dense = paged(layout)
        out, lse = bf.attention(*arguments, layout=layout)
        np.testing.assert_allclose(out, whole(dense)[0], atol=3e-6)
        np.testing.assert_allclose(lse, whole(dense)[1], atol=3e-6)
    arguments, dense = paged()
    sinks, slopes = np.linspace(-1, 1, Q_HEADS), -np.linspace(0.1, 0.4, Q_HEADS)
    for given, options in (
            (dict(window=3), dict(window=3)),
            (dict(soft_cap=2.0), dict(soft_cap=2.0)),
            (dict(sinks=sinks.astype(np.float32)), dict(sinks=sinks)),
            (dict(alibi_slopes=slopes.astype(np.float32)), dict(slopes=slopes))):
        out, lse = bf.attention(*arguments, **given)
        np.testing.assert_allclose(out, whole(dense, **options)[0], atol=5e-6)
        np.testing.assert_allclose(lse, whole(dense, **options)[1], atol=5e-6)


def test_strides_of_a_cache_are_taken_as_they_are_and_lists_and_int64_are_integers_too():
    (q, (k, v), tables, lens, starts), dense = paged()
    both = np.stack([k, v], axis=1)  # [blocks, 2, heads, block, dim]: K and V of a block side by side
    out, _ = bf.attention(q, (both[:, 0], both[:, 1]), tables.astype(np.int64), lens.tolist(), tuple(starts.tolist()))
    np.testing.assert_allclose(out, whole(dense)[0], atol=3e-6)
    given = np.zeros_like(q)
    result, _ = bf.attention(q, (k, v), tables.tolist(), lens, starts, out=given)
    assert result is given
    np.testing.assert_array_equal(result, bf.attention(q, (k, v), tables, lens, starts)[0])


def test_parts_of_the_keys_merge_to_the_whole():
    (q, (k, v), tables, lens, starts), dense = paged()
    # The first blocks of the longest sequence without mask, and the rest.
    one = q[-1:]
    first = bf.attention(one, (k, v), tables[2:, :3], [12], [0, 1], causal=False)
    rest = bf.attention(one, (k, v), tables[2:, 3:], [5], [0, 1], causal=False)
    out, lse = bf.merge(*first, *rest)
    np.testing.assert_allclose(out, whole(dense)[0][-1:], atol=3e-6)
    np.testing.assert_allclose(lse, whole(dense)[1][-1:], atol=3e-6)


def test_attention_refuses_with_sentences():
    (q, (k, v), tables, lens, starts), _ = paged()

    def refused(match, *arguments, error=bf.Error, **options):
        with pytest.raises(error, match=match):
            bf.attention(*arguments, **options)

    refused("block_tables has 2 rows", q, (k, v), tables[:2], lens, starts)
    refused("differ in axis 2", q, (k, v[:, :, :3]), tables, lens, starts)
    refused("layout is 'x_split'", q, (k, v), tables, lens, starts, layout="x_split")
    refused(r"k_cache has the shape \[16, 2\]", q, (k[:, :, 0, 0], v), tables, lens, starts)
    refused("int32 or int64", q, (k, v), tables.astype(np.float32), lens, starts)
    refused("rows of different lengths", q, (k, v), [[1, 2, 3], [1], [2]], lens, starts)
    refused("block", q, (k, v), tables + 100, lens, starts)
    refused("type code", q.astype(np.float64), (k, v), tables, lens, starts)
    refused("sinks must be dense float32", q, (k, v), tables, lens, starts, sinks=np.zeros(3, np.float32))
    refused("q is a str", "q", (k, v), tables, lens, starts, error=TypeError)
    read_only = np.zeros_like(q)
    read_only.flags.writeable = False
    refused("out is read-only", q, (k, v), tables, lens, starts, out=read_only)
    np.testing.assert_array_equal(bf.attention(read_only, (k, v), tables, lens, starts)[0].shape, q.shape)


def test_planes_are_the_memory_of_the_cache():
    for layout in ("hnd", "nhd", "x_split"):
        cache = make(layout=layout, blocks=4)
        with cache.step([cache.open([5, 6, 7, 8, 9])]) as step:
            run(step)
        k, v = (np.from_dlpack(plane) for plane in cache.layer(1))
        source = rows(plain_step([5, 6, 7, 8, 9]), 1, 1, KV_HEADS)
        if layout == "nhd":
            np.testing.assert_array_equal(k[:2].reshape(8, KV_HEADS, DIM)[:5], source)
        elif layout == "hnd":
            assert k.shape == (4, KV_HEADS, 4, DIM)
            np.testing.assert_array_equal(k[:2].transpose(0, 2, 1, 3).reshape(8, KV_HEADS, DIM)[:5], source)
        else:  # [blocks, heads, dim / x, tokens, x] and [blocks, heads, dim, tokens]
            np.testing.assert_array_equal(k[0].transpose(2, 0, 1, 3).reshape(4, KV_HEADS, DIM), source[:4])
            assert v.shape == (4, KV_HEADS, DIM, 4)
        again = np.from_dlpack(cache.layer(1).k)
        assert again.ctypes.data == k.ctypes.data
        assert repr(cache.layer(1).k) == "Plane(K of layer 1)"
        with pytest.raises(bf.Error, match="layer 2 is not there; there are 2"):
            cache.layer(2)
        del cache, step
        assert k.flat[0] == k.flat[0]  # arrays keep the memory


def bits_of(array):
    return (array.view(np.uint32) + 0x8000 >> 16).astype(np.uint16)


def test_bfloat16_comes_as_bits_in_numpy_and_as_its_type_elsewhere():
    cache = make(dtype="bf16")
    with cache.step([cache.open([1, 2, 3])]) as step:
        q, k, v = (rows(step, 0, what, heads) for what, heads in ((0, Q_HEADS), (1, KV_HEADS), (2, KV_HEADS)))
        out = step.attend(0, *(bits_of(array) for array in (q, k, v)))
        assert out.dtype == np.uint16
        value = (out.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(value, attention(q, k, v, DIM**-0.5)[0], atol=0.02)
        if ml_dtypes is not None:
            same = step.attend(0, *(array.astype(ml_dtypes.bfloat16) for array in (q, k, v)))
            assert same.dtype == ml_dtypes.bfloat16
            np.testing.assert_allclose(same.astype(np.float32), value, atol=0.02)
    plane = cache.layer(0).k
    assert np.from_dlpack(plane).dtype == np.uint16 and np.from_dlpack(plane.bits).dtype == np.uint16
    if torch is not None:
        assert torch.from_dlpack(plane).dtype == torch.bfloat16
        assert torch.from_dlpack(plane).data_ptr() == np.from_dlpack(plane).ctypes.data


@pytest.mark.skipif(torch is None, reason="PyTorch is not installed")
def test_torch_goes_through_its_table_of_functions():
    arguments, dense = paged()
    q, (k, v), tables, lens, starts = arguments
    out, lse = bf.attention(torch.from_numpy(q), (torch.from_numpy(k), torch.from_numpy(v)), torch.from_numpy(tables),
                            torch.from_numpy(lens), torch.from_numpy(starts))
    assert isinstance(out, torch.Tensor) and lse.dtype == torch.float32
    np.testing.assert_allclose(out.numpy(), whole(dense)[0], atol=3e-6)
    merged, _ = bf.merge(out, lse, out, lse)
    torch.testing.assert_close(merged, out)
    with pytest.raises(bf.Error, match="q cannot be exported|not on the device cpu"):
        bf.attention(torch.empty(8, 4, 16, device="meta"), (torch.from_numpy(k), torch.from_numpy(v)), tables, lens, starts)
    # fused projections, float16, a parameter
    cache = make(dtype="f16", kv_dtype="f16")
    with cache.step([cache.open([1, 2, 3])]) as step:
        fused = torch.nn.Parameter(torch.randn(3, Q_HEADS + 2 * KV_HEADS, DIM, dtype=torch.float16))
        parts = fused.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
        result = step.attend(0, *parts)
        assert result.dtype == torch.float16 and not result.requires_grad
        want, _ = attention(*(part.detach().double().numpy() for part in parts), DIM**-0.5)
        np.testing.assert_allclose(result.double().numpy(), want, atol=4e-3)

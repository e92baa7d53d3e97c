# SPDX-License-Identifier: Apache-2.0
"""The same calls with the arrays of every framework that is installed, on the CPU and, where the package has the CUDA
backend and there is a device, on it. Nothing is copied, and what comes out is of the framework that went in."""

import os

import bifolio as bf
import numpy as np
import pytest
from support import DIM, KV_HEADS, LAYERS, Q_HEADS, attention, expected, make, plain_step, rows

# Otherwise JAX takes three quarters of a device's memory when it is first used, and caches made after it find none.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def has_cuda():
    try:
        bf.Cache(layers=1, q_heads=1, kv_heads=1, head_dim=8, blocks=1, device="cuda")
        return True
    except bf.Error:
        return False


class Framework:
    """How a framework makes its arrays of NumPy's, and the way back."""

    def __init__(self, name, device, make_array, to_numpy, address, array_type, is_written=True):
        self.name, self.device, self.make, self.numpy = name, device, make_array, to_numpy
        self.address, self.type, self.is_written = address, array_type, is_written


def numpy_framework():
    return Framework("numpy", "cpu", lambda a: a.copy(), lambda a: a, lambda a: a.ctypes.data, np.ndarray)


def torch_framework(device):
    torch = pytest.importorskip("torch")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    return Framework("torch", device, lambda a: torch.from_numpy(a.copy()).to(device), lambda a: a.cpu().numpy(),
                     lambda a: a.data_ptr(), torch.Tensor)


def jax_framework(device):
    jax = pytest.importorskip("jax")
    try:
        where = jax.devices(device)[0]
    except RuntimeError as problem:
        pytest.skip(f"JAX has no {device}: {problem}")
    return Framework("jax", device, lambda a: jax.device_put(a.copy(), where), lambda a: np.asarray(a),
                     lambda a: a.unsafe_buffer_pointer(), jax.Array, is_written=False)


def cupy_framework():
    cupy = pytest.importorskip("cupy")
    return Framework("cupy", "cuda", cupy.asarray, cupy.asnumpy, lambda a: a.data.ptr, cupy.ndarray)


KINDS = {"numpy": numpy_framework, "torch on the CPU": lambda: torch_framework("cpu"),
         "jax on the CPU": lambda: jax_framework("cpu"), "torch on CUDA": lambda: torch_framework("cuda"),
         "jax on CUDA": lambda: jax_framework("cuda"), "cupy": cupy_framework}


@pytest.fixture(params=KINDS)
def framework(request):
    if ("CUDA" in request.param or request.param == "cupy") and not has_cuda():
        pytest.skip("the package has no CUDA backend, or there is no device")
    return KINDS[request.param]()


def on(framework, **changes):
    return make(device=framework.device, threads=0 if framework.device == "cuda" else 1, **changes)


def run(step, framework):
    for layer in range(LAYERS):
        given = [framework.make(rows(step, layer, what, heads))
                 for what, heads in ((0, Q_HEADS), (1, KV_HEADS), (2, KV_HEADS))]
        out = step.attend(layer, *given)
    return out


def test_steps_take_and_give_arrays_of_the_framework(framework):
    cache = on(framework)
    a = cache.open([5, 6, 7, 8, 9, 10], salt="tenant-7")
    b, c = a.fork(), a.fork()
    with cache.step([a, b.append(1), c.append([2, 3])]) as step:
        out = run(step, framework)
        assert isinstance(out, framework.type)
    texts = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10, 1], [5, 6, 7, 8, 9, 10, 2, 3]]
    np.testing.assert_allclose(framework.numpy(out), np.concatenate([expected(text) for text in texts]), atol=3e-6)
    cache.swap_out([a])
    cache.swap_in([a])
    with cache.step([a.append(4), c.append(4)]) as step:
        out = framework.numpy(run(step, framework))
    np.testing.assert_allclose(out[0], expected(texts[0] + [4])[-1], atol=3e-6)
    np.testing.assert_allclose(out[1], expected(texts[2] + [4])[-1], atol=3e-6)
    cache.check()


def test_a_given_output_is_written_where_it_is(framework):
    if not framework.is_written:
        pytest.skip(f"arrays of {framework.name} are never written")
    cache = on(framework)
    a = cache.open([1, 2, 3])
    with cache.step([a]) as step:
        given = [framework.make(rows(step, 0, what, heads)) for what, heads in ((0, Q_HEADS), (1, KV_HEADS), (2, KV_HEADS))]
        out = framework.make(np.zeros((3, Q_HEADS, DIM), np.float32))
        lse = framework.make(np.zeros((3, Q_HEADS), np.float32))
        before = framework.address(out)
        assert step.attend(0, *given, out=out, lse=lse) is out
        assert framework.address(out) == before
        sinks = framework.make(np.linspace(-1, 1, Q_HEADS).astype(np.float32))
        with_sinks = step.attend(1, *given, sinks=sinks)
    whole = plain_step([1, 2, 3])
    q, k, v = (rows(whole, 0, what, heads).astype(np.float64) for what, heads in ((0, Q_HEADS), (1, KV_HEADS), (2, KV_HEADS)))
    wanted, wanted_lse = attention(q, k, v, DIM**-0.5)
    np.testing.assert_allclose(framework.numpy(out), wanted, atol=3e-6)
    np.testing.assert_allclose(framework.numpy(lse), wanted_lse, atol=3e-6)
    wanted, _ = attention(q, k, v, DIM**-0.5, sinks=np.linspace(-1, 1, Q_HEADS))
    np.testing.assert_allclose(framework.numpy(with_sinks), wanted, atol=3e-6)


def test_attention_and_merge_of_arrays_of_the_framework(framework):
    rng = np.random.default_rng(7)
    k, v = (rng.normal(size=(6, KV_HEADS, 4, DIM)).astype(np.float32) for _ in range(2))
    q = rng.normal(size=(4, Q_HEADS, DIM)).astype(np.float32)
    tables = np.array([[4, 1], [0, 5]], np.int32)
    lens, starts = np.array([7, 5], np.int32), np.array([0, 3, 4], np.int32)
    dense = [c[tables[0]].transpose(0, 2, 1, 3).reshape(-1, KV_HEADS, DIM)[:7].astype(np.float64) for c in (k, v)]
    parts = [attention(q[:3].astype(np.float64), *dense, DIM**-0.5)]
    dense = [c[tables[1]].transpose(0, 2, 1, 3).reshape(-1, KV_HEADS, DIM)[:5].astype(np.float64) for c in (k, v)]
    parts.append(attention(q[3:].astype(np.float64), *dense, DIM**-0.5))
    wanted, wanted_lse = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
    as_arrays = tuple(framework.make(array) for array in (tables, lens, starts))
    for integers in (as_arrays, (tables.tolist(), lens, tuple(starts.tolist()))):
        out, lse = bf.attention(framework.make(q), (framework.make(k), framework.make(v)), *integers)
        assert isinstance(out, framework.type) and isinstance(lse, framework.type)
        np.testing.assert_allclose(framework.numpy(out), wanted, atol=3e-6)
        np.testing.assert_allclose(framework.numpy(lse), wanted_lse, atol=3e-6)
    merged, both = bf.merge(out, lse, out, lse)  # twice the same keys: the same average, a weight of ln 2 more
    assert isinstance(merged, framework.type)
    np.testing.assert_allclose(framework.numpy(merged), wanted, atol=3e-6)
    np.testing.assert_allclose(framework.numpy(both), wanted_lse + np.log(2), atol=3e-6)


def test_planes_are_the_memory_of_the_cache(framework):
    cache = on(framework)
    with cache.step([cache.open([1, 2, 3])]) as step:
        run(step, framework)
    if framework.name == "numpy":
        plane = np.from_dlpack(cache.layer(0).k)
    elif framework.name == "torch":
        plane = pytest.importorskip("torch").from_dlpack(cache.layer(0).k)
    elif framework.name == "jax":
        plane = pytest.importorskip("jax").dlpack.from_dlpack(cache.layer(0).k.elements)
    else:
        plane = pytest.importorskip("cupy").from_dlpack(cache.layer(0).k)
    assert isinstance(plane, framework.type) and tuple(plane.shape) == (20, KV_HEADS, 4, DIM)
    whole = plain_step([1, 2, 3])
    block = int(np.argmax(np.abs(framework.numpy(plane)).reshape(20, -1).sum(1) > 0))
    np.testing.assert_array_equal(framework.numpy(plane)[block, :, :3].transpose(1, 0, 2), rows(whole, 0, 1, KV_HEADS))


def test_arrays_of_another_device_are_refused(framework):
    if framework.device == "cpu":
        pytest.skip("about arrays on a device")
    host = make()
    step = host.step([host.open([1, 2, 3])])
    given = [framework.make(rows(step, 0, what, heads)) for what, heads in ((0, Q_HEADS), (1, KV_HEADS), (2, KV_HEADS))]
    with pytest.raises(bf.Error, match="q is not on the device cpu"):
        step.attend(0, *given)
    step.drop()
    cache = on(framework)
    step = cache.step([cache.open([1, 2, 3])])
    with pytest.raises(bf.Error, match="k is not on the device cuda:0"):
        step.attend(0, given[0], rows(step, 0, 1, KV_HEADS), given[2])
    step.drop()


def test_a_cache_without_a_size_takes_what_is_free(framework):
    big = dict(layers=2, q_heads=2, kv_heads=2, head_dim=128, dtype="bf16", device=framework.device)
    if framework.device == "cpu":
        cache = bf.Cache(**big, block_size=4096, reserve=0.0)  # other programs may have most of the memory
        assert 0 < cache._core.num_blocks * 2 * 2 * 2 * 128 * 2 * 4096 <= 4 << 30
        with pytest.raises(bf.Error, match="too little memory is free on the device cpu") as refused:
            bf.Cache(**big, reserve=1.0)
        assert refused.value.code == "out_of_memory"
        with pytest.raises(bf.Error, match="fraction"):
            bf.Cache(**big, reserve=-1)
        return
    cache = bf.Cache(**big, block_size=4096, reserve=0.6)
    assert cache._core.num_blocks * 2 * 2 * 2 * 128 * 2 * 4096 > 8 << 30

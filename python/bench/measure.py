# SPDX-License-Identifier: Apache-2.0
"""What the package costs: time of a call, and of a decode step of 32 layers, with attention that computes next to
nothing. Prints the least of many repetitions in microseconds. `python python/bench/measure.py`, on an idle machine; with
a GPU and PyTorch also the host's time of steps on it."""

import importlib.util
import time

import bifolio as bf
import numpy as np

LAYERS, Q_HEADS, KV_HEADS, DIM = 32, 2, 1, 8


def least(call, repetitions=300, calls=1):
    best = float("inf")
    for _ in range(repetitions):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - begin) / calls)
    return best * 1e6


def decode(make_array, batch, device="cpu"):
    """(begin, a call of attend, commit, the whole step) in microseconds."""
    cache = bf.Cache(layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM, blocks=600,
                     device=device, threads=1 if device == "cpu" else 0)
    sequences = [cache.open([1, 2, 3]) for _ in range(batch)]
    with cache.step(sequences):
        pass
    q, k, v, out = (make_array(batch, heads, DIM) for heads in (Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS))
    best = [float("inf")] * 4
    for _ in range(300):
        for sequence in sequences:
            sequence.append(1)
        t = [time.perf_counter()]
        step = cache.step(sequences)
        t.append(time.perf_counter())
        for layer in range(LAYERS):
            step.attend(layer, q, k, v)
        t.append(time.perf_counter())
        step.commit()
        t.append(time.perf_counter())
        for sequence in sequences:
            sequence.truncate(3)
        for i, value in enumerate((t[1] - t[0], (t[2] - t[1]) / LAYERS, t[3] - t[2], t[3] - t[0])):
            best[i] = min(best[i], value * 1e6)
    return best


def main():
    frameworks = {"numpy": lambda *shape: np.ones(shape, np.float32)}
    if importlib.util.find_spec("torch"):
        import torch
        torch.set_num_threads(1)
        frameworks["torch"] = lambda *shape: torch.ones(*shape)
    for name, make_array in frameworks.items():
        for batch in (1, 8):
            begin, attend, commit, step = decode(make_array, batch)
            print(f"{name:6} batch {batch}: step {step:6.1f} us of {LAYERS} layers; begin {begin:5.1f}, attend {attend:5.2f} "
                  f"a layer, commit {commit:4.1f}")
    if "torch" in frameworks and torch.cuda.is_available():
        for batch in (1, 8):
            try:
                begin, attend, commit, step = decode(lambda *shape: torch.ones(*shape, device="cuda"), batch, "cuda")
            except bf.Error as problem:  # the package has no CUDA backend
                print(problem)
                break
            print(f"cuda   batch {batch}: step {step:6.1f} us of {LAYERS} layers; begin {begin:5.1f}, attend {attend:5.2f} "
                  f"a layer, commit {commit:4.1f}")
    for name, make_array in frameworks.items():
        out, lse = make_array(1, Q_HEADS, DIM), make_array(1, Q_HEADS)
        k_cache = make_array(4, KV_HEADS, 16, DIM)
        tables, lens, starts = (np.array(value, np.int32) for value in ([[0]], [1], [0, 1]))
        print(f"{name:6} merge {least(lambda: bf.merge(out, lse, out, lse), calls=20):5.2f} us, attention of one token "
              f"{least(lambda: bf.attention(out, (k_cache, k_cache), tables, lens, starts), calls=20):5.2f}")
    cache = bf.Cache(layers=1, q_heads=1, kv_heads=1, head_dim=8, blocks=600, threads=1)
    sequence = cache.open([1])
    print(f"fork and free {least(lambda: sequence.fork().free(), calls=20):.2f} us, stats {least(cache.stats, calls=20):.2f}, "
          f"open and free of 100 tokens {least(lambda: cache.open(list(range(100))).free(), calls=20):.2f}")


if __name__ == "__main__":
    main()

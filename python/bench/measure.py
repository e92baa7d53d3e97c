# SPDX-License-Identifier: Apache-2.0
"""What the package costs: time of a call, and of a decode step of 32 layers, with attention that computes next to
nothing. Prints the least of many repetitions in microseconds. `python python/bench/measure.py`, on an idle machine; with
a GPU and PyTorch also the host's time of steps on it, call by call and by a captured graph; with `--cuda` that alone."""

import argparse
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


def begin_decoding(batch, device="cpu", stream=0):
    """A cache and sequences of three tokens in it."""
    cache = bf.Cache(layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM, blocks=600,
                     device=device, threads=1 if device == "cpu" else 0)
    sequences = [cache.open([1, 2, 3]) for _ in range(batch)]
    with cache.step(sequences, stream=stream):
        pass
    return cache, sequences


def decode(make_array, batch, device="cpu", wait=lambda: None):
    """(begin, a call of attend, commit, the whole step) in microseconds. `wait`: for the device, between steps."""
    cache, sequences = begin_decoding(batch, device)
    q, k, v = (make_array(batch, heads, DIM) for heads in (Q_HEADS, KV_HEADS, KV_HEADS))
    best = [float("inf")] * 4
    for _ in range(300):
        for sequence in sequences:
            sequence.append(1)
        wait()
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


def decode_by_graph(batch):
    """(begin, find and launch the graph, commit, the whole step) in microseconds of the host, and the number of graphs."""
    import torch
    stream = torch.cuda.Stream()
    cache, sequences = begin_decoding(batch, "cuda", stream.cuda_stream)
    q, k, v, out = (torch.ones(batch, heads, DIM, device="cuda") for heads in (Q_HEADS, KV_HEADS, KV_HEADS, Q_HEADS))
    torch.cuda.synchronize()
    graphs = {}
    best = [float("inf")] * 4
    with torch.cuda.stream(stream):
        for _ in range(300):
            for sequence in sequences:
                sequence.append(1)
            stream.synchronize()
            t = [time.perf_counter()]
            step = cache.step(sequences, stream=stream.cuda_stream)
            t.append(time.perf_counter())
            graph = graphs.get(step.graph_key)
            is_captured = graph is not None
            if not is_captured:
                step.attend(0, q, k, v, out=out)  # loads the kernels
                graph = graphs[step.graph_key] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    for layer in range(LAYERS):
                        step.attend(layer, q, k, v, out=out)
            graph.replay()
            t.append(time.perf_counter())
            step.commit()
            t.append(time.perf_counter())
            for sequence in sequences:
                sequence.truncate(3)
            if not is_captured:
                continue
            for i, value in enumerate((t[1] - t[0], t[2] - t[1], t[3] - t[2], t[3] - t[0])):
                best[i] = min(best[i], value * 1e6)
        stream.synchronize()
    return (*best, len(graphs))


def measure_cuda():
    import torch
    for batch in (1, 8):
        begin, attend, commit, step = decode(lambda *shape: torch.ones(*shape, device="cuda"), batch, "cuda",
                                             torch.cuda.synchronize)
        print(f"cuda   batch {batch}: step {step:6.1f} us of {LAYERS} layers; begin {begin:5.1f}, attend {attend:5.2f} "
              f"a layer, commit {commit:4.1f}")
        begin, replay, commit, step, num_graphs = decode_by_graph(batch)
        print(f"graph  batch {batch}: step {step:6.1f} us of {LAYERS} layers; begin {begin:5.1f}, replay {replay:5.1f}, "
              f"commit {commit:4.1f}; {num_graphs} captured")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="store_true", help="only steps on the GPU, call by call and by a captured graph")
    if parser.parse_args().cuda:
        return measure_cuda()
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
        try:
            measure_cuda()
        except bf.Error as problem:  # the package has no CUDA backend
            print(problem)
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

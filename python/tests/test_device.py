# SPDX-License-Identifier: Apache-2.0
"""The sketch of the package on a GPU, with PyTorch: the same results as on the CPU."""

import pathlib
import re

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import bifolio as bf  # noqa: E402
import numpy as np  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)
try:
    bf.Cache(layers=1, q_heads=1, kv_heads=1, head_dim=8, blocks=1, device="cuda")
except bf.Error as problem:
    pytest.skip(f"the package has no CUDA backend: {problem}", allow_module_level=True)

LAYERS, Q_HEADS, KV_HEADS, DIM, VOCAB = 4, 32, 8, 128, 100


class layer_of_a_model:
    """Projections that depend on tokens, positions and the layer, in bfloat16."""

    def __init__(self, index, device):
        self.index, self.device = index, device

    def qkv(self, tokens, positions):
        at = np.asarray(positions)[:, None, None] * 0.1 + np.asarray(tokens)[:, None, None] * 0.37 + self.index
        made = []
        for heads in (Q_HEADS, KV_HEADS, KV_HEADS):
            rows = np.sin(at + np.arange(heads)[None, :, None] + np.arange(DIM)[None, None, :])
            made.append(torch.from_numpy(rows).bfloat16().to(self.device))
        return made

    def out(self, x, attended):
        assert attended.device.type == self.device and attended.dtype == torch.bfloat16
        return attended


def run_sketch(device):
    model = [layer_of_a_model(i, device) for i in range(LAYERS)]
    prompt_ids = list(np.arange(300) % VOCAB)
    cache = bf.Cache(layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype="bf16", memory="1GiB",
                     host_memory="64MiB", prefix=True, seed=(1, 2), device=device)
    results = []
    a = cache.open(prompt_ids, salt="tenant-7")
    b, c = a.fork(), a.fork()
    with cache.step([a, b.append(5), c.append(6)]) as step:
        x = None
        for i, layer in enumerate(model):
            q, k, v = layer.qkv(step.tokens, step.positions)
            x = layer.out(x, step.attend(i, q, k, v))
        results.append(x.float().cpu())
    before = cache.stats().cache.num_used_blocks
    cache.swap_out([b])
    cache.swap_in([b])
    with cache.step([a.append(7), b.append(7)]) as step:
        for i, layer in enumerate(model):
            x = layer.out(x, step.attend(i, *layer.qkv(step.tokens, step.positions)))
        results.append(x.float().cpu())
    assert before > 0
    sched = bf.Scheduler(cache, max_tokens_per_step=512)
    said = []
    sched.submit(prompt_ids, max_new_tokens=24, samples=4, on_token=said.append)
    for step in sched:
        for i, layer in enumerate(model):
            x = step.attend(i, *layer.qkv(step.tokens, step.positions))
        rows = torch.from_numpy(np.asarray(step.sample_rows)).long().to(device)
        logits = x[rows].reshape(len(rows), -1).float().cpu()
        # The choice must not hang on rounding: it is made of positions.
        step.sample((np.asarray(step.positions)[np.asarray(step.sample_rows)] * 7) % VOCAB)
        results.append(logits[:1])
    assert len(said) == 4 * 24
    plane = torch.from_dlpack(cache.layer(0).k)
    assert plane.device.type == device and plane.dtype == torch.bfloat16
    results.append(plane[:8].float().cpu())
    assert "bifolio_used_blocks" in bf.metrics_text(cache) and cache.map().startswith("<svg")
    cache.check()
    return results, [(token.sample, token.token, token.reason) for token in said]


def test_the_sketch_gives_on_the_gpu_what_it_gives_on_the_cpu():
    on_cpu, said_on_cpu = run_sketch("cpu")
    on_gpu, said_on_gpu = run_sketch("cuda")
    assert said_on_cpu == said_on_gpu and len(on_cpu) == len(on_gpu)
    for want, got in zip(on_cpu, on_gpu):
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_work_in_another_stream_than_the_default_is_ordered_by_step():
    cache = bf.Cache(layers=1, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype="bf16", blocks=200, device="cuda")
    layer = layer_of_a_model(0, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        a = cache.open(list(range(500)))
        with cache.step([a], stream=stream.cuda_stream) as step:
            q, k, v = layer.qkv(step.tokens, step.positions)
            slow = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
            for _ in range(20):
                slow = slow @ slow * 0
            q = q + slow[0, 0]  # behind the slow products
            out = step.attend(0, q, k, v)
    stream.synchronize()
    b = cache.open(list(range(500)))
    with cache.step([b]) as step:
        again = step.attend(0, *layer.qkv(step.tokens, step.positions))
    torch.testing.assert_close(again, out, atol=0, rtol=0)


def all_layers(step, tokens, positions):
    """What a graph captures: every layer's projections and attention. Nothing is copied from the host."""
    heads, dims = torch.arange(Q_HEADS, device="cuda"), torch.arange(DIM, device="cuda")
    outs = []
    for layer in range(LAYERS):
        at = positions[:, None, None] * 0.1 + tokens[:, None, None] * 0.37 + layer
        q = torch.sin(at + heads[None, :, None] + dims).bfloat16()
        k, v = (torch.cos(at * scale + heads[None, :KV_HEADS, None] + dims).bfloat16() for scale in (1.0, 0.7))
        outs.append(step.attend(layer, q, k, v))
    return torch.stack(outs)


def graphed_steps():
    """The class of docs/python.md."""
    page = pathlib.Path(__file__).resolve().parents[2] / "docs" / "python.md"
    if not page.exists():
        pytest.skip("the documents are not next to the tests")
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    names = dict(np=np)
    exec(next(block for block in blocks if "class GraphedSteps" in block), names)
    return names["GraphedSteps"]


class twins:
    """Two caches with the same sequences. In one all steps are computed call by call, in the other decode steps by graphs."""

    def __init__(self, **changes):
        settings = dict(layers=LAYERS, q_heads=Q_HEADS, kv_heads=KV_HEADS, head_dim=DIM, dtype="bf16", blocks=400, device="cuda")
        self.caches = [bf.Cache(**settings, **changes) for _ in range(2)]
        self.steps = graphed_steps()(self.caches[1], all_layers)
        self.rng = np.random.default_rng(3)
        self.sequences = []  # pairs

    def open(self, num_tokens):
        tokens = self.rng.integers(0, VOCAB, num_tokens).tolist()
        self.sequences.append([cache.open(tokens) for cache in self.caches])
        return len(self.sequences) - 1

    def eager(self, which, rows, stream):
        with torch.cuda.stream(stream), self.caches[which].step([self.sequences[i][which] for i in rows],
                                                                stream=stream.cuda_stream) as step:
            out = all_layers(step, *torch.from_numpy(np.stack([step.tokens, step.positions])).to("cuda"))
        stream.synchronize()
        return out

    def prompts(self, rows):
        want = self.eager(0, rows, torch.cuda.current_stream())
        assert torch.equal(self.eager(1, rows, self.steps.stream), want)

    def decode(self, rows):
        for i in rows:
            token = int(self.rng.integers(0, VOCAB))
            for sequence in self.sequences[i]:
                sequence.append(token)
        want = self.eager(0, rows, torch.cuda.current_stream())
        got = self.steps([self.sequences[i][1] for i in rows])
        self.steps.stream.synchronize()
        assert torch.equal(got, want), f"{(got != want).sum()} values of {want.numel()} differ"

    @property
    def num_graphs(self):
        return len(self.steps.graphs)


@pytest.mark.parametrize("changes", [{}, dict(windows=[40] * (LAYERS - 1) + [-1]), dict(kv_dtype="i8-token"), dict(layout="x_split")],
                         ids=["hnd", "windows", "codes", "x_split"])
def test_a_graph_computes_every_later_step_of_its_key(changes):
    both = twins(**changes)
    warm = both.open(280)  # as the prompt below: buffers have room for it from here on, and tables for 18 blocks
    both.prompts([warm])
    for sequence in both.sequences[warm]:
        sequence.free()
    a, b, c = (both.open(n) for n in (280, 70, 33))
    both.prompts([a, b, c])
    for _ in range(8):
        both.decode([a, b, c])
    assert both.num_graphs == 1
    for _ in range(25):  # from 289 tokens on, in 19 blocks, the rows of the tables are longer
        both.decode([a, b, c])
    assert both.num_graphs == 2
    for _ in range(5):
        both.decode([b, a])
    assert both.num_graphs == 3
    # After a prompt the key of three sequences is what it was.
    d = both.open(280)
    both.prompts([d])
    for _ in range(5):
        both.decode([a, b, c])
    for _ in range(5):
        both.decode([c, a])
    assert both.num_graphs == 3
    for _ in range(5):
        both.decode([a, b, c, d])
    assert both.num_graphs == 4
    for cache in both.caches:
        cache.check()


def test_graph_keys_are_tuples_of_a_cache_and_a_kind_of_step():
    both = twins()
    a, b = both.open(100), both.open(50)
    keys = []
    for which, rows in ((0, [a, b]), (1, [a, b])):
        with both.caches[which].step([both.sequences[i][which] for i in rows]) as step:
            assert step.graph_key == step.graph_key and isinstance(step.graph_key, tuple)
            assert all(isinstance(number, int) for number in step.graph_key)
            keys.append(step.graph_key)
    assert len(set(keys)) == 2  # of two caches
    cache, first, second = both.caches[0], both.sequences[a][0], both.sequences[b][0]
    keys = []
    for sequences in ([first, second], [first], [second], [second, first]):
        with cache.step([sequence.append(1) for sequence in sequences]) as step:
            keys.append(step.graph_key)
    two, one, other, swapped = keys
    assert two == swapped and one == other and one != two
    with pytest.raises(bf.Error, match="the step has ended"):
        step.graph_key


def test_a_cache_takes_what_the_device_has_free():
    free, total = torch.cuda.mem_get_info()
    cache = bf.Cache(layers=2, q_heads=8, kv_heads=8, head_dim=128, dtype="bf16", block_size=256, device="cuda", reserve=0.5)
    taken = cache._core.num_blocks * 2 * 2 * 8 * 128 * 2 * 256
    assert 0.9 * (free - 0.5 * total) <= taken <= free - 0.5 * total
    del cache


def test_a_model_of_transformers_gives_its_own_ids_on_the_gpu():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    try:
        import bifolio.hf
    except ImportError as problem:
        pytest.skip(f"this version of transformers is another one: {problem}")
    torch.manual_seed(5)
    config = dict(vocab_size=97, hidden_size=256, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
                  num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=None, pad_token_id=0,
                  initializer_range=0.5)
    plain, ours = (transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**config),
                                                                 attn_implementation=name).cuda().eval()
                   for name in ("eager", "bifolio"))
    ours.load_state_dict(plain.state_dict())
    prompt = torch.tensor([[5, 9, 33, 61, 12, 7, 7, 80, 3, 44, 21]], device="cuda")
    options = dict(max_new_tokens=14, do_sample=False)
    want = plain.generate(prompt, **options)
    got = ours.generate(prompt, past_key_values=bifolio.hf.Cache(ours, blocks=120, block_size=4), **options)
    assert got.tolist() == want.tolist()

#!/usr/bin/env python3
"""Trains the small byte-level Llama model of examples/generate.

    python3 tools/train/prepare_text.py --out .train-data
    python3 tools/train/train.py --data .train-data --out .train-out --minutes 6.5

Needs PyTorch (2.4 or later), numpy and safetensors; a GPU makes it quick. It
writes model.safetensors (bfloat16) and config.json, with the tensor names and
settings of Hugging Face's LlamaForCausalLM, each time the validation loss
improves, so a run that is cut off leaves its best model behind.

The learning rate follows the clock (--minutes, counted from the start of the
program) or, for a run that can be repeated step by step, --steps.
"""
import argparse
import contextlib
import json
import math
import os
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

VOCABULARY = 256  # one token per byte; byte 0 begins and ends a document
CONTEXT = 1024
ROPE_THETA = 10000.0
EPSILON = 1e-5


# --- The model: module names give the tensor names of LlamaForCausalLM ---------


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON) * self.weight


def rotate(x, cosine, sine):
    """RoPE, split-half: element i turns with element i + head_dim / 2."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, right * cosine + left * sine), -1)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.q_proj = nn.Linear(c.dim, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.dim, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.dim, bias=False)

    def forward(self, x, cosine, sine):
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cosine, sine).to(v.dtype), rotate(k, cosine, sine).to(v.dtype)
        # Query head h reads key-value head h / (heads / kv_heads).
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.dim, c.hidden, bias=False)
        self.up_proj = nn.Linear(c.dim, c.hidden, bias=False)
        self.down_proj = nn.Linear(c.hidden, c.dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.input_layernorm = RMSNorm(c.dim)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.dim)
        self.mlp = MLP(c)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, cosine, sine):
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), cosine, sine))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, c.dim)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm = RMSNorm(c.dim)
        self.dropout = nn.Dropout(c.dropout)
        frequency = ROPE_THETA ** (-torch.arange(0, c.head_dim, 2).double() / c.head_dim)
        angle = torch.outer(torch.arange(CONTEXT).double(), frequency)
        self.register_buffer("cosine", angle.cos().float(), persistent=False)
        self.register_buffer("sine", angle.sin().float(), persistent=False)

    def forward(self, ids):
        x = self.dropout(self.embed_tokens(ids))
        cosine, sine = self.cosine[: ids.shape[1]], self.sine[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cosine, sine)
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.model = Body(c)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 if "embed" in name else 0.5 / math.sqrt(parameter.shape[1])
                if "o_proj" in name or "down_proj" in name:
                    std /= math.sqrt(2 * c.layers)
                nn.init.normal_(parameter, std=std)

    def forward(self, ids):
        return F.linear(self.model(ids), self.model.embed_tokens.weight)  # tied


def hf_config(c):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": c.dim,
        "intermediate_size": c.hidden,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": EPSILON,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }


# --- Data -----------------------------------------------------------------------


def read_documents(path):
    """Documents as byte arrays, each with the zero byte that ends it."""
    data = np.fromfile(path, dtype=np.uint8)
    return np.split(data, np.flatnonzero(data == 0)[:-1] + 1)


class Batches:
    """Endless training batches. Each pass shuffles the documents, joins them and
    cuts windows at a random phase, so no order of chapters can be learnt: after
    the zero byte any chapter may begin, as it may in generation."""

    def __init__(self, documents, batch, length, seed, device):
        self.documents, self.batch, self.length, self.device = documents, batch, length, device
        self.random = np.random.default_rng(seed)
        self.passes = 0

    def __iter__(self):
        while True:
            order = self.random.permutation(len(self.documents))
            zero = np.zeros(1, np.uint8)
            stream = np.concatenate([zero] + [self.documents[i] for i in order])
            start = int(self.random.integers(self.length)) if self.passes else 0
            count = (len(stream) - start - 1) // self.length
            rows = start + self.random.permutation(count) * self.length
            stream = torch.from_numpy(stream).to(self.device)
            rows = torch.from_numpy(rows).to(self.device)
            offsets = torch.arange(self.length + 1, device=self.device)
            for i in range(0, count - self.batch + 1, self.batch):
                window = stream[rows[i : i + self.batch, None] + offsets].long()
                yield window[:, :-1], window[:, 1:]
            self.passes += 1


@torch.no_grad()
def bits_per_byte(model, documents, device, batch=32):
    """Mean loss in bits over every byte of every document, its ending zero too.
    A document is fed after a zero byte; one longer than the context goes through
    windows that move by half the context, and each byte counts once, with at
    least half the context before it (or all there is)."""
    windows = []  # (ids, targets, first position that counts)
    for document in documents:
        fed = np.concatenate([np.zeros(1, np.uint8), document])
        start, counted = 0, 0
        while counted < len(document):
            end = min(start + CONTEXT, len(document))
            windows.append((fed[start:end], document[start:end], counted - start))
            counted, start = end, start + CONTEXT // 2
    windows.sort(key=lambda w: len(w[0]))
    total, count = 0.0, 0
    for i in range(0, len(windows), batch):
        group = windows[i : i + batch]
        width = len(group[-1][0])
        ids = np.zeros((len(group), width), np.int64)
        targets = np.full((len(group), width), -100, np.int64)
        for row, (fed, wanted, first) in enumerate(group):
            ids[row, : len(fed)] = fed
            targets[row, first : len(wanted)] = wanted[first:]
        logits = model(torch.from_numpy(ids).to(device))
        goal = torch.from_numpy(targets).to(device)
        total += F.cross_entropy(logits.flatten(0, 1).double(), goal.flatten(),
                                 ignore_index=-100, reduction="sum").item()
        count += int((targets >= 0).sum())
    assert count == sum(len(d) for d in documents)
    return total / count / math.log(2)


@torch.no_grad()
def sample(model, prompts, length, temperature, seed, device):
    generator = torch.Generator(device="cpu").manual_seed(seed)
    texts = []
    for prompt in prompts:
        ids = [0] + list(prompt.encode())
        while len(ids) < length:
            logits = model(torch.tensor([ids], device=device))[0, -1].double().cpu()
            p = F.softmax(logits / temperature, -1)
            ids.append(int(torch.multinomial(p, 1, generator=generator)))
            if ids[-1] == 0:
                break
        texts.append(bytes(ids[1:]).decode("ascii", "replace"))
    return texts


# --- Training -------------------------------------------------------------------


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--data", type=pathlib.Path, default=".train-data",
                   help="folder that prepare_text.py wrote (default: %(default)s)")
    p.add_argument("--out", type=pathlib.Path, default=os.environ.get("OUT", ".train-out"),
                   help="folder for the model (default: $OUT, else .train-out)")
    p.add_argument("--minutes", type=float, default=6.5,
                   help="stop training this long after the start (default: %(default)s)")
    p.add_argument("--steps", type=int, help="train so many steps, however long they take")
    p.add_argument("--dim", type=int, default=256)
    p.add_argument("--layers", type=int, default=5)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--kv-heads", type=int, default=2)
    p.add_argument("--head-dim", type=int, default=32)
    p.add_argument("--hidden", type=int, default=512)
    p.add_argument("--dropout", type=float, default=0.15)
    p.add_argument("--batch", type=int, default=64, help="windows of 1024 bytes a step")
    p.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    p.add_argument("--warmup", type=int, default=200, help="steps")
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--ema", type=float, default=0.998, help="decay of the averaged weights")
    p.add_argument("--eval-seconds", type=float, default=15, help="between validations")
    p.add_argument("--eval-steps", type=int, help="validate by steps instead")
    p.add_argument("--seed", type=int, default=1611)
    p.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    c = p.parse_args()
    began = time.monotonic()
    device = torch.device(c.device)
    cuda = device.type == "cuda"
    torch.manual_seed(c.seed)
    c.out.mkdir(parents=True, exist_ok=True)
    say = lambda text: print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True)

    documents = {n: read_documents(c.data / f"{n}.txt") for n in ("train", "validation", "test")}
    model = Llama(c).to(device)
    average = Llama(c).to(device).eval()  # the weights averaged over the last steps
    rounded = Llama(c).to(device).eval()  # ... and rounded to bfloat16, as they are saved
    average.load_state_dict(model.state_dict())
    weights, averages = list(model.parameters()), list(average.parameters())
    say(f"{sum(w.numel() for w in weights)} parameters, {torch.__version__}, "
        f"{torch.cuda.get_device_name() if cuda else 'CPU'}; {vars(c)}")
    optimizer = torch.optim.AdamW(
        [{"params": [w for w in weights if w.ndim > 1], "weight_decay": c.weight_decay},
         {"params": [w for w in weights if w.ndim == 1], "weight_decay": 0.0}],
        lr=c.lr, betas=(0.9, 0.98), eps=1e-8, fused=cuda)
    batches = Batches(documents["train"], c.batch, CONTEXT, c.seed, device)
    batch_iterator = iter(batches)

    def loss_of(forward, ids, targets):
        autocast = torch.autocast("cuda", torch.bfloat16) if cuda else contextlib.nullcontext()
        with autocast:
            logits = forward(ids)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    forward = loss_of
    if not c.no_compile:
        try:  # the first call compiles; without a working compiler go on without it
            compiled = torch.compile(loss_of)
            ids, targets = next(iter(Batches(documents["train"], c.batch, CONTEXT, 0, device)))
            compiled(model, ids, targets).backward()
            forward = compiled
            say("compiled")
        except Exception as error:
            say(f"torch.compile failed, going on without it: {str(error)[:500]}")
        optimizer.zero_grad(set_to_none=True)

    best = math.inf

    def validate():
        nonlocal best
        state = {k: v.to(torch.bfloat16) for k, v in average.state_dict().items()}
        rounded.load_state_dict(state)  # back to float32
        bits = bits_per_byte(rounded, documents["validation"], device)
        if bits < best:
            best = bits
            part = c.out / "model.safetensors.part"
            save_file({k: v.cpu().contiguous() for k, v in state.items()}, part,
                      metadata={"format": "pt"})
            part.chmod(0o644)
            os.replace(part, c.out / "model.safetensors")
        return bits

    (c.out / "config.json").write_text(json.dumps(hf_config(c), indent=2) + "\n")
    first_step = last_eval = time.monotonic()
    training_time = began + 60 * c.minutes - first_step
    step, running, progress = 0, torch.zeros((), device=device), 0.0
    since = 0
    while progress < 1:
        rate = c.lr * min(1, (step + 1) / c.warmup)
        rate *= 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, targets = next(batch_iterator)
        loss = forward(model, ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            # A short memory at the start, so that the average leaves the random weights.
            torch._foreach_lerp_(averages, weights, 1 - min(c.ema, (step + 1) / (step + 10)))
        running += loss.detach()
        since += 1
        step += 1
        if cuda and step % 10 == 0:
            torch.cuda.synchronize()  # the clock below must see finished steps
        now = time.monotonic()
        progress = step / c.steps if c.steps else (now - first_step) / training_time
        if c.eval_steps:
            due = step % c.eval_steps == 0
        else:
            due = now - last_eval >= c.eval_seconds
        if due or progress >= 1:
            train_bits = running.item() / since / math.log(2)
            bits = validate()
            say(f"step {step:6} pass {batches.passes:4} rate {rate:.2e} train {train_bits:.4f} "
                f"validation {bits:.4f} bits per byte, "
                f"{step * c.batch * CONTEXT / (time.monotonic() - first_step) / 1e6:.2f} M bytes/s")
            running.zero_()
            since, last_eval = 0, time.monotonic()

    # What counts is what was written, so measure the file.
    rounded.load_state_dict(load_file(c.out / "model.safetensors", device=str(device)))
    for name in ("validation", "test"):
        say(f"RESULT {name} {bits_per_byte(rounded, documents[name], device):.5f} bits per byte "
            f"(bfloat16 weights, float32 arithmetic), {step} steps")
    for text in sample(rounded, ["", "Psalm 151\n1 ", "And it came to pass"], 500, 0.8, c.seed,
                       device):
        say("SAMPLE\n" + text + "\n")


if __name__ == "__main__":
    main()

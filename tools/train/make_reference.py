#!/usr/bin/env python3
"""Makes examples/generate/model/reference.json: what the model must answer.

    python3 tools/train/make_reference.py --model examples/generate/model --data .train-data

It is independent of train.py: Hugging Face transformers loads the saved files
and runs them in float64 on the CPU. Generation uses its cache; then the whole
sequence is run again at once, without one, must choose the same bytes, and gives
every number that is written. --check compares a second implementation, written here in plain
PyTorch with its rotation angles in float64, and prints the largest difference. --bits
measures validation.txt and test.txt in float32, by the rule of train.py.
The fields of the file are described in examples/generate/model/README.md.
"""
import argparse
import json
import math
import pathlib
import re

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file

POSITIONS = 300  # fed positions in all: byte 0, the prompt, and what was generated
PROMPTS = {
    "empty": "",
    "one_byte": "J",
    "words": "And the LORD said unto Moses, ",
    "heading": "Psalm 23\n1 The LORD is my shepherd;",
    "held_out": "John 1\n1 In the beginning was the Word, ",
    "newline": "And he said unto them,\n",
    "end": "Psalm 150\n6 Let every thing that hath breath praise the LORD. Praise",  # then 0
    "unseen_words": "The engineer opened the page table and said, ",
    "bytes": "\u00c6 caf\u00e9 \u2014 ",  # bytes over 127, which training never showed
    "long": ("Genesis 1\n"
             "1 In the beginning God created the heaven and the earth.\n"
             "2 And the earth was without form, and void; and darkness was upon the face of the "
             "deep. And the Spirit of God moved upon the face of the waters.\n"
             "3 And God said, Let there be light"),
}
TEXT_DOCUMENT, TEXT_BYTES = "Ruth 1", 900  # held out: from test.txt


class Plain:
    """The same architecture again, in float64 and as plainly as it can be."""

    def __init__(self, folder):
        self.c = json.loads((folder / "config.json").read_text())
        self.w = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}

    def __call__(self, ids):
        c, w = self.c, self.w
        norm = lambda x, g: x / (x.pow(2).mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt() * g
        heads, kv, d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        n = len(ids)
        angle = torch.outer(torch.arange(n).double(),
                            c["rope_theta"] ** (-torch.arange(d // 2).double() * 2 / d))
        turn = torch.polar(torch.ones_like(angle), angle)

        def rope(x):  # n x d
            y = torch.complex(x[:, : d // 2], x[:, d // 2 :]) * turn
            return torch.cat((y.real, y.imag), -1)

        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        x = w["model.embed_tokens.weight"][torch.tensor(ids)]
        for layer in range(c["num_hidden_layers"]):
            at = lambda name: w[f"model.layers.{layer}.{name}.weight"]
            h = norm(x, at("input_layernorm"))
            q, k, v = (h @ at(f"self_attn.{i}_proj").T for i in "qkv")
            out = []
            for head in range(heads):
                source = head // (heads // kv)
                qh = rope(q[:, head * d : (head + 1) * d])
                kh = rope(k[:, source * d : (source + 1) * d])
                score = (qh @ kh.T / math.sqrt(d)).masked_fill(future, -math.inf)
                out.append(score.softmax(-1) @ v[:, source * d : (source + 1) * d])
            x = x + torch.cat(out, -1) @ at("self_attn.o_proj").T
            h = norm(x, at("post_attention_layernorm"))
            x = x + (F.silu(h @ at("mlp.gate_proj").T) * (h @ at("mlp.up_proj").T)) \
                @ at("mlp.down_proj").T
        return norm(x, w["model.norm.weight"]) @ w["model.embed_tokens.weight"].T


def top(logits, count=8):
    values, ids = logits.topk(count)
    return [[int(i), round(float(v), 6)] for i, v in zip(ids, values)]


def measure(model, name, data):
    """Bits per byte of each document and of all, every byte counted once."""
    context = model.config.max_position_embeddings
    total, rows = 0.0, []
    for document in data.split(b"\0")[:-1]:
        ids = torch.tensor([0, *document, 0])
        nll, done = 0.0, 0
        while done < len(ids) - 1:
            # The first window counts whole, each further one its second half.
            start = max(0, done - context // 2)
            end = min(start + context, len(ids) - 1)
            logits = model(ids[None, start:end], use_cache=False).logits[0, done - start :]
            nll += float(F.cross_entropy(logits.double(), ids[done + 1 : end + 1],
                                         reduction="sum"))
            done = end
        total += nll
        rows.append((document.split(b"\n", 1)[0].decode(), nll / (len(ids) - 1) / math.log(2)))
    print(", ".join(f"{title}: {bits:.3f}" for title, bits in rows))
    print(f"{name}: {total / len(data) / math.log(2):.5f} bits per byte over {len(data)} bytes")


@torch.no_grad()
def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=pathlib.Path, default="examples/generate/model")
    p.add_argument("--data", type=pathlib.Path, default=".train-data")
    p.add_argument("--check", action="store_true", help="compare a second implementation")
    p.add_argument("--bits", action="store_true", help="measure the held-out text and stop")
    p.add_argument("--margin", type=float, default=1e-3, help="refuse a smaller one")
    p.add_argument("--leave-out", default="", help="prompt names, comma-separated")
    a = p.parse_args()

    precision = torch.float32 if a.bits else torch.float64
    model, info = transformers.LlamaForCausalLM.from_pretrained(
        a.model, dtype=precision, attn_implementation="eager", output_loading_info=True)
    for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info.get(keys), info
    model.eval()
    assert model.dtype == precision
    if a.bits:
        for name in ("validation", "test"):
            measure(model, name, (a.data / f"{name}.txt").read_bytes())
        return
    run = lambda ids: model(torch.tensor([ids]), use_cache=False).logits[0]
    plain = Plain(a.model)
    worst = 0.0

    reference = {
        "model": "model.safetensors (bfloat16) run in float64",
        "implementation": f"transformers {transformers.__version__} LlamaForCausalLM, "
                          f"PyTorch {torch.__version__.split('+')[0]}, CPU",
        "parameters": sum(v.numel() for v in model.parameters()),
        "greedy": [],
    }
    for name, prompt in PROMPTS.items():
        if name in a.leave_out.split(","):
            continue
        prompt_ids = [0] + list(prompt.encode())
        ids, output, cache, fed = list(prompt_ids), [], None, prompt_ids
        while True:
            answer = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
            cache, fed = answer.past_key_values, [int(answer.logits[0, -1].argmax())]
            output += fed
            if fed[0] == 0 or len(ids) == POSITIONS:
                break
            ids += fed
        logits = run(ids)
        best = logits[len(prompt_ids) - 1 :].topk(2)
        assert best.indices[:, 0].tolist() == output
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        if a.check:
            worst = max(worst, float((plain(ids) - logits).abs().max()))
        places = sorted({0, len(prompt_ids) - 1, (len(prompt_ids) + len(ids)) // 2, len(ids) - 1})
        text = bytes(output).decode("utf-8", "replace")
        print(f"--- {name}: {len(prompt_ids)} ids, {len(output)} out, margin {min(margins):.5f} "
              f"at {margins.index(min(margins))}\n{prompt!r} + {text!r}")
        if min(margins) <= a.margin:
            raise SystemExit(f"make_reference.py: prompt {name}: margin {min(margins)}")
        reference["greedy"].append({
            "name": name, "prompt": prompt, "prompt_ids": prompt_ids, "output_ids": output,
            "output_text": text, "min_margin": round(min(margins), 6),
            "top_logits": [{"position": i, "top": top(logits[i])} for i in places],
        })

    documents = (a.data / "test.txt").read_bytes().split(b"\0")
    text = next(d for d in documents if d.startswith(TEXT_DOCUMENT.encode() + b"\n"))[:TEXT_BYTES]
    ids = [0] + list(text)
    logits = run(ids)[:-1]
    nll = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    if a.check:
        mine = plain(ids)[:-1]
        worst = max(worst, float((mine - logits).abs().max()))
        other = F.cross_entropy(mine, torch.tensor(ids[1:]))
        print(f"largest logit difference of the second implementation: {worst:.3g}; "
              f"of the mean nll: {abs(float(other - nll.mean())):.3g}")
    reference["teacher_forced"] = {
        "source": TEXT_DOCUMENT, "text": text.decode(), "ids": ids,
        "mean_nll": round(float(nll.mean()), 8),
        "bits_per_byte": round(float(nll.mean()) / math.log(2), 6),
        "nll": [round(float(v), 6) for v in nll],
        "top_logits": [{"position": i, "top": top(logits[i])}
                       for i in (0, 1, 255, 511, len(nll) - 1)],
    }
    print(f"teacher-forced: {len(nll)} bytes, {float(nll.mean()):.6f} nats, "
          f"{float(nll.mean()) / math.log(2):.5f} bits per byte")

    # One line per number list keeps the file readable.
    out = json.dumps(reference, indent=1, ensure_ascii=True)
    out = re.sub(r"\[[-\d.,\s\[\]e]+\]", lambda m: re.sub(r"\s+", " ", m[0]), out)
    (a.model / "reference.json").write_text(out + "\n")


if __name__ == "__main__":
    main()

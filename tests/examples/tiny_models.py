#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every architecture that examples/generate runs, with random weights, made by transformers, and what
transformers says with them. As a program it writes the fixtures of model_kinds_test.cpp:

    python3 tests/examples/tiny_models.py --out tests/examples/models

Needs torch and transformers. The fixtures were made with transformers 5.23.0 and torch 2.15.0.
"""

import argparse
import json
import math
import pathlib

import torch
import transformers

SHAPE = dict(
    vocab_size=256, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=128, bos_token_id=0, eos_token_id=255,
    pad_token_id=None)
LLAMA3_ROPE = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=64)

GPT_OSS_ROPE = dict(rope_type="yarn", rope_theta=150000.0, factor=32.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
                    original_max_position_embeddings=64)


def config_of(kind, **changes):
    """The configuration of one kind. Windows are shorter than the texts, so that they matter."""
    t = transformers
    shape = SHAPE | changes
    if kind == "llama3":
        return t.LlamaConfig(**(shape | dict(head_dim=16)), rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True)
    if kind == "llama_bias":
        return t.LlamaConfig(**shape, attention_bias=True, rope_parameters=dict(rope_type="linear", rope_theta=5000.0,
                                                                               factor=2.0))
    if kind == "mistral":
        return t.MistralConfig(**shape, sliding_window=8)
    if kind == "qwen2":
        return t.Qwen2Config(**(shape | dict(head_dim=4)), tie_word_embeddings=True)
    if kind == "qwen2_window":
        return t.Qwen2Config(**(shape | dict(head_dim=4, num_hidden_layers=3)), use_sliding_window=True,
                             sliding_window=6, max_window_layers=1)
    if kind == "qwen3":
        return t.Qwen3Config(**shape, rope_parameters=dict(rope_type="default", rope_theta=1000000.0))
    if kind == "gemma2":
        return t.Gemma2Config(**shape, sliding_window=8, query_pre_attn_scalar=20, attn_logit_softcapping=3.0,
                              final_logit_softcapping=5.0)
    if kind == "gemma3":
        return t.Gemma3TextConfig(**(shape | dict(num_hidden_layers=4)), sliding_window=8, query_pre_attn_scalar=12,
                                  sliding_window_pattern=3)
    if kind == "gpt_oss":
        # Windows of 128 in every second layer, as the published ones: texts are longer.
        return t.GptOssConfig(**(shape | dict(num_hidden_layers=4, max_position_embeddings=256)),
                              sliding_window=128, num_local_experts=4, num_experts_per_tok=2,
                              rope_parameters=GPT_OSS_ROPE)
    if kind == "gpt_oss_window":
        return t.GptOssConfig(**(shape | dict(num_hidden_layers=3)), sliding_window=6, num_local_experts=5,
                              num_experts_per_tok=3, rope_parameters=dict(rope_type="default", rope_theta=10000.0))
    if kind == "qwen3_5":
        return t.Qwen3_5TextConfig(
            **(shape | dict(num_hidden_layers=4)), layer_types=["linear_attention"] * 2 + ["full_attention",
                                                                                        "linear_attention"],
            linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=4, linear_value_head_dim=4,
            linear_conv_kernel_dim=3,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.5,
                                 mrope_section=[1, 1, 0], mrope_interleaved=True))
    raise ValueError(kind)


FIXTURES = ["llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "qwen3_5"]
KINDS = FIXTURES + ["llama_bias", "qwen2_window", "gpt_oss_window"]


def make_model(kind, seed, **changes):
    """A model whose weights are exact in bf16, of the sizes that activations near 1 take."""
    config = config_of(kind, **changes)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    gemma = kind.startswith("gemma")
    zero_centered = gemma or kind == "qwen3_5"
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values = torch.randn_like(weight)
            if name.endswith("norm.weight") or "layernorm" in name:
                values = values * 0.2 + (0.0 if zero_centered and "linear_attn" not in name else 1.0)
            elif name.endswith("bias") or name.endswith("sinks"):
                values = values * 0.5
            elif name.endswith("A_log"):  # memories of a few tokens to some hundred
                values = values * 1.5 - 3.0
            elif "experts" in name:  # [experts, inputs, outputs]
                values = values * 1.5 / math.sqrt(weight.shape[1])
            elif "embed_tokens" in name:
                values = values * (1.0 / math.sqrt(config.hidden_size) if gemma else 1.0)
            elif "q_proj" in name or "k_proj" in name:
                values = values * 2.0 / math.sqrt(weight.shape[1])
            else:
                values = values * 1.5 / math.sqrt(weight.shape[1])
            weight.copy_(values.bfloat16().float())
    return model


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def continued(model, prompt, max_positions):
    """Greedy ids as `generate` counts them: until an end, or max_positions tokens were fed. And the smallest lead of
    a chosen id over the next one."""
    eos = model.generation_config.eos_token_id
    stops = eos if isinstance(eos, list) else [eos]
    ids, lead = list(prompt), math.inf
    while len(ids) <= max_positions:
        best = torch.topk(logits_of(model, ids)[-1], 2)
        lead = min(lead, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
        if ids[-1] in stops:
            break
    return ids[len(prompt):], lead


def prompts_of(seed, lengths, vocab_size=254):
    generator = torch.Generator().manual_seed(seed)
    return [[0] + torch.randint(1, vocab_size, (length - 1,), generator=generator).tolist() for length in lengths]


def sure_model(kind, seed, lengths, max_positions, least_lead=5e-3, **changes):
    """A model and its greedy texts, the first seed from `seed` on with which no id is chosen by a hair."""
    while True:
        model = make_model(kind, seed, **changes)
        rows = []
        for prompt in prompts_of(seed, lengths):
            output, lead = continued(model, prompt, max_positions)
            rows.append({"prompt_ids": prompt, "output_ids": output})
            if lead < least_lead:
                break
        distinct = {i for row in rows for i in row["output_ids"]}
        if lead >= least_lead and len(distinct) >= 8:
            return model, rows, seed
        seed += 1


def save(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    # A copy in bf16: the model itself stays float32.
    copy = transformers.AutoModelForCausalLM.from_config(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(folder)


def sizes_of(kind):
    """Lengths of prompts, and of the longest text, so that windows are passed."""
    return ([1, 5, 140], 160) if kind == "gpt_oss" else ([1, 5, 40], 64)


def write_fixture(kind, out):
    lengths, max_positions = sizes_of(kind)
    model, rows, seed = sure_model(kind, 1, lengths, max_positions)
    folder = out / kind
    save(model, folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for row in rows:
        ids = row["prompt_ids"] + row["output_ids"][:-1]
        logits = logits_of(model, ids)
        row["logits"] = [[position, [[int(i), round(float(logits[position][i]), 5)]
                                     for i in torch.topk(logits[position], 3).indices]]
                         for position in range(0, len(ids), 3)]
    expected = {"max_positions": max_positions, "seed": seed, "rows": rows}
    (folder / "expected.json").write_text(json.dumps(expected, separators=(",", ":")) + "\n")
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{kind}: seed {seed}, {size / 1024:.0f} KiB")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("kinds", nargs="*", default=FIXTURES)
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        write_fixture(kind, arguments.out)


if __name__ == "__main__":
    main()

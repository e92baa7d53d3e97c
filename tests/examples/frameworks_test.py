#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""examples/generate against the packages that models come from.

    frameworks_test.py tokenizers <encode_strings> [<strings per kind>]
    frameworks_test.py transformers <generate>
    frameworks_test.py latent <07_latent_attention>

Each kind of tokenizer.json gives the ids and texts of the `tokenizers` package on 10^5 strings (random Unicode, code,
spaces, emoji, many languages) over all kinds, and tiny random checkpoints of every architecture the greedy ids of
`transformers`; so does the absorbed latent attention of an example, with DeepSeek-V2's class in float64. Ends with 77, "skipped", where the package is not installed. BIFOLIO_FRAMEWORKS_PYTHON names another
Python to run it. The seed is printed and may be set by
BIFOLIO_TEST_SEED.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

SKIPPED = 77
MAX_SHOWN = 5


def seed_of_run():
    seed = int(os.environ.get("BIFOLIO_TEST_SEED") or time.time_ns() % 2**31)
    print(f"seed {seed} (repeat with BIFOLIO_TEST_SEED={seed})", flush=True)
    return seed


def compare_tokenizers(program, num_strings):
    import tiny_tokenizers

    seed = seed_of_run()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for number, kind in enumerate(tiny_tokenizers.KINDS):
            tok = tiny_tokenizers.make_tokenizer(kind, 3000, seed)
            path = pathlib.Path(folder) / f"{kind}.json"
            tok.save(str(path))
            texts = tiny_tokenizers.strings(seed + number, num_strings)
            expected = tok.encode_batch(texts)
            lines = "".join(json.dumps(text) + "\n" for text in texts)
            size = max(tok.get_vocab(with_added_tokens=True).values()) + 1
            run = subprocess.run([program, str(path), str(size)], input=lines, capture_output=True, text=True)
            if run.returncode != 0:
                print(f"{kind}: encode_strings ended with {run.returncode}: {run.stderr}")
                failures += 1
                continue
            answers = [json.loads(line) for line in run.stdout.split("\n") if line]
            assert len(answers) == len(texts), (len(answers), len(texts))
            wrong = texts_compared = 0
            special = {t["id"] for t in json.loads(tok.to_str())["added_tokens"] if t["special"]}
            for text, encoded, answer in zip(texts, expected, answers):
                decoded = tok.decode([i for i in encoded.ids if i not in special])
                # What bytes that are no text decode to is the matter of each program, and so is whether a text begins
                # anew after a special token in its middle.
                comparable = "\ufffd" not in decoded + answer["text"] and not special.intersection(encoded.ids[1:])
                same_text = not comparable or decoded == answer["text"]
                texts_compared += comparable
                if encoded.ids == answer["ids"] and same_text and "wrong_bound" not in answer:
                    continue
                wrong += 1
                if wrong <= MAX_SHOWN:
                    print(f"{kind}: {text!r}\n  tokenizers {encoded.ids}\n             {encoded.tokens}\n"
                          f"             {decoded!r}\n  generate   {answer}")
            num_ids = sum(len(e.ids) for e in expected)
            print(f"{kind}: {len(texts)} strings, {num_ids} ids, {texts_compared} decoded texts compared, {wrong} differ",
                  flush=True)
            failures += wrong
    return failures


def compare_transformers(program):
    import tiny_models

    seed = seed_of_run() % 10**6
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in tiny_models.KINDS:
            longest = 40 if kind != "gpt_oss" else 150
            model, rows, used = tiny_models.sure_model(kind, seed, [1, 3, longest - 20], longest)
            path = pathlib.Path(folder) / kind
            tiny_models.save(model, path)
            command = [program, "--device", "cpu", "--model", str(path), "--json", "--temperature", "0",
                       "--max-positions", str(longest), "--block-size", "4"]
            for row in rows:
                command += ["--prompt-ids", ",".join(map(str, row["prompt_ids"]))]
            # Twice each in a pool with room for about one text: found in the cache, preempted, swapped, and forked.
            scarce = ["--num-blocks", str(longest // 4 + 8), "--host-blocks", "200", "--preemption", "swap",
                      "--samples", "2", *command[-2 * len(rows):]]
            for name, options, expected in [
                    ("alone", [], [row["output_ids"] for row in rows]),
                    ("scarce", scarce, [row["output_ids"] for row in rows + rows for _ in range(2)])]:
                run = subprocess.run(command + options, capture_output=True, text=True)
                got = [json.loads(line)["output_ids"] for line in run.stdout.split("\n") if line]
                same = run.returncode == 0 and got == expected
                print(f"{kind}, {name}: seed {used}: {'the same' if same else 'DIFFERENT'}", flush=True)
                if not same:
                    failures += 1
                    print(f"  ended with {run.returncode}: {run.stderr}\n  expected {expected}\n  got {got}")
    return failures


def compare_latent(program):
    """The weights of a DeepseekV2ForCausalLM, dense in all layers, for the program's plain format."""
    import struct

    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    seed = seed_of_run() % 10**6
    failures = 0
    for number, (rank, rope, heads, layers) in enumerate([(32, 8, 4, 3), (512, 64, 16, 1)]):
        torch.manual_seed(seed + number)
        vocab, dim, nope, value, hidden = 96, 64, 16, 24, 80
        config = DeepseekV2Config(
            vocab_size=vocab, hidden_size=dim, intermediate_size=hidden, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, kv_lora_rank=rank, q_lora_rank=None,
            qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=value, head_dim=rope,
            first_k_dense_replace=layers, max_position_embeddings=256, rms_norm_eps=1e-6, bos_token_id=None,
            eos_token_id=None, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        config._attn_implementation = "eager"
        model = DeepseekV2ForCausalLM(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.copy_(1 + 0.2 * torch.randn_like(parameter))
                else:
                    parameter.normal_(0, (4.0 if "embed" in name or "lm_head" in name else 1.4) / parameter.shape[1]**0.5)
        prompt = torch.randint(0, vocab, (1, 19)).tolist()[0]
        double = model.double()
        ids, margins = list(prompt), []
        with torch.no_grad():
            for _ in range(32):
                best = double(torch.tensor([ids])).logits[0, -1].topk(2)
                margins.append(float(best.values[0] - best.values[1]))
                ids.append(int(best.indices[0]))
        # Some of the class's steps are float32 whatever its weights are; a tie would say nothing.
        sure = next((i for i, margin in enumerate(margins) if margin < 1e-3), len(margins))
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "model.bin"
            w = model.float().state_dict()
            names = ["model.embed_tokens.weight"]
            for l in range(layers):
                names += [f"model.layers.{l}.{part}.weight" for part in (
                    "input_layernorm", "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_a_layernorm",
                    "self_attn.kv_b_proj", "self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj",
                    "mlp.up_proj", "mlp.down_proj")]
            names += ["model.norm.weight", "lm_head.weight"]
            with path.open("wb") as file:
                file.write(struct.pack("<9i", vocab, dim, layers, heads, rank, nope, rope, value, hidden))
                for name in names:
                    file.write(w[name].contiguous().numpy().astype("<f4").tobytes())
            run = subprocess.run([program, str(path)] + [str(i) for i in prompt], capture_output=True, text=True)
        got = [int(i) for i in run.stdout.split()]
        expected = ids[len(prompt):]
        same = run.returncode == 0 and sure >= 8 and got[:sure] == expected[:sure]
        print(f"rank {rank} + {rope}: {sure} of {len(expected)} ids compared: {'the same' if same else 'DIFFERENT'}",
              flush=True)
        if not same:
            failures += 1
            print(f"  ended with {run.returncode}: {run.stderr}\n  expected {expected}\n  got {got}")
    return failures


def main():
    if len(sys.argv) < 3 or sys.argv[1] not in ("tokenizers", "transformers", "latent"):
        print(__doc__, file=sys.stderr)
        return 2
    wanted = os.environ.pop("BIFOLIO_FRAMEWORKS_PYTHON", None)
    if wanted:
        os.execvp(wanted, [wanted] + sys.argv)
    package, program = sys.argv[1], sys.argv[2]
    needed = [package] if package == "tokenizers" else ["torch", "transformers"]
    for name in needed:
        try:
            __import__(name)
        except ImportError:
            print(f"SKIPPED: the Python package {name} is not installed")
            return SKIPPED
    if package == "tokenizers":
        failures = compare_tokenizers(program, int(sys.argv[3]) if len(sys.argv) > 3 else 12500)
    elif package == "latent":
        failures = compare_latent(program)
    else:
        failures = compare_transformers(program)
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

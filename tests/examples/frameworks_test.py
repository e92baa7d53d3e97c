#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""examples/generate against the packages that models come from.

    frameworks_test.py tokenizers <encode_strings> [<strings per kind>]
    frameworks_test.py transformers <generate>

Each kind of tokenizer.json gives the ids and texts of the `tokenizers` package on 10^5 strings (random Unicode, code,
spaces, emoji, many languages) over all kinds, and tiny random checkpoints of every architecture the greedy ids of
`transformers`. Ends with 77, "skipped", where the package is not installed. BIFOLIO_FRAMEWORKS_PYTHON names another
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
            model, rows, used = tiny_models.sure_model(kind, seed, [1, 3, 20], 40)
            path = pathlib.Path(folder) / kind
            tiny_models.save(model, path)
            command = [program, "--device", "cpu", "--model", str(path), "--json", "--temperature", "0",
                       "--max-positions", "40", "--block-size", "4"]
            for row in rows:
                command += ["--prompt-ids", ",".join(map(str, row["prompt_ids"]))]
            run = subprocess.run(command, capture_output=True, text=True)
            got = [json.loads(line)["output_ids"] for line in run.stdout.split("\n") if line]
            same = run.returncode == 0 and got == [row["output_ids"] for row in rows]
            print(f"{kind}: seed {used}: {'the same' if same else 'DIFFERENT'}", flush=True)
            if not same:
                failures += 1
                print(f"  ended with {run.returncode}: {run.stderr}\n  expected {rows}\n  got {got}")
    return failures


def main():
    if len(sys.argv) < 3 or sys.argv[1] not in ("tokenizers", "transformers"):
        print(__doc__, file=sys.stderr)
        return 2
    wanted = os.environ.pop("BIFOLIO_FRAMEWORKS_PYTHON", None)
    if wanted:
        os.execvp(wanted, [wanted] + sys.argv)
    package, program = sys.argv[1], sys.argv[2]
    needed = [package] if package == "tokenizers" else ["torch", package]
    for name in needed:
        try:
            __import__(name)
        except ImportError:
            print(f"SKIPPED: the Python package {name} is not installed")
            return SKIPPED
    if package == "tokenizers":
        failures = compare_tokenizers(program, int(sys.argv[3]) if len(sys.argv) > 3 else 12500)
    else:
        failures = compare_transformers(program)
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

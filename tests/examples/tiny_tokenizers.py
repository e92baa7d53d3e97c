#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Small tokenizer.json files of every kind that examples/generate reads, trained by the `tokenizers` package on random
texts, and the strings to compare them on. As a program it writes the fixtures of hugging_face_tokenizer_test.cpp:

    python3 tests/examples/tiny_tokenizers.py --out tests/examples/tokenizer_files

The fixtures were made with tokenizers 0.23.3.
"""

import argparse
import json
import pathlib
import random

from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers)

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
KINDS = ["gpt2", "llama3", "qwen2", "smollm", "llama2", "mistral", "tinyllama", "gemma"]

WORDS = """the of and to in is that it was for on are as with his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some so these
would other into has more her two like him see time could no make than first been its who now people my made over did
I'm you're it's don't we'll they've he'd IT'S DON'T I'Ll naïve café façade über Straße señor ångström Œuvre ſo
привет мир это не так как хорошо съешь ещё этих мягких булок Ελλάδα καλημέρα κόσμε ότι שלום עולם مرحبا بالعالم سلام
नमस्ते दुनिया हिन्दी ভাষা தமிழ் ไทยภาษา ភាសាខ្មែរ ქართული հայերեն አማርኛ 你好 世界 這是 一個 測試 こんにちは 世界です カタカナ
안녕하세요 세계 한국어 tiếng Việt người được Türkçe İstanbul ığdır čeština příliš žluťoučký kůň łódź zażółć gęślą jaźń
for(int i=0;i<n;++i) return x; def f(a,b): self.x += 1 #include <vector> std::vector<int> v{1,2,3}; if (x == nullptr)
SELECT * FROM t WHERE a>=10; {"key": [1, 2.5, null]} <div class="a"> https://example.org/a?b=c&d=%20 user@example.org
3.14159 1,000,000 2024-11-05 12:34:56 0xDEADBEEF 1e-9 v1.2.3 $99.99 50% ½ ² ③ Ⅷ ١٢٣ १२३ 一二三 １２３ # ## ### --- *** ===""".split()
EMOJI = ["😀", "👍🏽", "👨‍👩‍👧‍👦", "🇩🇪", "❤️", "✌🏿", "🏳️‍🌈", "☕", "🤷‍♀️", "1️⃣"]
SPACES = [" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\t\t", " \n ", "\u00a0", "\u3000", "\u2003", "\u0085", "\u200b", "\v"]
MARKS = ["\u0301", "\u0300", "\u0323", "\u0308", "\u0327", "\u0345", "\u0334", "\u1abd", "\u093c", "\u3099", "\u05b0", "\u0340"]
PIECES = ["'s", "'S", "'ſ", "'ll", "'", "''", "▁", "▁▁", "<s>", "</s>", "<|end|>", "<|end", "<mask>", "<0x0A>", "Ġ", "\ufffd"]


def one_code(rng):
    """Any code point, more often of the lower planes."""
    while True:
        code = rng.randrange(0x80) if rng.random() < 0.2 else rng.randrange(
            rng.choice([0x250, 0x700, 0x2000, 0x3100, 0xA000, 0x11000, 0x20000, 0x110000]))
        if not 0xD800 <= code < 0xE000:
            return chr(code)


def one_string(rng):
    parts = []
    style = rng.random()
    for _ in range(rng.randrange(1, 9)):
        kind = rng.random()
        if style < 0.45 or kind < 0.4:
            parts.append(rng.choice(WORDS))
            parts.append(rng.choice([" ", " ", " ", "", rng.choice(SPACES)]))
        elif kind < 0.5:
            parts.append(rng.choice(SPACES))
        elif kind < 0.6:
            parts.append(rng.choice(EMOJI))
        elif kind < 0.7:
            parts.append("".join(one_code(rng) for _ in range(rng.randrange(1, 6))))
        elif kind < 0.8:
            parts.append(rng.choice("aeoucnAEOUα주가ᄒ ") + "".join(rng.choice(MARKS) for _ in range(rng.randrange(1, 4))))
        elif kind < 0.9:
            parts.append(rng.choice(PIECES))
        else:
            parts.append(str(rng.randrange(10 ** rng.randrange(1, 9))))
    text = "".join(parts)
    if rng.random() < 0.1:
        text = rng.choice(SPACES) + text
    return text if rng.random() < 0.7 else text.strip(" ")


def strings(seed, count):
    rng = random.Random(seed)
    return [""] + [one_string(rng) for _ in range(count - 1)]


def corpus(seed, count):
    rng = random.Random(seed)
    return [" ".join(rng.choice(WORDS) for _ in range(12)) for _ in range(count)] + strings(seed, count // 4)


def byte_level(tok, split, size, special, digits=False, prefix=False):
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split is None))
    tok.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    tok.decoder = decoders.ByteLevel()
    return trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False,
                               initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def make_tokenizer(kind, size, seed):
    """A trained tokenizer of one kind, as its namesake's file has it."""
    tok = Tokenizer(models.BPE())
    low = "▁"
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    if kind == "gpt2":
        trainer = byte_level(tok, None, size, ["<|end|>"])
    elif kind == "smollm":
        trainer = byte_level(tok, None, size, ["<|end|>"], digits=True, prefix=True)
    elif kind == "llama3":
        trainer = byte_level(tok, LLAMA3, size, ["<|end|>", "<s>"])
    elif kind == "qwen2":
        tok.normalizer = normalizers.NFC()
        trainer = byte_level(tok, QWEN2, size, ["<|end|>"])
    else:
        if kind in ("llama2", "gemma"):
            steps = [normalizers.Replace(" ", low)]
            if kind == "llama2":
                steps.insert(0, normalizers.Prepend(low))
            tok.normalizer = normalizers.Sequence(steps) if kind == "llama2" else steps[0]
        if kind == "gemma":
            tok.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        if kind == "mistral":
            tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement=low, prepend_scheme="first", split=False)
        if kind == "tinyllama":
            tok.pre_tokenizer = pre_tokenizers.Metaspace(replacement=low, prepend_scheme="always", split=True)
        steps = [decoders.Replace(low, " "), decoders.ByteFallback(), decoders.Fuse()]
        if kind != "gemma":
            steps.append(decoders.Strip(" ", 1, 0))
        tok.decoder = decoders.Metaspace(replacement=low) if kind == "tinyllama" else decoders.Sequence(steps)
        special = ["<unk>", "<s>", "</s>"] + ([] if kind == "tinyllama" else byte_tokens)
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False, limit_alphabet=150)
    texts = corpus(seed, 400)
    if kind in ("llama2", "gemma", "mistral"):
        # Trained on words, as SentencePiece is, and used on whole texts.
        whole, tok.pre_tokenizer = tok.pre_tokenizer, pre_tokenizers.Metaspace(replacement=low)
        tok.train_from_iterator(texts, trainer)
        file = json.loads(tok.to_str())
        file["pre_tokenizer"] = json.loads(whole.__getstate__()) if whole else None
    else:
        tok.train_from_iterator(texts, trainer)
        file = json.loads(tok.to_str())

    added = file["added_tokens"]
    # Byte tokens are of the model alone; unlike special tokens they are not found in texts.
    file["added_tokens"] = added = [t for t in added if t["content"] not in byte_tokens]
    if kind in ("llama2", "mistral", "tinyllama", "gemma"):
        file["model"] |= dict(byte_fallback=kind != "tinyllama", fuse_unk=kind != "gemma", unk_token="<unk>")
    file["model"]["ignore_merges"] = kind == "llama3"
    if kind == "llama2":  # older files have their merges as one string each
        file["model"]["merges"] = [" ".join(m) for m in file["model"]["merges"]]
        for token in added:
            token["normalized"] = True
    if kind not in ("gpt2", "qwen2", "smollm"):
        processor = json.loads(processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", file["model"]["vocab"]["<s>"])]).__getstate__())
        file["post_processor"] = processor
        if kind == "llama3":
            file["post_processor"] = {"type": "Sequence", "processors": [
                json.loads(processors.ByteLevel(trim_offsets=False).__getstate__()), processor]}
    done = Tokenizer.from_str(json.dumps(file))
    done.add_tokens([AddedToken("<mask>", normalized=kind in ("qwen2", "mistral"), special=False)])
    if kind == "gemma":
        done.add_tokens([AddedToken("▁▁", normalized=False, special=False)])
    return done


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    texts = strings(5, 200)
    expected = {"strings": texts, "ids": {}}
    for kind in KINDS:
        tok = make_tokenizer(kind, 600, 1)
        tok.save(str(out / f"{kind}.json"), pretty=False)
        expected["ids"][kind] = [e.ids for e in tok.encode_batch(texts)]
    (out / "expected.json").write_text(json.dumps(expected, ensure_ascii=True, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

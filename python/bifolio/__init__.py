# SPDX-License-Identifier: Apache-2.0
"""Paged KV cache and attention for your own inference engine.

A `Cache` is the cache of one model on one device. `open` gives a `Sequence`, `step` computes the next tokens of some of
them, layer by layer. Arrays are those of any framework that speaks DLPack; none is imported here, and none is copied.
"""

import dataclasses
import json
import sys

from . import _core

__version__ = _core.version
__all__ = ["Cache", "Error", "OutOfBlocks", "Sequence", "Stats", "Step", "merge", "metrics_text"]


class Error(Exception):
    """A refusal: `code`, such as "invalid_argument", and the library's sentence."""

    def __init__(self, code, sentence):
        super().__init__(sentence)
        self.code = code


class OutOfBlocks(Exception):
    """Blocks are lacking. `retry_later` says whether freeing or swapping out other sequences can help."""

    def __init__(self, retry_later):
        super().__init__("too few blocks are free now" if retry_later else "the whole cache has fewer blocks than that")
        self.retry_later = retry_later


_core.set_exceptions(Error, OutOfBlocks)


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counters of a cache; docs/metrics.md says what each counts."""

    cache: dict
    prefix: dict | None


_units = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def _bytes(size):
    """A number of bytes, or text such as "1GiB"."""
    if size is None:
        return 0
    if isinstance(size, int):
        return size
    text = size.strip()
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = text[len(digits):].strip().upper()
    try:
        return int(float(digits) * _units[unit])
    except (KeyError, ValueError):
        raise Error("invalid_argument", f"'{size}' is no size; it takes a number of bytes or, for example, '1.5GiB'") from None


def _token_list(tokens):
    """Token ids as a list: an int, or what can be iterated, arrays included."""
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    return [tokens] if isinstance(tokens, int) else [int(token) for token in tokens]


def _empty_like(array, shape):
    """An array of the same framework, type and device."""
    module = sys.modules.get(type(array).__module__.split(".")[0])
    if module is None or not hasattr(module, "empty"):
        raise Error("unsupported", f"an output like a {type(array).__qualname__} cannot be made; give one as out=")
    if hasattr(array, "new_empty"):
        return array.new_empty(shape)
    return module.empty(shape, dtype=array.dtype)


class Sequence:
    """Tokens of one text. `append` says which come next; a step computes them."""

    def __init__(self, cache, seq, tokens, num_cached):
        self._cache, self._seq, self._tokens, self._num_computed = cache, seq, tokens, num_cached
        self.num_cached = num_cached  #: tokens of the prompt that were found in the prefix cache

    @property
    def tokens(self):
        """All of them, those that are not computed yet included."""
        return list(self._tokens)

    @property
    def pending(self):
        """Tokens that the next step computes."""
        return self._tokens[self._num_computed:]

    def append(self, tokens):
        """Adds tokens for the next step, and returns the sequence."""
        self._require_open()
        self._tokens.extend(_token_list(tokens))
        return self

    def fork(self):
        """A second sequence with the same tokens, which shares the blocks of those that are computed."""
        self._require_open()
        return Sequence(self._cache, self._cache._core.fork(self._seq), list(self._tokens), self._num_computed)

    def truncate(self, num_tokens):
        """Back to the first tokens."""
        self._require_open()
        if not 0 <= num_tokens <= len(self._tokens):
            raise Error("invalid_argument", f"num_tokens {num_tokens} is not between 0 and {len(self._tokens)}")
        if num_tokens < self._num_computed:
            self._cache._core.truncate(self._seq, num_tokens)
            self._num_computed = num_tokens
        del self._tokens[num_tokens:]

    def free(self):
        """Ends the sequence; its blocks are free, or stay cached. Done by itself when nobody refers to it any more."""
        self._require_open()
        self._cache._core.free(self._seq)
        self._seq = None

    def _require_open(self):
        if self._seq is None:
            raise Error("not_found", "the sequence was freed")

    def __len__(self):
        return len(self._tokens)

    def __repr__(self):
        if self._seq is None:
            return "Sequence(freed)"
        return f"Sequence({self._seq & 0xffffffff}, {len(self)} tokens, {self.num_cached} cached)"

    def __del__(self):
        if getattr(self, "_seq", None) is not None and self._cache._core is not None:
            try:
                self._cache._core.free(self._seq)
            except Exception:  # part of a step that is not committed
                pass


class Step:
    """A step that was begun. As a context manager it commits, or gives the slots back when the body raises."""

    def __init__(self, cache, sequences):
        self._cache, self._sequences = cache, sequences
        self._counts = [len(sequence.pending) for sequence in sequences]
        self._core = _core.Step(cache._core, [(sequence._seq, sequence.pending) for sequence in sequences])
        #: arrays of int32 for any framework (numpy.asarray, torch.from_dlpack, …), of all rows one after another
        self.tokens, self.positions = self._core.tokens, self._core.positions
        self.sample_rows = self._core.sample_rows  #: the row of each sequence's last token
        self.num_tokens = self._core.num_tokens

    def attend(self, layer, q, k, v, *, out=None, scale=None, soft_cap=0.0):
        """Stores k and v [tokens, kv_heads, head_dim] in a layer, and returns attention of q [tokens, q_heads, head_dim]
        over all that the layer holds of the sequences, as an array like q."""
        if out is None:
            out = _empty_like(q, (q.shape[0], q.shape[1], v.shape[2]))
        self._core.attend(layer, q, k, v, out, scale, soft_cap, 0)
        return out

    def commit(self, accepted=None):
        """Ends the step: all tokens, or the first accepted[i] of sequence i; the others are forgotten."""
        self._core.commit(None if accepted is None else list(accepted))
        for i, sequence in enumerate(self._sequences):
            count = self._counts[i] if accepted is None else accepted[i]
            sequence._num_computed += count
            if count < self._counts[i]:
                del sequence._tokens[sequence._num_computed:]

    def drop(self):
        """Gives the slots back: nothing was computed."""
        self._core.drop()

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if self._core.is_open:
            self.commit() if kind is None else self.drop()

    def __repr__(self):
        state = "open" if self._core.is_open else "ended"
        return f"Step({len(self._sequences)} sequences, {self.num_tokens} tokens, {state})"


class Cache:
    """The cache of one model on one device. Sizes are numbers of bytes or text such as "1GiB"."""

    def __init__(self, *, layers, q_heads, kv_heads, head_dim, dtype="f32", kv_dtype=None, layout="hnd", block_size=16,
                 blocks=0, memory=None, host_memory=None, max_sequences=1024, prefix=False, seed=None, windows=(),
                 device="cpu", threads=0):
        self._core = None
        self._core = _core.Cache(
            device=device, threads=threads, layers=layers, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
            dtype=dtype, kv_dtype=kv_dtype or dtype, layout=layout, block_size=block_size, blocks=blocks,
            memory=_bytes(memory), host_memory=_bytes(host_memory), max_sequences=max_sequences, prefix=prefix,
            seed=seed, windows=list(windows))

    def open(self, tokens, *, salt="", adapter_id=0):
        """A sequence with this prompt. What the prefix cache has of it, within the salt's scope, is not computed again."""
        tokens = _token_list(tokens)
        seq, num_cached = self._core.open(tokens, salt.encode() if isinstance(salt, str) else salt, adapter_id)
        return Sequence(self, seq, tokens, num_cached)

    def step(self, sequences):
        """Begins a step that computes the pending tokens of the sequences. Raises OutOfBlocks; nothing is changed then."""
        sequences = list(sequences)
        for sequence in sequences:
            sequence._require_open()
        return Step(self, sequences)

    def swap_out(self, sequences):
        """Moves sequences to host memory, all or none."""
        self._core.swap([sequence._seq for sequence in sequences], True)

    def swap_in(self, sequences):
        """The way back."""
        self._core.swap([sequence._seq for sequence in sequences], False)

    def stats(self):
        """The counters now."""
        counters = json.loads(self._core.metrics_json())
        return Stats(counters["cache"], counters.get("prefix"))

    def check(self):
        """Raises an Error with the first broken invariant."""
        if problem := self._core.check():
            raise Error("internal", problem)

    def __repr__(self):
        now = self.stats().cache
        return (f"Cache({self._core.description}; {now['num_used_blocks']} of {now['num_blocks']} blocks of "
                f"{self._core.block_size} tokens in use)")


def merge(out1, lse1, out2, lse2):
    """Joins two partial attention results in host memory, each normalised by its own sum: (out, lse)."""
    out, lse = _empty_like(out1, out1.shape), _empty_like(lse1, lse1.shape)
    _core.merge(out1, lse1, out2, lse2, out, lse)
    return out, lse


def metrics_text(cache, **labels):
    """The counters in Prometheus' text format."""
    return cache._core.metrics_text(list(labels.items()))

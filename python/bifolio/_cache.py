# SPDX-License-Identifier: Apache-2.0
"""Caches, their sequences and the steps of sequences."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Sequence as Listing
from types import TracebackType
from typing import Any, NamedTuple

from . import _core
from ._values import Error, Stats, Svg, Tokens, num_bytes, salt_bytes, token_list

_letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class Sequence:
    """Tokens of one text. `append` says which come next; a step computes them."""

    def __init__(self, cache: Cache, seq: int, tokens: list[int], num_cached: int) -> None:
        self._cache, self._tokens, self._num_computed = cache, tokens, num_cached
        self._seq: int | None = seq
        self.num_cached = num_cached  #: tokens of the prompt that were found in the prefix cache
        cache._sequences[seq] = self

    @property
    def tokens(self) -> list[int]:
        """All of them, those that are not computed yet included."""
        return list(self._tokens)

    @property
    def pending(self) -> list[int]:
        """Tokens that the next step computes."""
        return self._tokens[self._num_computed:]

    def append(self, tokens: Tokens) -> Sequence:
        """Adds tokens for the next step, and returns the sequence."""
        self._open_seq()
        self._tokens.extend(token_list(tokens))
        return self

    def fork(self) -> Sequence:
        """A second sequence with the same tokens, which shares the blocks of those that are computed."""
        return Sequence(self._cache, self._cache._core.fork(self._open_seq()), list(self._tokens), self._num_computed)

    def truncate(self, num_tokens: int) -> None:
        """Back to the first tokens."""
        seq = self._open_seq()
        if not 0 <= num_tokens <= len(self._tokens):
            raise Error("invalid_argument", f"num_tokens {num_tokens} is not between 0 and {len(self._tokens)}")
        if num_tokens < self._num_computed:
            self._cache._core.truncate(seq, num_tokens)
            self._num_computed = num_tokens
        del self._tokens[num_tokens:]

    def free(self) -> None:
        """Ends the sequence; its blocks are free, or stay cached. Done by itself when nobody refers to it any more."""
        self._cache._core.free(self._open_seq())
        self._seq = None

    def _open_seq(self) -> int:
        if self._seq is None:
            raise Error("not_found", "the sequence was freed")
        return self._seq

    def __len__(self) -> int:
        return len(self._tokens)

    def __repr__(self) -> str:
        if self._seq is None:
            return "Sequence(freed)"
        return f"Sequence({self._seq & 0xffffffff}, {len(self)} tokens, {self.num_cached} cached)"

    def __del__(self) -> None:
        if getattr(self, "_seq", None) is not None:
            try:
                self.free()
            except Exception:  # part of a step that is not committed: it goes with the cache
                pass


class Plane:
    """K or V of a layer, in the memory of the cache and in the order of its layout: what `numpy.from_dlpack` and
    `torch.from_dlpack` take, without a copy. Arrays made from it keep the cache alive, and change with it.

    NumPy has neither bfloat16 nor 8-bit floats. It asks for arrays with `dl_device` and `copy` in its request, and so
    gets the bits of such elements as integers; PyTorch gets their type."""

    def __init__(self, core: _core.Cache, layer: int, of_v: bool) -> None:
        self._core, self._layer, self._of_v = core, layer, of_v
        self._elements = core.plane(layer, of_v, False)

    @property
    def elements(self) -> Any:
        """With the type of the cache, for any framework that has it."""
        return self._elements

    @property
    def bits(self) -> Any:
        """The same memory; types that NumPy does not have are unsigned integers of their size."""
        return self._core.plane(self._layer, self._of_v, True)

    def __dlpack__(self, **request: Any) -> Any:
        asks_as_numpy = "dl_device" in request and "copy" in request
        return (self.bits if asks_as_numpy else self._elements).__dlpack__(**request)

    def __dlpack_device__(self) -> Any:
        return self._elements.__dlpack_device__()

    def __repr__(self) -> str:
        return f"Plane({'V' if self._of_v else 'K'} of layer {self._layer})"


class Layer(NamedTuple):
    """The planes of a layer."""

    k: Plane
    v: Plane


class Step:
    """A step that was begun. As a context manager it commits, or gives the slots back when the body raises."""

    def __init__(self, cache: Cache, sequences: Listing[Sequence], core: _core.Step) -> None:
        self._cache, self._sequences, self._core = cache, sequences, core
        #: arrays of int32 for any framework (numpy.asarray, torch.from_dlpack, …), of all rows one after another
        self.tokens, self.positions = core.tokens, core.positions
        self.sample_rows = core.sample_rows  #: the row of each sequence's last token
        self.num_tokens = core.num_tokens

    @classmethod
    def _of(cls, cache: Cache, sequences: list[Sequence], stream: int) -> Step:
        pending = [(sequence._open_seq(), sequence._tokens[sequence._num_computed:]) for sequence in sequences]
        step = cls(cache, sequences, _core.Step(cache._core, pending, [], stream))
        step._counts = [len(tokens) for _, tokens in pending]
        return step

    _counts: list[int] = []

    @property
    def graph_key(self) -> tuple[int, ...] | None:
        """Steps with equal keys can share one captured CUDA graph of the `attend` calls of all layers. A replay computes
        this step with its own lengths, blocks and slots: beginning it copied them to where the graph reads them. Launch
        the graph in the step's stream, before the next step begins. The key is made of the cache, the numbers of
        sequences and tokens, the addresses of the step's arrays on the device, and the kernels and buffers of its plans.
        Not of the arrays and options that `attend` is called with: a graph keeps those of its capture. None on the CPU."""
        return self._core.graph_key

    def attend(self, layer: int, q: Any, k: Any, v: Any, *, out: Any = None, scale: float | None = None,
               soft_cap: float = 0.0, sinks: Any = None, alibi_slopes: Any = None, lse: Any = None) -> Any:
        """Stores k and v [tokens, kv_heads, head_dim] in a layer, and returns attention of q [tokens, q_heads, head_dim]
        over all that the layer holds of the sequences, as an array like q (or in `out`). `sinks` and `alibi_slopes` are
        float32 [q_heads], `lse` float32 [tokens, q_heads] is written."""
        return self._core.attend(layer, q, k, v, out, scale, soft_cap, sinks, alibi_slopes, lse)

    def commit(self, accepted: Iterable[int] | None = None) -> None:
        """Ends the step: all tokens, or the first accepted[i] of sequence i; the others are forgotten."""
        numbers = None if accepted is None else list(accepted)
        self._core.commit(numbers)
        for i, sequence in enumerate(self._sequences):
            count = self._counts[i] if numbers is None else numbers[i]
            sequence._num_computed += count
            if count < self._counts[i]:
                del sequence._tokens[sequence._num_computed:]

    def drop(self) -> None:
        """Gives the slots back: nothing was computed."""
        self._core.drop()

    def __enter__(self) -> Step:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._core.is_open:
            self.commit() if kind is None else self.drop()

    def __repr__(self) -> str:
        state = "open" if self._core.is_open else "ended"
        return f"Step({len(self._sequences)} sequences, {self.num_tokens} tokens, {state})"


class Cache:
    """The cache of one model on one device. Sizes are numbers of bytes or text such as "1GiB"."""

    def __init__(self, *, layers: int, q_heads: int, kv_heads: int, head_dim: int, dtype: str = "f32",
                 kv_dtype: str | None = None, layout: str = "hnd", block_size: int = 16, blocks: int = 0,
                 memory: int | str | None = None, host_memory: int | str | None = None, max_sequences: int = 1024,
                 prefix: bool = False, seed: tuple[int, int] | None = None, windows: Iterable[int] = (),
                 device: str = "cpu", threads: int = 0, events: bool = False, reserve: float = 0.1) -> None:
        """Without `blocks` and `memory` the cache takes what the device has free but for a fraction `reserve` of all its
        memory; of the host's, at most 4 GiB."""
        self._sequences: weakref.WeakValueDictionary[int, Sequence] = weakref.WeakValueDictionary()
        self.layers, self.max_sequences = layers, max_sequences
        self._core = _core.Cache(dict(
            device=device, threads=threads, layers=layers, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
            dtype=dtype, kv_dtype=kv_dtype or dtype, layout=layout, block_size=block_size, blocks=blocks,
            memory=num_bytes(memory), host_memory=num_bytes(host_memory), max_sequences=max_sequences, prefix=prefix,
            seed=seed, windows=list(windows), events=events, reserve=reserve))

    def open(self, tokens: Tokens, *, salt: str | bytes = "", adapter_id: int = 0) -> Sequence:
        """A sequence with this prompt. What the prefix cache has of it, within the salt's scope, is not computed again."""
        prompt = list(token_list(tokens))
        seq, num_cached = self._core.open(prompt, salt_bytes(salt), adapter_id)
        return Sequence(self, seq, prompt, num_cached)

    def step(self, sequences: Iterable[Sequence], *, stream: int = 0) -> Step:
        """Begins a step that computes the pending tokens of the sequences. Raises OutOfBlocks; nothing is changed then.
        `stream` is the device's, as a pointer; the CPU has none."""
        return Step._of(self, list(sequences), stream)

    def swap_out(self, sequences: Iterable[Sequence]) -> None:
        """Moves sequences to host memory, all or none."""
        self._core.swap([sequence._open_seq() for sequence in sequences], True)

    def swap_in(self, sequences: Iterable[Sequence]) -> None:
        """The way back."""
        self._core.swap([sequence._open_seq() for sequence in sequences], False)

    def layer(self, index: int) -> Layer:
        """The planes of a layer, without a copy."""
        return Layer(Plane(self._core, index, False), Plane(self._core, index, True))

    def stats(self) -> Stats:
        """The counters now."""
        return Stats._of(self._core, None)

    def map(self, columns: int = 64) -> Svg:
        """A drawing of the blocks: who uses which, and which are cached or free."""
        letters = [(seq, _letters[i] if i < len(_letters) else "#")
                   for i, seq in enumerate(sorted(seq for seq, one in self._sequences.items() if one._seq is not None))]
        return Svg(self._core.map(letters, columns))

    def drain_events(self, *, medium: str = "GPU", rank: int = 0) -> bytes:
        """What the prefix cache stored and removed since the last call, as a batch of vLLM's KV events in msgpack. Needs
        `events=True`."""
        return self._core.encode_events(False, time.time(), medium, rank)

    def list_events(self, *, medium: str = "GPU", rank: int = 0) -> bytes:
        """A batch that clears and then lists all that is cached, for a listener that begins late."""
        return self._core.encode_events(True, time.time(), medium, rank)

    def check(self) -> None:
        """Raises an Error with the first broken invariant."""
        if problem := self._core.check():
            raise Error("internal", problem)

    def __repr__(self) -> str:
        now = self.stats().cache
        return (f"Cache({self._core.description}; {now.num_used_blocks} of {now.num_blocks} blocks of "
                f"{self._core.block_size} tokens in use)")

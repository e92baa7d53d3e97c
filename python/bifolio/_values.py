# SPDX-License-Identifier: Apache-2.0
"""What the calls of the package take and return, besides arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, SupportsInt

from . import _core


class Error(Exception):
    """A refusal: `code`, such as "invalid_argument", and the library's sentence."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class OutOfBlocks(Exception):
    """Blocks are lacking. `retry_later` says whether freeing or swapping out other sequences can help."""

    def __init__(self, retry_later: bool) -> None:
        super().__init__("too few blocks are free now" if retry_later else "the whole cache has fewer blocks than that")
        self.retry_later = retry_later


_core.set_exceptions(Error, OutOfBlocks)


@dataclasses.dataclass(frozen=True)
class CacheStats:
    """Counters of blocks and sequences; docs/metrics.md says what each counts."""

    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    peak_used_blocks: int
    num_sequences: int
    num_tokens: int
    num_table_entries: int
    num_allocated_blocks: int
    num_copied_blocks: int
    num_forks: int
    num_host_blocks: int
    num_free_host_blocks: int
    num_swapped_sequences: int
    num_swapped_out_blocks: int
    num_swapped_in_blocks: int


@dataclasses.dataclass(frozen=True)
class PrefixStats:
    """Counters of the prefix cache, in full blocks."""

    num_lookups: int
    num_looked_up_blocks: int
    num_hit_blocks: int
    num_published_blocks: int
    num_duplicate_blocks: int
    num_evicted_blocks: int
    num_cached_blocks: int


@dataclasses.dataclass(frozen=True)
class SchedulerStats:
    """Counters of a scheduler."""

    num_waiting: int
    num_running: int
    num_swapped: int
    num_steps: int
    num_scheduled_tokens: int
    num_cached_tokens: int
    num_sampled_tokens: int
    num_draft_tokens: int
    num_accepted_drafts: int
    num_preemptions: int
    num_swap_outs: int
    num_swap_ins: int
    num_failed_swaps: int
    num_finished: int
    num_aborted: int


@dataclasses.dataclass(frozen=True)
class Stats:
    """The counters now. `prefix` is None without prefix caching, `scheduler` but for a scheduler's `stats`."""

    cache: CacheStats
    prefix: PrefixStats | None = None
    scheduler: SchedulerStats | None = None

    @classmethod
    def _of(cls, core: _core.Cache, requests: _core.Scheduler | None) -> Stats:
        cache, prefix, scheduler = core.counters(requests)
        return cls(CacheStats(*cache), None if prefix is None else PrefixStats(*prefix),
                   None if scheduler is None else SchedulerStats(*scheduler))


class Svg(str):
    """A drawing as the text of an SVG document. Notebooks show it."""

    def _repr_svg_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"Svg({len(self)} characters)"

    def save(self, path: str) -> None:
        """Writes it to a file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self)


_units = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
          "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def num_bytes(size: int | str | None) -> int:
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


#: One token id, or several: what can be iterated, arrays included.
Tokens = SupportsInt | Iterable[SupportsInt]


def token_list(tokens: Any) -> list[int]:
    """Token ids as a list."""
    if isinstance(tokens, list):
        return tokens if all(type(token) is int for token in tokens) else [int(token) for token in tokens]
    if isinstance(tokens, int):
        return [tokens]
    if hasattr(tokens, "tolist"):
        tokens = tokens.tolist()
    return [tokens] if isinstance(tokens, int) else [int(token) for token in tokens]


def salt_bytes(salt: str | bytes) -> bytes:
    return salt.encode() if isinstance(salt, str) else salt

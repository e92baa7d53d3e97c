# SPDX-License-Identifier: Apache-2.0
"""Attention over arrays of one's own, merges, metrics, replays of traces."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from . import _core
from ._cache import Cache
from ._scheduler import Scheduler
from ._values import Svg


def attention(q: Any, kv_cache: tuple[Any, Any], block_tables: Any, seq_lens: Any, query_start_loc: Any, *,
              layout: str = "hnd", causal: bool = True, window: int | None = None, window_right: int | None = None,
              scale: float | None = None, soft_cap: float = 0.0, alibi_slopes: Any = None, sinks: Any = None,
              out: Any = None) -> tuple[Any, Any]:
    """Attention over a paged cache in host memory: (out, lse), arrays of the framework of q.

    q [tokens, q_heads, head_dim] has the new tokens of all sequences one after another, those of sequence i from
    query_start_loc[i] on. kv_cache is (k, v), each [blocks, kv_heads, block_size, head_dim] with the layout "hnd", or
    [blocks, block_size, kv_heads, head_dim] with "nhd", of any strides; they hold the new tokens already.
    block_tables [sequences, …], seq_lens [sequences] (new tokens included) and query_start_loc [sequences + 1] are
    integers, as arrays or lists. `window` positions before a token's own are visible, `window_right` after it."""
    k_cache, v_cache = kv_cache
    return _core.attention(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, layout, causal,
                           -1 if window is None else window, -1 if window_right is None else window_right, scale,
                           soft_cap, alibi_slopes, sinks, out)


def merge(out1: Any, lse1: Any, out2: Any, lse2: Any) -> tuple[Any, Any]:
    """Joins two partial attention results in host memory, each normalised by its own sum: (out, lse)."""
    return _core.merge(out1, lse1, out2, lse2)


def metrics_text(what: Cache | Scheduler, **labels: str) -> str:
    """The counters of a cache, or of a scheduler and its cache, in Prometheus' text format."""
    if isinstance(what, Scheduler):
        return what.cache._core.metrics_text(list(labels.items()), what._core)
    return what._core.metrics_text(list(labels.items()), None)


class Replay:
    """What `replay` found: a row for each policy and size in `rows`."""

    def __init__(self, rows: list[dict[str, Any]], table: str, curves: str, html: str) -> None:
        self.rows, self._table, self._curves, self._html = rows, table, curves, html

    def plot(self) -> Svg:
        """The hit rate by the size of the pool, a line for each policy."""
        return Svg(self._curves)

    def html(self) -> str:
        """All of it as one HTML document."""
        return self._html

    def __repr__(self) -> str:
        return self._table.strip("\n")


def replay(path: str, *, blocks: Iterable[int], policies: Iterable[str] = ("lru",), cache_only: bool = False,
           requests: int = 0, block_size: int = 16, speed: float = 1.0) -> Replay:
    """Replays a serving trace (Mooncake's JSON lines or Azure's CSV) through the cache logic with pools of these numbers
    of blocks, as the program trace_replay does: with `cache_only` the prefix cache alone, else a scheduler on a clock
    that jumps. `requests` limits how many are read."""
    text, table, curves, html = _core.replay(str(path), [int(count) for count in blocks], list(policies), cache_only,
                                             requests, block_size, speed)
    return Replay(json.loads(text)["rows"], table, curves, html)

# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests go in, steps come out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from . import _core
from ._cache import Cache, Step
from ._values import Error, Stats, Tokens, salt_bytes, token_list


class Token(NamedTuple):
    """A token that a sequence of a request got. `reason` is "length" or "stop" for its last one, else None."""

    request: int
    sample: int
    token: int
    reason: str | None


class Row(NamedTuple):
    """A sequence's part of a step."""

    request: int
    sample: int
    query_len: int  #: tokens computed
    seq_len: int  #: tokens visible to the last of them
    num_samples: int  #: tokens to sample: 0 while more of its prompt is to be computed
    num_drafts: int
    num_cached: int  #: found in the prefix cache, in the step that admits it


class ScheduledStep(Step):
    """A step of a scheduler. Ends with `sample`."""

    def __init__(self, scheduler: Scheduler, core: _core.Step) -> None:
        super().__init__(scheduler.cache, [], core)
        self._scheduler = scheduler
        self.num_samples = core.num_samples  #: tokens that `sample` takes
        self.rows = [Row(*row) for row in core.rows]

    def sample(self, tokens: Tokens) -> list[Token]:
        """Ends the step with the sampled tokens: one for each row in `sample_rows`, in their order, or num_samples. A
        prompt whose samples fork wants one for each of them; the one of its row is then the first token of all."""
        return self._scheduler._sampled(self._core.commit_sampled(token_list(tokens)))

    def commit(self, accepted: Iterable[int] | None = None) -> None:
        raise Error("failed_precondition", "the step is of a scheduler: end it with sample")

    def drop(self) -> None:
        raise Error("failed_precondition", "the step is of a scheduler: end it with sample, and abort requests that failed")

    def __exit__(self, *exception: Any) -> None:
        pass

    def __repr__(self) -> str:
        state = "open" if self._core.is_open else "ended"
        return f"ScheduledStep({len(self.rows)} sequences, {self.num_tokens} tokens, {self.num_samples} samples, {state})"


class Scheduler:
    """Decides which sequences compute how many tokens in each step. Iterating over it gives the steps until no request
    is left; it can be iterated again when more were submitted. Its sequences are its own. `submit` and `abort` may be
    called from any thread."""

    def __init__(self, cache: Cache, *, max_tokens_per_step: int = 2048, max_running: int | None = None,
                 max_chunk_tokens: int = 0, vocab_size: int = 0, preemption: str = "automatic",
                 swap_block_cost: float = 4.0, priority_span: int = 1000) -> None:
        self.cache = cache
        self._core = _core.Scheduler(cache._core, dict(
            max_tokens_per_step=max_tokens_per_step,
            max_running=min(256, cache.max_sequences) if max_running is None else max_running,
            max_chunk_tokens=max_chunk_tokens, vocab_size=vocab_size, preemption=preemption,
            swap_block_cost=swap_block_cost, priority_span=priority_span))
        self._registry = threading.Lock()  # for the next two: a step may have a request's tokens before `submit` returns
        self._callbacks: dict[int, Callable[[Token], object]] = {}
        self._ends: dict[int, int] = {}  # samples of a request that have not ended
        self._step: ScheduledStep | None = None

    def submit(self, tokens: Tokens, *, max_new_tokens: int = 16, samples: int = 1, stop: Iterable[int] = (),
               on_token: Callable[[Token], object] | None = None, priority: int = 0, salt: str | bytes = "",
               adapter_id: int = 0, max_draft_tokens: int = 0) -> int:
        """Queues a request and returns its number. `on_token` is called with each `Token`, in the thread that calls
        `sample`. Tokens of `stop` end their sample. Raises OutOfBlocks when an empty cache would be too small."""
        prompt, stops = token_list(tokens), token_list(stop)
        with self._registry:
            request = self._core.submit(prompt, max_new_tokens, samples, max_draft_tokens, priority, salt_bytes(salt),
                                        adapter_id, stops)
            if on_token is not None:
                self._callbacks[request] = on_token
                self._ends[request] = samples
        return request

    def abort(self, request: int) -> None:
        """Drops a request before the next step. It gets no more tokens."""
        self._core.abort(request)
        with self._registry:
            self._callbacks.pop(request, None)
            self._ends.pop(request, None)

    def propose(self, request: int, drafts: Tokens, *, sample: int = 0) -> None:
        """Drafts of the tokens after the last one; the next step computes them too, and samples after each."""
        self._core.propose(request, sample, token_list(drafts))

    def output(self, request: int, sample: int = 0) -> list[int]:
        """The tokens so far of a sequence that has not ended."""
        return self._core.output(request, sample)

    def stats(self) -> Stats:
        """The counters now, the cache's included."""
        return Stats._of(self.cache._core, self._core)

    def check(self) -> None:
        """Raises an Error with the first broken invariant."""
        if problem := self._core.check():
            raise Error("internal", problem)

    def next_step(self, *, stream: int = 0) -> ScheduledStep | None:
        """The next step to compute, or None when no request is left."""
        if self._step is not None and self._step._core.is_open:
            if self._step.num_samples > 0:
                raise Error("failed_precondition", "the step before has not ended; call its sample first")
            self._step.sample([])  # a part of a prompt: there was nothing to sample
        while self._core.has_work():
            core = _core.Step(self._core, stream)
            if not core.is_open:
                break
            self._step = ScheduledStep(self, core)
            if self._step.num_tokens > 0:
                return self._step
            self._step.sample([])  # moved blocks alone
        self._step = None
        return None

    def __iter__(self) -> Iterator[ScheduledStep]:
        return self

    def __next__(self) -> ScheduledStep:
        if (step := self.next_step()) is None:
            raise StopIteration
        return step

    def _sampled(self, said: list[tuple[int, int, list[int], str]]) -> list[Token]:
        tokens = []
        for request, sample, numbers, reason in said:
            new = [Token(request, sample, number, None) for number in numbers]
            if reason and new:
                new[-1] = new[-1]._replace(reason=reason)
            tokens += new
            with self._registry:
                callback = self._callbacks.get(request)
                if callback is not None and reason:
                    self._ends[request] -= 1
                    if self._ends[request] == 0:
                        del self._callbacks[request], self._ends[request]
            if callback is not None:
                for token in new:
                    callback(token)
        return tokens

    def __repr__(self) -> str:
        now = self.stats().scheduler
        assert now is not None
        return (f"Scheduler({now.num_waiting} waiting, {now.num_running} running, {now.num_swapped} swapped; "
                f"{now.num_finished} finished in {now.num_steps} steps)")

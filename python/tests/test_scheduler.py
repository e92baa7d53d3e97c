# SPDX-License-Identifier: Apache-2.0
"""Requests through the scheduler, against one sequence at a time."""

import threading

import bifolio as bf
import numpy as np
import pytest
from support import LAYERS, make, run

VOCAB = 50


def next_tokens(step):
    """A model's greedy choice for each row to sample from: it depends on the attention's output."""
    out = run(step)[np.asarray(step.sample_rows)]
    return (np.abs(out).sum((1, 2)) * 1000).astype(np.int64) % VOCAB


def alone(prompt, num_tokens):
    """The same without a scheduler."""
    cache = make(blocks=60)
    sequence = cache.open(prompt)
    said = []
    while len(said) < num_tokens:
        with cache.step([sequence]) as step:
            said.append(int(next_tokens(step)[-1]))
        sequence.append(said[-1])
    return said


def test_requests_get_the_tokens_that_they_would_get_alone_also_when_blocks_are_short():
    prompts = [[i + 1, i + 2, i + 3] * (2 + i % 3) for i in range(8)]
    for preemption in ("recompute", "swap", "automatic"):
        cache = make(blocks=14)
        scheduler = bf.Scheduler(cache, max_tokens_per_step=16, preemption=preemption)
        heard = {}
        for i, prompt in enumerate(prompts):
            request = scheduler.submit(prompt, max_new_tokens=6 + i, on_token=lambda t: heard.setdefault(t.request, []).append(t))
            heard[request] = []
        for step in scheduler:
            assert step.num_tokens <= 16
            step.sample(next_tokens(step))
            scheduler.check(), cache.check()
        for i, (prompt, tokens) in enumerate(zip(prompts, heard.values())):
            assert [t.token for t in tokens] == alone(prompt, 6 + i)
            assert [t.reason for t in tokens] == [None] * (5 + i) + ["length"]
        now = scheduler.stats().scheduler
        assert now.num_finished == 8 and now.num_preemptions > 0
        assert repr(scheduler).startswith("Scheduler(0 waiting, 0 running, 0 swapped; 8 finished")
        assert "bifolio_sequences_running 0" in bf.metrics_text(scheduler) or "running" in bf.metrics_text(scheduler)


def test_samples_of_a_prompt_fork_and_share_it():
    cache = make(blocks=40)
    scheduler = bf.Scheduler(cache)
    heard = []
    request = scheduler.submit([1, 2, 3, 4, 5], max_new_tokens=3, samples=3, on_token=heard.append)
    first = next(scheduler)
    assert first.num_samples == 3 and first.rows[0].num_samples == 3 and len(np.asarray(first.sample_rows)) == 1
    assert repr(first) == "ScheduledStep(1 sequences, 5 tokens, 3 samples, open)"
    run(first)
    said = first.sample([7, 8, 9])  # one for each sample
    assert [(t.sample, t.token) for t in said] == [(0, 7), (1, 8), (2, 9)] and heard == said
    for step in scheduler:
        run(step)
        step.sample([30 + row.sample for row in step.rows])
    assert [t.token for t in heard if t.sample == 1] == [8, 31, 31]
    assert [t.request for t in heard] == [request] * 9 and sum(t.reason == "length" for t in heard) == 3
    # One token for the row: all samples begin with it.
    scheduler.submit([9, 9], max_new_tokens=1, samples=2, on_token=heard.append)
    for step in scheduler:
        run(step)
        step.sample(np.array([4]))
    assert [t.token for t in heard[-2:]] == [4, 4]


def test_prompts_in_chunks_stops_drafts_and_aborts():
    cache = make(blocks=40)
    scheduler = bf.Scheduler(cache, max_tokens_per_step=8, vocab_size=VOCAB)
    heard = []
    a = scheduler.submit(range(20), max_new_tokens=9, stop=[42], on_token=heard.append, max_draft_tokens=3)
    chunks = []
    for step in scheduler:
        chunks.append(step.num_tokens)
        run(step)
        if step.num_samples:
            step.sample([5])
            break
        # A part of a prompt has nothing to sample: the next step ends it.
    assert chunks == [8, 8, 4] and scheduler.output(a) == [5]
    scheduler.propose(a, [6, 7, 11])
    step = next(scheduler)
    assert step.rows[0].num_drafts == 3 and step.num_samples == 4
    run(step)
    assert [t.token for t in step.sample([6, 7, 12, 13])] == [6, 7, 12]  # two drafts, and what was sampled after them
    step = next(scheduler)
    run(step)
    assert step.sample([42])[0].reason == "stop"
    assert [t.token for t in heard] == [5, 6, 7, 12, 42] and next(scheduler, None) is None
    b = scheduler.submit([1], max_new_tokens=5, on_token=heard.append)
    run(step := next(scheduler))
    step.sample([1])
    scheduler.abort(b)
    assert list(scheduler) == [] and len(heard) == 6 and scheduler.stats().scheduler.num_aborted == 1
    assert cache.stats().cache.num_sequences == 0


def test_refusals():
    cache = make(blocks=4, host_memory=None)
    scheduler = bf.Scheduler(cache, max_running=4, vocab_size=VOCAB)
    with pytest.raises(bf.OutOfBlocks) as never:
        scheduler.submit(range(10), max_new_tokens=10)
    assert not never.value.retry_later
    with pytest.raises(bf.Error, match="preemption is 'stop'"):
        bf.Scheduler(cache, preemption="stop")
    with pytest.raises(bf.Error):
        scheduler.submit([VOCAB])
    with pytest.raises(bf.Error):
        scheduler.submit([])
    scheduler.submit([1, 2], max_new_tokens=4)
    step = next(scheduler)
    with pytest.raises(bf.Error, match="call its sample first"):
        next(scheduler)
    with pytest.raises(bf.Error, match="sample got 2 tokens; the step wants 1"):
        step.sample([1, 2])
    with pytest.raises(bf.Error, match="end it with sample"):
        step.commit()
    with pytest.raises(bf.Error, match="not committed|begun"):
        cache.step([cache.open([1])])
    step.sample([1])
    with pytest.raises(bf.Error, match="ended"):
        step.sample([1])


def test_submissions_come_from_any_thread():
    cache = make(blocks=40, max_sequences=64)
    scheduler = bf.Scheduler(cache)
    heard = []

    def submit(first):
        for i in range(10):
            scheduler.submit([first, i], max_new_tokens=2, on_token=heard.append)

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or scheduler._core.has_work():
        for step in scheduler:
            run(step)
            step.sample([1] * step.num_samples)
    assert len(heard) == 80 and scheduler.stats().scheduler.num_finished == 40


def test_a_scheduler_keeps_its_cache():
    scheduler = bf.Scheduler(make())
    scheduler.submit([1, 2, 3])
    step = next(scheduler)
    del scheduler
    for layer in range(LAYERS):
        pass
    run(step)
    assert step.sample([3])[0].token == 3

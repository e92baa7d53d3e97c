# SPDX-License-Identifier: Apache-2.0
"""Ends of processes, forks and threads."""

import os
import subprocess
import sys
import textwrap
import threading

import bifolio as bf
import numpy as np
import pytest
from support import DIM, KV_HEADS, Q_HEADS, expected, make, rows, run

HERE = os.path.dirname(os.path.abspath(__file__))


def script(text):
    """Runs a program; it must end well and say nothing on stderr, where leaks and crashes are reported."""
    path = os.pathsep.join([HERE, os.path.dirname(os.path.dirname(bf.__file__))])
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(text)], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0 and done.stderr == "", (done.returncode, done.stdout, done.stderr)
    return done.stdout


def test_an_interpreter_ends_with_caches_steps_planes_and_tensors_alive():
    script("""
        import bifolio as bf, numpy as np
        from support import make, run
        cache = make(threads=2)
        a = cache.open([1, 2, 3])
        step = cache.step([a])
        out = run(step)
        plane = np.from_dlpack(cache.layer(0).k)
        positions = np.asarray(step.positions)
        other = make()
        scheduler = bf.Scheduler(other)
        scheduler.submit([1, 2], on_token=lambda token: scheduler)
        scheduled = next(scheduler)
        kept = [cache, a, step, plane, positions, scheduler, scheduled, bf.attention]
        """)


def test_objects_die_in_any_order():
    script("""
        import gc, itertools, numpy as np
        from support import make, run
        for order in itertools.permutations(range(4)):
            cache = make()
            sequence = cache.open([1, 2, 3])
            step = cache.step([sequence])
            run(step)
            kept = [cache, sequence, step, np.from_dlpack(cache.layer(1).v)]
            del cache, sequence, step
            for i in order:
                kept[i] = None
                gc.collect()
        """)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_made_by_fork_computes_with_a_cache_of_its_own_and_its_parent_goes_on():
    assert "child ok" in script("""
        import os, sys
        import numpy as np
        from support import expected, make, run
        cache = make(threads=2)
        a = cache.open([1, 2, 3])
        with cache.step([a]) as step:
            run(step)
        child = os.fork()
        if child == 0:
            mine = make(threads=2)
            with mine.step([mine.open([4, 5])]) as step:
                np.testing.assert_allclose(run(step), expected([4, 5]), atol=2e-6)
            # The parent's cache is a copy here: it computes, too, or says why it does not.
            import bifolio as bf
            try:
                with cache.step([a.append(7)]) as step:
                    np.testing.assert_allclose(run(step)[0], expected([1, 2, 3, 7])[-1], atol=2e-6)
            except bf.Error as problem:
                assert problem.code == "failed_precondition", problem
            print("child ok", flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with cache.step([a.append(9)]) as step:
            np.testing.assert_allclose(run(step)[0], expected([1, 2, 3, 9])[-1], atol=2e-6)
        """)


def test_attend_lets_other_threads_of_python_run():
    cache = bf.Cache(layers=1, q_heads=8, kv_heads=8, head_dim=64, blocks=300, block_size=16, threads=1)
    tokens = 2000
    with cache.step([cache.open(range(tokens))]) as step:
        q = np.ones((tokens, 8, 64), np.float32)
        counted, stop = [0], threading.Event()

        def count():
            while not stop.is_set():
                counted[0] += 1

        thread = threading.Thread(target=count)
        sys.setswitchinterval(1)  # longer than the call: the thread runs only while the GIL is released
        try:
            thread.start()
            before = counted[0]
            step.attend(0, q, q, q)
            during = counted[0] - before
        finally:
            sys.setswitchinterval(0.005)
            stop.set()
            thread.join()
    assert during > 1000


def test_caches_of_two_threads_compute_at_once():
    failures = []

    def work(first):
        try:
            for _ in range(20):
                cache = make()
                text = [first, first + 1, first + 2]
                with cache.step([cache.open(text)]) as step:
                    np.testing.assert_allclose(run(step), expected(text), atol=2e-6)
        except Exception as problem:  # told to the test's thread
            failures.append(problem)

    threads = [threading.Thread(target=work, args=(10 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_shapes_are_checked_against_the_cache_before_anything_is_written():
    cache = make()
    with cache.step([cache.open([1, 2])]) as step:
        q, k, v = (rows(step, 0, what, heads) for what, heads in ((0, Q_HEADS), (1, KV_HEADS), (2, KV_HEADS)))
        good = step.attend(0, q, k, v)
        before = np.from_dlpack(cache.layer(0).k).copy()
        with pytest.raises(bf.Error):
            step.attend(0, q, k + 1, np.zeros((2, KV_HEADS, DIM + 1), np.float32))
        np.testing.assert_array_equal(np.from_dlpack(cache.layer(0).k), before)
        np.testing.assert_array_equal(step.attend(0, q, k, v), good)

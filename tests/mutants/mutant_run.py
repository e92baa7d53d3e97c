# SPDX-License-Identifier: Apache-2.0
"""Runs the tests on one mutant after another, and says what survived."""

import collections
import concurrent.futures
import json
import os
import pathlib
import resource
import signal
import subprocess
import tempfile
import threading
import time

import mutant_build

WANTED = (("src/", 95), ("src/cpu/", 90))
MEMORY_BYTES = 8 << 30  # a mutant may ask for everything
SHORTEST_TIMEOUT_S = 10
FEWER_BACKENDS = {"BIFOLIO_TEST_BACKENDS": "threads"}  # each ISA, one executor


def equivalents(root):
    """The keys of tests/mutants/equivalent.txt: lines "FILE: KIND: TEXT", each under a comment with the reason."""
    lines = (root / "tests/mutants/equivalent.txt").read_text().splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def key_of(mutant):
    """What names it in a list that outlives changes elsewhere in the file."""
    return f"{mutant['file']}: {mutant['kind']}: {mutant['what']}"


class Runner:
    def __init__(self, build):
        self.build = build
        self.mutants = {int(n): m for n, m in json.loads(build.list.read_text()).items()}
        self.tests = mutant_build.tests_of(build)

    def run(self, test, environment, timeout):
        """Seconds that a test took, or None when it failed."""
        program = self.build.out / "programs" / pathlib.Path(test["command"][0]).name
        arguments = [str(program)] + test["command"][1:]
        if program.name.startswith("bifolio_test_"):
            arguments += ["--abort-after=1", "--no-breaks"]
        begin = time.monotonic()
        with tempfile.TemporaryFile() as nothing:
            child = subprocess.Popen(arguments, cwd=test["folder"], stdin=subprocess.DEVNULL, stdout=nothing, stderr=nothing,
                                     env=os.environ | FEWER_BACKENDS | test["environment"] | environment,
                                     start_new_session=True,
                                     preexec_fn=limit_memory)
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
            if status is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return time.monotonic() - begin if status in (0, 77) else None

    def record(self):
        """Which tests reach which mutants, and how long each takes without one."""
        self.reached = collections.defaultdict(list)
        with tempfile.TemporaryDirectory() as folder:
            for test in self.tests:
                path = os.path.join(folder, test["name"])
                test["seconds"] = self.run(test, {"BIFOLIO_MUTANTS_REACHED": path}, 900)
                print(f"  {test['name']}: {test['seconds'] or 0:.1f} s", flush=True)
                if test["seconds"] is None:
                    print(f"  {test['name']} fails without a mutant and is left out", flush=True)
                    continue
                with open(path, "rb") as file:
                    for number, byte in enumerate(file.read()):
                        if byte and number in self.mutants:
                            self.reached[number].append(test)
        for tests in self.reached.values():
            tests.sort(key=lambda test: test["seconds"])
        print(f"{len(self.tests)} tests, {sum(t['seconds'] or 0 for t in self.tests):.0f} s; "
              f"{len(self.reached)} of {len(self.mutants)} mutants are reached", flush=True)

    def outcome(self, number):
        """The name of the test that kills a mutant, or None."""
        for test in self.reached[number]:
            environment = {"BIFOLIO_MUTANT": str(number)}
            if self.run(test, environment, SHORTEST_TIMEOUT_S + 5 * test["seconds"]) is None:
                return test["name"]
        return None


def limit_memory():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_all(build, only):
    runner = Runner(build)
    runner.record()
    numbers = [int(n) for n in only.split(",")] if only else sorted(runner.mutants)
    known = equivalents(build.root)
    results, lock = {}, threading.Lock()

    def one(number):
        mutant = runner.mutants[number]
        mutant["equivalent"] = key_of(mutant) in known
        mutant["killed_by"] = None if mutant["equivalent"] else runner.outcome(number)
        mutant["reached"] = len(runner.reached[number])
        with lock:
            results[number] = mutant
            if mutant["killed_by"] is None and not mutant["equivalent"]:
                print(f"  survives: {number}  {mutant['file']}:{mutant['line']}  {mutant['kind']}  {mutant['what']}", flush=True)
            if len(results) % 50 == 0:
                print(f"{len(results)} of {len(numbers)}", flush=True)
            (build.out / "results.json").write_text(json.dumps(results, indent=1))
    with concurrent.futures.ThreadPoolExecutor(build.jobs) as pool:
        list(pool.map(one, numbers))
    return results


def report(build, results):
    failed = 0
    print()
    for m in sorted(results.values(), key=lambda m: (m["file"], m["line"])):
        if m["killed_by"] is None and not m["equivalent"]:
            print(f"{m['file']}:{m['line']}: {'' if m['reached'] else 'not reached: '}{m['kind']}: {m['what']}")
    print(f"\n{'':22} {'mutants':>8} {'equal':>6} {'killed':>7} {'left':>5}  share")
    folders = collections.Counter("/".join(m["file"].split("/")[:3 if "common" in m["file"] else 2]) + "/"
                                  for m in results.values())
    wanted = dict(WANTED)
    for folder in ["src/"] + sorted(folders):
        of = [m for m in results.values() if m["file"].startswith(folder)]
        equal = sum(m["equivalent"] for m in of)
        killed = sum(m["killed_by"] is not None for m in of)
        share = 100 * killed / max(1, len(of) - equal)
        short = folder in wanted and share < wanted[folder]
        failed |= short
        print(f"{folder:22} {len(of):8} {equal:6} {killed:7} {len(of) - equal - killed:5}  {share:.1f} %"
              + (f", less than {wanted[folder]} %" if short else ""))
    return int(failed)

# SPDX-License-Identifier: Apache-2.0
"""Runs the tests on one mutant after another, and says what survived. A program of its own, which needs nothing of the
tree: `python3 mutant_run.py FOLDER` runs what `tools/mutants --build-only` left there, on any machine."""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import queue
import random
import resource
import signal
import subprocess
import tempfile
import threading
import time

WANTED = (("src/", 95), ("src/cpu/", 90))
MEMORY_BYTES = 6 << 30  # a mutant may ask for everything
SHORTEST_TIMEOUT_S = 10
FEWER_BACKENDS = {"BIFOLIO_TEST_BACKENDS": "threads"}  # each ISA, one executor


def equivalents(folder):
    """The keys of equivalent.txt: lines "FILE: KIND: TEXT" or "FILE: KIND: TEXT in: LINE", each under a comment with the
    reason."""
    lines = (folder / "equivalent.txt").read_text().splitlines()
    return {line.strip() for line in lines if line.strip() and not line.startswith("#")}


def key_of(mutant):
    """What names it in a list that outlives changes elsewhere in the file."""
    text = mutant["what"] if len(mutant["what"]) > 11 else f"{mutant['what']} in: {mutant['source']}"
    return f"{mutant['file']}: {mutant['kind']}: {text}"


class Runner:
    def __init__(self, folder, jobs):
        self.folder = pathlib.Path(folder).resolve()
        self.mutants = {int(n): m for n, m in json.loads((self.folder / "mutants.json").read_text()).items()}
        self.tests = json.loads((self.folder / "tests.json").read_text())
        self.jobs = jobs
        # Tests start as many threads as they have processors: each has two, whatever the machine has.
        usable = sorted(os.sched_getaffinity(0))
        self.places = queue.SimpleQueue()
        for job in range(jobs):
            self.places.put({usable[job % len(usable)], usable[(job + 1) % len(usable)]})

    def run(self, test, environment, timeout):
        """Seconds that a test took, or None when it failed."""
        arguments = [str(self.folder / "programs" / test["program"]), *test["arguments"], "--abort-after=1", "--no-breaks"]
        place = self.places.get()

        def begin_apart():
            os.sched_setaffinity(0, place)
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

        begin = time.monotonic()
        try:
            child = subprocess.Popen(arguments, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                     stderr=subprocess.DEVNULL, start_new_session=True, preexec_fn=begin_apart,
                                     env=os.environ | FEWER_BACKENDS | test["environment"] | environment)
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        finally:
            self.places.put(place)
        return time.monotonic() - begin if status in (0, 77) else None

    def record(self):
        """Which tests reach which mutants, and how long each takes without one."""
        self.reached = collections.defaultdict(list)
        with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            took = pool.map(lambda test: self.run(test, {"BIFOLIO_MUTANTS_REACHED": os.path.join(folder, test["name"])}, 300),
                            self.tests)
            for test, seconds in zip(self.tests, took):
                test["seconds"] = seconds
                print(f"  {test['name']}: " + (f"{seconds:.1f} s" if seconds else "fails without a mutant and is left out"), flush=True)
                if seconds is None:
                    continue
                with open(os.path.join(folder, test["name"]), "rb") as file:
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
            if self.run(test, {"BIFOLIO_MUTANT": str(number)}, SHORTEST_TIMEOUT_S + 5 * test["seconds"]) is None:
                return test["name"]
        return None


def run_all(folder, jobs, only="", seconds=0, results_file=None):
    """{number: mutant} of those that were run; with `seconds` none begins later than that."""
    begin = time.monotonic()
    runner = Runner(folder, jobs)
    runner.record()
    numbers = [int(n) for n in only.split(",")] if only else sorted(runner.mutants)
    random.Random(1).shuffle(numbers)  # should time run out, every file has had its share
    known = equivalents(runner.folder)
    results, lock = {}, threading.Lock()
    results_file = pathlib.Path(results_file or runner.folder / "results.json")

    def one(number):
        mutant = runner.mutants[number]
        if seconds and time.monotonic() - begin > seconds:
            return
        mutant["equivalent"] = key_of(mutant) in known
        mutant["killed_by"] = None if mutant["equivalent"] else runner.outcome(number)
        mutant["reached"] = len(runner.reached[number])
        with lock:
            results[number] = mutant
            if len(results) % 50 == 0:
                print(f"{len(results)} of {len(numbers)} after {time.monotonic() - begin:.0f} s", flush=True)
            if len(results) % 10 == 0 or len(results) == len(numbers):
                results_file.write_text(json.dumps(results, indent=1))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, numbers))
    results_file.write_text(json.dumps(results, indent=1))
    if len(results) < len(numbers):
        print(f"{len(numbers) - len(results)} were not run")
    return results


def report(results):
    failed = 0
    print()
    for number, m in sorted(results.items(), key=lambda entry: (entry[1]["file"], entry[1]["line"])):
        if m["killed_by"] is None and not m["equivalent"]:
            print(f"{number}, line {m['line']}{'' if m['reached'] else ', not reached'}: {key_of(m)}")
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


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="what tools/mutants --build-only left: programs/, mutants.json, tests.json, equivalent.txt")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--only", default="", help="numbers of the mutants to run, separated by commas")
    parser.add_argument("--seconds", type=float, default=0, help="begin no mutant later than that")
    parser.add_argument("--results", help="file to write (default FOLDER/results.json)")
    options = parser.parse_args()
    return report(run_all(options.folder, options.jobs, options.only, options.seconds, options.results))


if __name__ == "__main__":
    raise SystemExit(main())

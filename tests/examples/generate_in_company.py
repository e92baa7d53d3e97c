#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""examples/generate beside processes that only compute, with each executor.

  generate_in_company.py PROGRAM [PROCESSES [TURNS]]

The default executor must write at least 0.8 as many tokens a second as OpenMP with a passive wait policy, which sleeps
instead of spinning: medians of runs in turns, beside PROCESSES (16) others. Exit code 77 is "skipped".
"""
import os
import re
import statistics
import subprocess
import sys
import time

KINDS = {"threads": {}, "openmp": {"OMP_WAIT_POLICY": "passive"}, "tbb": {}}
LEAST = 0.8


def tokens_per_second(program, kind):
    done = subprocess.run([program, "--device", "cpu", "--executor", kind, "--threads", str(len(os.sched_getaffinity(0))),
                           "--samples", "16", "--seed", "1", "--max-positions", "64", "--prompt", "Psalm", "--stats"],
                          capture_output=True, text=True, env={**os.environ, **KINDS[kind]})
    if done.returncode != 0:
        if "openmp" in done.stderr.lower() or "tbb" in done.stderr.lower():
            return None
        sys.exit(f"{kind} ended with {done.returncode}: {done.stderr}")
    return float(re.search(r"^ *decode +(\d+) tokens/s", done.stderr, re.MULTILINE)[1])


def main():
    program = sys.argv[1]
    num_processes = int(sys.argv[2]) if len(sys.argv) > 2 else 16
    turns = int(sys.argv[3]) if len(sys.argv) > 3 else 7
    kinds = [kind for kind in KINDS if tokens_per_second(program, kind) is not None]
    if "openmp" not in kinds:
        print("SKIPPED: the program has no OpenMP")
        sys.exit(77)
    idle = {kind: tokens_per_second(program, kind) for kind in kinds}
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    rates = {kind: [] for kind in kinds}
    try:
        time.sleep(0.5)
        for _ in range(turns):
            for kind in kinds:
                rates[kind].append(tokens_per_second(program, kind))
    finally:
        for other in others:
            other.kill()
            other.wait()
    for kind in kinds:
        print(f"{kind:8} {statistics.median(rates[kind]):8.0f} tokens/s beside {num_processes} processes "
              f"({', '.join(f'{rate:.0f}' for rate in rates[kind])}), {idle[kind]:.0f} without")
    ratio = statistics.median(rates["threads"]) / statistics.median(rates["openmp"])
    print(f"the default executor writes {ratio:.2f} of OpenMP's passive rate; at least {LEAST} is asked for")
    sys.exit(ratio < LEAST)


if __name__ == "__main__":
    main()

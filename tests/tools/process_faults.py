# SPDX-License-Identifier: Apache-2.0
"""process_faults.py NO_THREADS NAME=PROGRAM...

Runs each program with what a system may refuse it: memory, threads, room for its output, a reader of its output, its
standard descriptors; and with SIGTERM while it works. Each must answer as documented: exit code 0, 1 or 2 (1 and 2 with
a sentence on stderr, where there is one), or end by the signal that it got; soon, and never by another signal.
NO_THREADS is a library that refuses every pthread_create.
"""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import time

MANY = str(1 << 30)
# What each does for a moment, and for longer than anybody waits.
SHORT = {
    "generate": ["--prompt", "Once upon a time", "--max-positions", "24", "--device", "cpu"],
    "serve": None,
    "bench": ["probe", "--threads", "1", "--min-time", "0.001", "--mib", "64"],
    "trace_replay": ["{trace}"],
    "block_map": ["--steps", "20", "--once"],
    "selftest": ["--case", "attention:1", "--device", "cpu"],
}
LONG = {
    "generate": ["--prompt", "Once upon a time", "--samples", "2000", "--max-batch-seqs", "2000", "--device", "cpu"],
    "serve": ["--port", "0", "--device", "cpu"],
    "bench": ["probe", "--threads", "1", "--min-time", "20", "--mib", "64"],
    "trace_replay": ["{long_trace}", "--blocks", ",".join(str(1000 + i) for i in range(60)), "--build"],
    "block_map": ["--steps", MANY, "--speed", "0", "--every", "1000000"],
    "selftest": ["--seconds", "60", "--device", "cpu"],
}
# Exit code 1 says on stdout what did not hold, memory for a check among it.
REPORTS_ON_STDOUT = {"selftest"}
# Without threads of its own nothing is served.
NEEDS_THREADS = {"serve"}
SOON_S = 5  # a second or two on a machine that does nothing else
MIB = 1 << 20

problems = []


def complain(name, fault, what, err=b""):
    text = err.decode(errors="replace").strip().splitlines()
    problems.append(f"{name}, {fault}: {what}" + (f" ({text[-1][:160]})" if text else ""))


def start(program, arguments, **options):
    return subprocess.Popen([program] + arguments, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)


def judge(name, fault, child, allowed=(0, 1, 2), signals=(), timeout=30, needs_sentence=True):
    """Waits, and complains about an end that is not documented. Returns the exit code."""
    try:
        _, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        _, err = child.communicate()
        complain(name, fault, f"still runs after {timeout} s", err)
        return None
    code = child.returncode
    if code < 0:
        if -code not in signals:
            complain(name, fault, f"ended by {signal.Signals(-code).name}", err)
    elif code == 127 and b"shared libraries" in err:
        return None  # the loader had no memory: the program did not begin
    elif code not in allowed:
        complain(name, fault, f"exit code {code}", err)
    elif code != 0 and needs_sentence and len(err.strip()) < 10:
        complain(name, fault, f"exit code {code} without a sentence", err)
    return code


def limit(num_bytes):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def ends_before_main(program, num_bytes):
    """Signals by which a program ends that the kernel or the loader cannot map into so little memory."""
    return (signal.SIGSEGV, signal.SIGKILL) if num_bytes < os.path.getsize(program) + 16 * MIB else ()


def try_program(name, program, no_threads, places):
    def fill(arguments):
        return [word.format(**places) for word in arguments]

    short = SHORT[name]
    if short is not None:
        short = fill(short)
        judge(name, "nothing refused", start(program, short, stdout=subprocess.DEVNULL), allowed=(0,))
        with open("/dev/full", "wb") as full:
            judge(name, "stdout on a full disk", start(program, short, stdout=full), allowed=(1, 2))
        reader, writer = os.pipe()
        os.close(reader)
        judge(name, "a closed pipe", start(program, short, stdout=writer), allowed=(0, 1, 2), signals=(signal.SIGPIPE,))
        os.close(writer)
        closed = subprocess.Popen(["sh", "-c", 'exec "$0" "$@" 0<&- 1>&- 2>&-', program] + short,
                                  stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        judge(name, "no standard descriptors", closed, needs_sentence=False)
        environment = os.environ | {"LD_PRELOAD": no_threads}
        judge(name, "no threads", start(program, short, stdout=subprocess.DEVNULL, env=environment),
              allowed=(1,) if name in NEEDS_THREADS else (0,))
        succeeded = failed = 0
        for size in (8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 192, 256, 512, 1024, 4096):
            child = start(program, short, stdout=subprocess.DEVNULL, preexec_fn=lambda: limit(size * MIB))
            code = judge(name, f"{size} MiB of memory", child, signals=ends_before_main(program, size * MIB),
                         needs_sentence=name not in REPORTS_ON_STDOUT)
            succeeded += code == 0
            failed += code not in (0, None)
        if succeeded == 0:
            complain(name, "memory", "no limit was enough")
        print(f"{name}: with limits of memory {succeeded} runs succeed, {failed} refuse")
    else:
        environment = os.environ | {"LD_PRELOAD": no_threads}
        judge(name, "no threads", start(program, fill(LONG[name]), stdout=subprocess.DEVNULL, env=environment), allowed=(1, 2))
        for size in (8, 16, 32, 48, 64, 80, 96):
            child = start(program, fill(LONG[name]), stdout=subprocess.DEVNULL, preexec_fn=lambda: limit(size * MIB))
            time.sleep(0.5)
            child.terminate()
            judge(name, f"{size} MiB of memory", child, signals=(signal.SIGTERM, *ends_before_main(program, size * MIB)))
    child = start(program, fill(LONG[name]), stdout=subprocess.DEVNULL)
    time.sleep(1)
    if child.poll() is not None:
        complain(name, "SIGTERM", "it ended before the signal came", child.stderr.read())
        return
    child.send_signal(signal.SIGTERM)
    judge(name, "SIGTERM", child, allowed=(0, 143), signals=(signal.SIGTERM,), timeout=SOON_S, needs_sentence=False)


def write_traces(folder):
    """A trace in Mooncake's format, and a long one."""
    places = {}
    for name, count in (("trace", 20), ("long_trace", 20000)):
        places[name] = os.path.join(folder, name + ".jsonl")
        with open(places[name], "w") as file:
            for i in range(count):
                ids = ", ".join(str(b) for b in [i % 7] + [1000 + 3 * i + k for k in range(3)])
                file.write(f'{{"timestamp": {i * 100}, "input_length": 2000, "output_length": 60, "hash_ids": [{ids}]}}\n')
    return places


def main():
    no_threads, *programs = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        places = write_traces(folder)
        for pair in filter(None, programs):  # those that this build does not have are empty
            name, program = pair.split("=", 1)
            try_program(name, program, no_threads, places)
    for problem in problems:
        print("PROBLEM:", problem)
    return 1 if problems else 0


sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Builds the quick tests of a copy of the tree that has all chosen mutants in it."""

import collections
import dataclasses
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys

import known
import rewrite

# Not mutated: what only tests call (a self-check that accepts too much shows in no result), and registers of
# instruction sets that the build leaves out.
NO_SUBJECT = re.compile(r"(_check|/check)\.cpp$|/simd/(avx2|avx512|neon|sve256|sve_batch)\.hpp$|/(tile_micro|quads)\.hpp$")
SUBJECTS = ("src/common", "src/cpu")
# One instruction set: the others compile the same text again. -O1: compiling takes longer than the tests.
CONFIGURATION = ["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
                 "-DBIFOLIO_ISAS=baseline", "-DBIFOLIO_CUDA=OFF", "-DBIFOLIO_BUILD_BENCH=OFF"]
# Quick tests of other things than the library, or that run the conformance cases once more.
NO_JUDGES = re.compile(r"^(support|example|reach|kernel_reach|c|rust|go|tools)_|^(selftest|block_map|trace_replay_cli|"
                       r"fuzz_replay|conformance_suite_catches_flaws|conformance_cuda)$")


def output_of(command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"tools/mutants: {shlex.join(map(str, command))} failed:\n{done.stdout[-4000:]}")
    return done.stdout


class Build:
    def __init__(self, root, jobs, tests=""):
        self.root, self.jobs, self.tests = root, jobs, re.compile(tests)
        self.out = root / "build/mutants"
        self.tree = self.out / "tree"
        self.objects = self.out / "build"
        self.list = self.out / "mutants.json"

    def copy_tree(self):
        """All files of the tree but the subjects, which `write_subjects` writes. Files that did not change keep their
        times, so that little is compiled again."""
        listed = output_of(["git", "-C", str(self.root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        for relative in filter(None, listed.split("\0")):
            source = self.root / relative
            if source.is_file() and not relative.startswith(tuple(part + "/" for part in SUBJECTS)):
                write_if_other(self.tree / relative, source.read_bytes())
                shutil.copymode(source, self.tree / relative)

    def write_subjects(self, chosen):
        by_file = collections.defaultdict(list)
        for number, mutation in chosen.items():
            by_file[mutation.file].append((number, mutation))
        switch = (f"\n#define BIFOLIO_NUM_MUTANTS {max(chosen, default=0) + 1}\n"
                  f"#include \"{self.tree}/tests/mutants/mutants.cpp\"\n").encode()
        for part in SUBJECTS:
            for source in (self.root / part).rglob("*"):
                if source.is_file():
                    relative = str(source.relative_to(self.root))
                    text = rewrite.rewritten(source.read_bytes(), by_file[relative])
                    write_if_other(self.tree / relative, text + (switch if relative == "src/common/base/error.cpp" else b""))

    def configure(self):
        switch = self.tree / "tests/mutants/mutants.hpp"
        output_of(["cmake", "-S", str(self.tree), "-B", str(self.objects), *CONFIGURATION,
                   f"-DCMAKE_CXX_FLAGS=-w -fno-diagnostics-show-caret -include {switch}",
                   f"-DBIFOLIO_SHARED_DIR={self.root.parent / 'shared'}"])

    def quick_tests(self):
        """{"name", "program", "arguments", "environment"} of each quick test that judges mutants."""
        listing = json.loads(output_of(["ctest", "--test-dir", str(self.objects), "--show-only=json-v1", "-L", "quick"]))
        targets = set(re.findall(r"^(bifolio_test_\w+): phony", output_of(["ninja", "-C", str(self.objects), "-t", "targets", "all"]), re.M))
        tests = []
        for test in listing["tests"]:
            name = test["name"]
            if NO_JUDGES.search(name) or not self.tests.search(name) or f"bifolio_test_{name}" not in targets:
                continue
            properties = {p["name"]: p["value"] for p in test["properties"]}
            environment = dict(pair.split("=", 1) for pair in properties.get("ENVIRONMENT", []))
            environment.pop("BIFOLIO_TEST_REACH_DIR", None)
            tests.append({"name": name, "program": f"bifolio_test_{name}", "arguments": test.get("command", [""])[1:],
                          "environment": environment})
        return tests

    def compile(self, chosen):
        """Builds the tests, and leaves out mutants that do not compile."""
        targets = [test["program"] for test in self.quick_tests()]
        while True:
            self.write_subjects(chosen)
            done = subprocess.run(["ninja", "-C", str(self.objects), "-j", str(self.jobs), "-k", "0", *targets],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode == 0:
                return
            places = places_of_errors(done.stdout, self.objects, self.tree)
            wrong = {n for n, m in chosen.items() if any(file == m.file and m.line <= line <= m.last_line for file, line in places)}
            if not wrong:
                sys.exit(f"tools/mutants: the rewritten tree does not compile:\n{done.stdout[-4000:]}")
            for number in wrong:
                del chosen[number]
            print(f"{len(wrong)} do not compile and are left out", flush=True)

    def collect(self):
        """Programs, and the list of them, in one folder: what mutant_run.py needs, here or on another machine."""
        programs = self.out / "programs"
        programs.mkdir(exist_ok=True)
        tests = self.quick_tests()
        found = {path.name: path for path in (self.objects / "tests").rglob("bifolio_test_*") if os.access(path, os.X_OK) and path.is_file()}
        for test in tests:
            output_of(["strip", "-o", str(programs / test["program"]), str(found[test["program"]])])
        (self.out / "tests.json").write_text(json.dumps(tests, indent=1))
        for file in ("mutant_run.py", "equivalent.txt"):
            shutil.copy(self.root / "tests/mutants" / file, self.out / file)


def write_if_other(target, text):
    if not target.exists() or target.read_bytes() != text:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text)


def find(build, files):
    """All places of the subjects that can be mutated."""
    pattern = re.compile(files)

    def is_wanted(path):
        return path.startswith(SUBJECTS) and not NO_SUBJECT.search(path) and pattern.search(path) is not None

    finder = rewrite.Finder(str(build.root) + "/", is_wanted)
    for entry in json.loads(output_of(["ninja", "-C", str(build.objects), "-t", "compdb"])):
        relative = os.path.relpath(entry["file"], build.tree)
        if relative.endswith(".cpp") and relative.startswith(SUBJECTS) and " -c " in entry["command"]:
            finder.parse(str(build.root / relative), parse_arguments(entry["command"], build))
    return finder.found.values()


def parse_arguments(command, build):
    """What libclang has to know of a compilation: include folders, definitions, language; of the tree that was copied."""
    words = shlex.split(command)
    kept = [word for word in words if re.match(r"-(D|I|std=|mno-|msse)", word)]
    for index, word in enumerate(words):
        if word == "-isystem":
            kept += [word, words[index + 1]]
    return [word.replace(str(build.tree), str(build.root)) for word in kept]


def choose(found, count, seed):
    """Every file has its share, small ones a larger one."""
    by_file = collections.defaultdict(list)
    for mutation in sorted(found, key=lambda m: (m.file, m.begin, m.end, m.kind)):
        by_file[mutation.file].append(mutation)
    total = sum(len(all_of) ** 0.75 for all_of in by_file.values())
    source = random.Random(seed)
    chosen = []
    for file in sorted(by_file):
        share = max(1, round(count * len(by_file[file]) ** 0.75 / total))
        chosen += source.sample(by_file[file], min(share, len(by_file[file])))
    return sorted(chosen, key=lambda m: (m.file, m.begin, -m.end, m.kind))


def known_mutations(build):
    for what, file, text, mutated in known.KNOWN:
        source = (build.root / file).read_bytes()
        places = [m.start() for m in re.finditer(rb"(?<![\w.])" + re.escape(text.encode()) + rb"(?!\w)", source)]
        if len(places) != 1:
            sys.exit(f"tools/mutants: {len(places)} places of {file} are '{text}' (tests/mutants/known.py: {what})")
        begin = places[0]
        line = source.count(b"\n", 0, begin) + 1
        yield rewrite.Mutation(file, line, line, "known", what, begin, begin + len(text.encode()),
                               f"(::bifolio_mutants::is_on(%d) ? ({mutated}) : (".encode(), b"))", ())


def places_of_errors(said, folder, tree):
    """(file, line) of the rewritten sources that a compiler in `folder` complains about; for an error inside the
    operators' own templates the place that asked for them."""
    places, asked = set(), []
    for line in said.splitlines():
        at = re.match(r"([^\s:]+):(\d+):", line)
        file = os.path.relpath(os.path.normpath(os.path.join(folder, at[1])), tree) if at else ""
        place = (file, int(at[2])) if file.startswith(SUBJECTS) else None
        if " error: " in line:
            places.update([place] if place else asked[-1:])
            asked = []
        elif place and "required from" in line:
            asked.append(place)
    return places


def make(build, count, seed, files):
    build.copy_tree()
    build.write_subjects({})
    build.configure()
    found = find(build, files) if count > 0 else []
    drawn = choose(found, count, seed)
    chosen = dict(enumerate([m for m in known_mutations(build) if re.search(files, m.file)] + drawn))
    print(f"{len(found)} places can be mutated; {len(drawn)} are drawn with seed {seed}, "
          f"{len(chosen) - len(drawn)} are known", flush=True)
    build.compile(chosen)
    build.list.write_text(json.dumps({n: written(build, m) for n, m in chosen.items()}, indent=1))
    build.collect()


def make_again(build):
    """The mutants of the last build, with the tests as they are now."""
    if not build.list.exists():
        sys.exit(f"tools/mutants: there is no {build.list}; run without --keep first")
    chosen = {int(n): read(m) for n, m in json.loads(build.list.read_text()).items()}
    for m in chosen.values():
        text = (build.root / m.file).read_bytes()
        if m.kind != "known" and rewrite.described(text[m.begin:m.end]) != m.what:
            sys.exit(f"tools/mutants: {m.file} has changed since mutants were drawn; run without --keep")
    build.copy_tree()
    build.configure()
    build.compile(chosen)
    build.list.write_text(json.dumps({n: written(build, m) for n, m in chosen.items()}, indent=1))
    build.collect()


def written(build, mutation):
    line = (build.root / mutation.file).read_bytes().split(b"\n")[mutation.line - 1]
    return dataclasses.asdict(mutation) | {"opening": mutation.opening.decode(), "closing": mutation.closing.decode(),
                                           "source": rewrite.described(line)}


def read(entry):
    entry.pop("source", None)
    return rewrite.Mutation(**entry | {"opening": entry["opening"].encode(), "closing": entry["closing"].encode(),
                                       "operator": tuple(entry["operator"])})

# SPDX-License-Identifier: Apache-2.0
"""Builds the library with all chosen mutants in it, and links the release build's tests with that."""

import collections
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import subprocess
import sys

import known
import rewrite

# Not mutated: what only tests call (a self-check that accepts too much shows in no result), and registers of
# instruction sets that not every machine has.
NO_SUBJECT = re.compile(r"(_check|/check)\.cpp$|/simd/(avx2|avx512|neon)\.hpp$|/tile_micro\.hpp$")
SUBJECTS = ("src/common", "src/cpu")


def output_of(command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"tools/mutants: {shlex.join(map(str, command))} failed:\n{done.stdout[-4000:]}")
    return done.stdout


class Build:
    def __init__(self, root, release, jobs, tests=""):
        self.root, self.release, self.jobs, self.tests = root, release, jobs, re.compile(tests)
        self.out = release.parent / "mutants"
        self.tree = self.out / "tree"
        self.list = self.out / "mutants.json"
        ninja = ["ninja", "-C", str(release), "-t"]
        self.compilations = {entry["output"]: entry for entry in json.loads(output_of(ninja + ["compdb"]))
                             if entry["file"].endswith(".cpp") and " -c " in entry["command"]}
        self.core = self.objects_of_link(ninja, "src/libbifolio_core.a")

    def objects_of_link(self, ninja, target):
        last = output_of(ninja + ["commands", "-s", target]).splitlines()[-1]
        return [word for word in shlex.split(last) if word.endswith(".o")]

    def link_command_of(self, program):
        """Words of the command that links a program of the release build."""
        line = output_of(["ninja", "-C", str(self.release), "-t", "commands", "-s", program]).splitlines()[-1]
        words = shlex.split(line)
        return [word for word in words if word not in (":", "&&")]

    def parse_arguments(self, output):
        """What libclang has to know of a compilation: include folders, definitions, language."""
        words = shlex.split(self.compilations[output]["command"])
        kept = [word for word in words if re.match(r"-(D|I|std=|mno-|msse)", word)]
        for index, word in enumerate(words):
            if word == "-isystem":
                kept += [word, words[index + 1]]
        return kept

    def mutated(self, output):
        """The command that compiles an object from the rewritten sources, and the object."""
        target = self.out / "objects" / output
        target.parent.mkdir(parents=True, exist_ok=True)
        words = shlex.split(self.compilations[output]["command"])
        words = words[1:] if os.path.basename(words[0]) == "ccache" else words
        changed, at = [], 0
        while at < len(words):
            word = words[at]
            at += 1
            if word in ("-MT", "-MF"):
                at += 1
            elif word == "-MD" or word.startswith("-W"):
                continue
            elif word == output:
                changed.append(str(target))
            elif word == f"-I{self.root}/src":
                changed += [f"-I{self.tree}/src", word]
            elif any(word.startswith(f"{self.root}/{part}/") for part in SUBJECTS):
                changed.append(str(self.tree / os.path.relpath(word, self.root)))
            else:
                changed.append(word)
        switch = str(self.root / "tests/mutants/mutants.hpp")
        return changed + ["-w", "-fno-diagnostics-show-caret", "-include", switch], target

    def compile(self, outputs):
        """Compiles the objects. Returns what the compiler said of each that failed."""
        def one(output):
            command, _ = self.mutated(output)
            done = subprocess.run(command, cwd=self.release, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            return "" if done.returncode == 0 else done.stdout
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            said = list(pool.map(one, outputs))
        return {output: text for output, text in zip(outputs, said) if text}


def find(build, files):
    pattern = re.compile(files)

    def is_wanted(path):
        return path.startswith(SUBJECTS) and not NO_SUBJECT.search(path) and pattern.search(path) is not None

    finder = rewrite.Finder(str(build.root) + "/", is_wanted)
    for output in build.core:
        if "bifolio_kernels_" in output and "bifolio_kernels_baseline" not in output:
            continue  # the same text once more, for other registers
        finder.parse(build.compilations[output]["file"], build.parse_arguments(output))
    return finder


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
        yield rewrite.Mutation(file, source.count(b"\n", 0, begin) + 1, source.count(b"\n", 0, begin) + 1, "known", what,
                               begin, begin + len(text.encode()),
                               f"(::bifolio_mutants::is_on(%d) ? ({mutated}) : (".encode(), b"))", ())


def dependents(build, chosen):
    """The objects that are compiled from a file with a mutant in it, or include one."""
    files = {str(build.root / m.file) for m in chosen.values()}
    objects, output = set(), None
    for line in output_of(["ninja", "-C", str(build.release), "-t", "deps"]).splitlines():
        if not line.startswith(" "):
            output = line.split(":")[0]
        elif os.path.normpath(build.release / line.strip()) in files:
            objects.add(output)
    return objects


def write_tree(build, chosen):
    by_file = collections.defaultdict(list)
    for number, mutation in chosen.items():
        by_file[mutation.file].append((number, mutation))
    for part in SUBJECTS:
        for source in (build.root / part).rglob("*.[hc]pp"):
            relative = str(source.relative_to(build.root))
            text = rewrite.rewritten(source.read_bytes(), by_file[relative])
            target = build.tree / relative
            if not target.exists() or target.read_bytes() != text:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(text)


def places_of_errors(said, tree):
    """(file, line) of the rewritten sources that a compiler complains about; for an error inside the operators' own
    templates the place that asked for them."""
    places, asked = set(), []
    for line in said.splitlines():
        at = re.match(rf"{re.escape(str(tree))}/([^:]+):(\d+):", line)
        place = (at[1], int(at[2])) if at else None
        if " error: " in line:
            places.update([place] if place else asked[-1:])
            asked = []
        elif place and "required from" in line:
            asked.append(place)
    return places


def make(build, count, seed, files):
    found = find(build, files).found if count > 0 else {}
    drawn = choose(found.values(), count, seed)
    chosen = dict(enumerate([m for m in known_mutations(build) if re.search(files, m.file)] + drawn))
    print(f"{len(found)} places can be mutated; {len(drawn)} are drawn with seed {seed}, "
          f"{len(chosen) - len(drawn)} are known", flush=True)
    shutil.rmtree(build.out, ignore_errors=True)
    changed = dependents(build, chosen)
    left = [output for output in build.core + internal_objects(build) if output in changed]
    print(f"{len(left)} objects are compiled", flush=True)
    while left:
        write_tree(build, chosen)
        said = build.compile(left)
        left = list(said)
        places = set().union(*(places_of_errors(text, build.tree) for text in said.values()))
        wrong = {n for n, m in chosen.items() if any(file == m.file and m.line <= line <= m.last_line for file, line in places)}
        if left and not wrong:
            sys.exit(f"tools/mutants: the rewritten library does not compile:\n{said[left[0]][-4000:]}")
        for number in wrong:
            del chosen[number]
        if wrong:
            print(f"{len(wrong)} do not compile and are left out", flush=True)
    link(build, max(chosen) + 1)
    build.list.write_text(json.dumps({n: dataclasses.asdict(m) | {"opening": "", "closing": ""}
                                      for n, m in chosen.items()}, indent=1))


def tests_of(build):
    """The quick tests that are programs with the library in them: {"name", "command", "environment", "folder"}."""
    listing = json.loads(output_of(["ctest", "--test-dir", str(build.release), "--show-only=json-v1", "-L", "quick"]))
    tests = []
    for test in listing["tests"]:
        properties = {p["name"]: p["value"] for p in test["properties"]}
        command = test.get("command", [""])
        if not re.search(r"/bifolio_(test|fuzz)_[a-z0-9_]+$", command[0]) or not build.tests.search(test["name"]):
            continue
        words = build.link_command_of(os.path.relpath(command[0], build.release))
        if "src/libbifolio_core.a" not in words or any("libbifolio_c." in word for word in words):
            continue
        environment = dict(pair.split("=", 1) for pair in properties.get("ENVIRONMENT", []))
        environment.pop("BIFOLIO_TEST_REACH_DIR", None)
        tests.append({"name": test["name"], "command": command, "environment": environment, "words": words,
                      "folder": properties.get("WORKING_DIRECTORY", str(build.release))})
    return tests


def internal_objects(build):
    """Objects of the tests that include headers of src/: their inline functions are mutated as well."""
    return sorted({word for test in tests_of(build) for word in test["words"]
                   if word in build.compilations and f"-I{build.root}/src" in build.compilations[word]["command"]})


def link_again(build):
    link(build, 1 + max(int(number) for number in json.loads(build.list.read_text())))


def link(build, num_mutants):
    switch = build.out / "mutants.o"
    output_of(["c++", "-std=c++20", "-O1", f"-DBIFOLIO_NUM_MUTANTS={num_mutants}", "-c",
               str(build.root / "tests/mutants/mutants.cpp"), "-o", str(switch)])
    archive = build.out / "libbifolio_core.a"
    archive.unlink(missing_ok=True)
    mutated = [build.out / "objects" / output for output in build.core]
    objects = [m if m.exists() else build.release / output for m, output in zip(mutated, build.core)]
    output_of(["ar", "qcs", str(archive), str(switch)] + [str(o) for o in objects])
    programs = build.out / "programs"
    programs.mkdir(exist_ok=True)

    def one(test):
        words = []
        for word in test["words"]:
            mutated = build.out / "objects" / word
            if word == "src/libbifolio_core.a":
                words += ["-Wl,--undefined=bifolio_record_mutant", str(archive)]
            elif word.endswith(".o") and mutated.exists():
                words.append(str(mutated))
            elif words and words[-1] == "-o":
                words.append(str(programs / pathlib.Path(word).name))
            else:
                words.append(word)
        output_of(words, cwd=build.release)
    with concurrent.futures.ThreadPoolExecutor(build.jobs) as pool:
        list(pool.map(one, tests_of(build)))

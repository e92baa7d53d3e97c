#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes unicode_tables.cpp: what the splitting and the NFC of tokenizer.json need of the Unicode Character Database.

    pip install unicodedata2==16.0.0      # and perl, for the age of a character
    python3 examples/generate/make_unicode_tables.py >examples/generate/unicode_tables.cpp

Letters and numbers are those of Unicode 16.0, which the regular expressions of the `tokenizers` package (0.23.3) go by;
its NFC goes by Unicode 9.0. What a character decomposes to and its combining class never change once it is assigned
(Unicode's stability policy), so that the tables of 9.0 are those of 16.0 for the characters that 9.0 has.
"""

import subprocess

import unicodedata2 as unicode

assert unicode.unidata_version == "16.0.0"
EVERY = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def rows(items):
    line = " "
    for item in items:
        if len(line) + len(item) > 118:
            print(line)
            line = " "
        line += " " + item + ","
    print(line)


def ranges(holds):
    result, begin = [], None
    for c in EVERY + [0x110000]:
        inside = c < 0x110000 and holds(c)
        if inside and begin is None:
            begin = c
        elif not inside and begin is not None:
            result.append((begin, last))
            begin = None
        last = c
    return result


def print_ranges(name, holds):
    found = ranges(holds)
    print(f"const std::array<character_range, {len(found)}> {name}{{{{")
    rows(f"{{0x{a:X}, 0x{b:X}}}" for a, b in found)
    print("}};\n")


def main():
    present = subprocess.run(
        ["perl", "-e", r'for (0 .. 0x10ffff) { next if $_ >= 0xd800 && $_ < 0xe000; '
                       r'print "$_\n" if chr =~ /\p{Present_In=9.0}/ }'],
        check=True, capture_output=True, text=True)
    old = {int(line) for line in present.stdout.split()}

    print("""// SPDX-License-Identifier: Apache-2.0
// Made by make_unicode_tables.py of the Unicode Character Database: letters and numbers of Unicode 16.0, decompositions
// and combining classes of the characters of Unicode 9.0.
#include "unicode_tables.hpp"

// clang-format off
namespace generate {
""")
    print_ranges("letters", lambda c: unicode.category(chr(c))[0] == "L")
    print_ranges("numbers", lambda c: unicode.category(chr(c))[0] == "N")

    classes = []
    for a, b in ranges(lambda c: c in old and unicode.combining(chr(c)) > 0):
        for c in range(a, b + 1):
            value = unicode.combining(chr(c))
            if classes and classes[-1][1] == c - 1 and classes[-1][2] == value:
                classes[-1] = (classes[-1][0], c, value)
            else:
                classes.append((c, c, value))
    print(f"const std::array<combining_range, {len(classes)}> combining_classes{{{{")
    rows(f"{{0x{a:X}, 0x{b:X}, {value}}}" for a, b, value in classes)
    print("}};\n")

    found = []
    for c in EVERY:
        parts = unicode.decomposition(chr(c)).split() if c in old else []
        if not parts or parts[0].startswith("<"):
            continue
        first, second = int(parts[0], 16), int(parts[1], 16) if len(parts) > 1 else 0
        composes = second and unicode.normalize("NFC", chr(c)) == chr(c)
        found.append((c, first, second, "true" if composes else "false"))
    print(f"const std::array<decomposition, {len(found)}> decompositions{{{{")
    rows(f"{{0x{c:X}, 0x{a:X}, 0x{b:X}, {composes}}}" for c, a, b, composes in found)
    print("}};\n")
    print("}  // namespace generate\n// clang-format on")
    return len(found), len(classes)


main()

#!/usr/bin/env python3
"""Makes the training text from the Debian packages bible-kjv and bible-kjv-text.

    apt-get install bible-kjv bible-kjv-text
    python3 tools/train/prepare_text.py --out .train-data

Writes train.txt, validation.txt and test.txt. Each is a sequence of documents,
one chapter of the King James Bible each, and every document is followed by one
zero byte. A document looks like this:

    Genesis 1
    1 In the beginning God created the heaven and the earth.
    2 And the earth was without form, and void; ...

The text is plain ASCII, so one byte is one character.

Held out: some whole books, and two chapters in forty of everything else.
validation.txt chooses the checkpoint, test.txt is only ever measured; neither
is trained on.
"""
import argparse
import hashlib
import pathlib
import re
import subprocess
import sys

# Names in the order in which the `bible` program prints the books.
BOOKS = """Genesis,Exodus,Leviticus,Numbers,Deuteronomy,Joshua,Judges,Ruth,1 Samuel,
2 Samuel,1 Kings,2 Kings,1 Chronicles,2 Chronicles,Ezra,Nehemiah,Esther,Job,Psalm,
Proverbs,Ecclesiastes,Song of Solomon,Isaiah,Jeremiah,Lamentations,Ezekiel,Daniel,
Hosea,Joel,Amos,Obadiah,Jonah,Micah,Nahum,Habakkuk,Zephaniah,Haggai,Zechariah,
Malachi,Matthew,Mark,Luke,John,Acts,Romans,1 Corinthians,2 Corinthians,Galatians,
Ephesians,Philippians,Colossians,1 Thessalonians,2 Thessalonians,1 Timothy,
2 Timothy,Titus,Philemon,Hebrews,James,1 Peter,2 Peter,1 John,2 John,3 John,Jude,
Revelation""".replace("\n", "").split(",")

CHAPTERS = 1189
VERSES = 31102

VALIDATION_BOOKS = {"Joel", "Philippians"}
TEST_BOOKS = {"Ruth", "Jonah", "James"}
STRIDE = 40  # of the 1189 chapters in order, numbered from 0, number i is
VALIDATION_AT = 17  # ... for validation where i % STRIDE == VALIDATION_AT
TEST_AT = 37  # ... for the test where i % STRIDE == TEST_AT


def read_verses(program: str):
    """Yields (book, chapter, verse, text) in the Bible's order."""
    dump = subprocess.run(
        [program, "-f", "Gen1:1-Rev22:21"], check=True, capture_output=True
    ).stdout.decode("ascii")
    line_form = re.compile(r"^([1-3]?[A-Za-z]+)(\d+):(\d+) (.*)$")
    names = iter(BOOKS)
    abbreviation, name = None, None
    for line in dump.splitlines():
        match = line_form.match(line)
        if not match:
            sys.exit(f"prepare_text.py: unexpected line from {program}: {line!r}")
        if match[1] != abbreviation:
            abbreviation, name = match[1], next(names)
        yield name, int(match[2]), int(match[3]), " ".join(match[4].split())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, default=".train-data",
                        help="folder to write to (default: %(default)s)")
    parser.add_argument("--bible", default="bible", help="the program (default: %(default)s)")
    arguments = parser.parse_args()

    chapters = {}  # (book, chapter) -> lines; a dict keeps the order
    verses = 0
    for book, chapter, verse, text in read_verses(arguments.bible):
        lines = chapters.setdefault((book, chapter), [f"{book} {chapter}"])
        if verse != len(lines):
            sys.exit(f"prepare_text.py: verse {verse} of {lines[0]} is out of order")
        lines.append(f"{verse} {text}")
        verses += 1
    if (len(chapters), verses) != (CHAPTERS, VERSES):
        sys.exit(f"prepare_text.py: got {len(chapters)} chapters, {verses} verses; "
                 f"expected {CHAPTERS}, {VERSES}")

    parts = {"train": [], "validation": [], "test": []}
    for index, ((book, _), lines) in enumerate(chapters.items()):
        if book in VALIDATION_BOOKS:
            part = "validation"
        elif book in TEST_BOOKS:
            part = "test"
        elif index % STRIDE == VALIDATION_AT:
            part = "validation"
        elif index % STRIDE == TEST_AT:
            part = "test"
        else:
            part = "train"
        parts[part].append("\n".join(lines) + "\n")

    arguments.out.mkdir(parents=True, exist_ok=True)
    for part, documents in parts.items():
        data = b"".join(document.encode("ascii") + b"\0" for document in documents)
        (arguments.out / f"{part}.txt").write_bytes(data)
        print(f"{part + '.txt':15} {len(documents):5} chapters {len(data):8} bytes  sha256 "
              f"{hashlib.sha256(data).hexdigest()}")
        if part != "train":
            print("    " + ", ".join(d.split("\n", 1)[0] for d in documents))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Finds what can be mutated in C++ sources, and writes the sources with a chosen part of it.

The syntax tree comes from libclang, so that a "<" is a comparison and not a template's. Every rewrite only inserts text
and replaces operators: no line moves, and rewrites may lie within one another.

  operator    a < b   ->  less<N>(a, b), which computes a <= b where the mutant is on; likewise <= > >= == != + - * /
  operand     a && b  ->  a && (is_on(N) || (b)), and for ||  (!is_on(N) && (b)): the operand does not count
  condition   if (c)  ->  if (!is_on(N) && (c)): what it guards never happens
  statement   f(x);   ->  { if (!is_on(N)) f(x); }: a call, an assignment or an increment is left out
  literal     7       ->  one_more<N>(7)
  truth       return true  ->  return (true != is_on(N))
"""

import dataclasses
import os
import re

from clang import cindex

K = cindex.CursorKind

OPERATORS = {
    "<": "less", "<=": "less_equal", ">": "greater", ">=": "greater_equal", "==": "equal", "!=": "unequal",
    "+": "plus", "-": "minus", "*": "times", "/": "divide",
}
FUNCTIONS = {K.FUNCTION_DECL, K.CXX_METHOD, K.CONSTRUCTOR, K.DESTRUCTOR, K.FUNCTION_TEMPLATE, K.CONVERSION_FUNCTION}
# Nothing in these is evaluated when the program runs, or nothing that a mutant could be told apart by.
LEFT_OUT = {K.STATIC_ASSERT, K.ENUM_DECL, K.FIELD_DECL, K.CXX_UNARY_EXPR, K.TYPE_ALIAS_DECL, K.TYPEDEF_DECL,
            K.TEMPLATE_TYPE_PARAMETER, K.TEMPLATE_NON_TYPE_PARAMETER, K.PARM_DECL, K.ASM_STMT}
STATEMENTS = {K.CALL_EXPR, K.COMPOUND_ASSIGNMENT_OPERATOR, K.UNEXPOSED_EXPR, K.BINARY_OPERATOR, K.UNARY_OPERATOR}
# A hint changes no result.
HINTS = re.compile(rb"^\s*(?:[\w:.>-]*(?:prefetch|hint|poll)\w*|__builtin_prefetch|pause)\s*[(<]")


def kind_of(cursor):
    """None for what libclang knows and its Python module does not."""
    try:
        return cursor.kind
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True)
class Mutation:
    """Offsets are bytes of the file; `opening` has %d for the mutant's number."""
    file: str
    line: int
    last_line: int
    kind: str
    what: str       # the source text that it changes, on one line
    begin: int
    end: int
    opening: bytes
    closing: bytes
    operator: tuple  # (begin, end) of what becomes a comma, or ()


def described(text):
    what = " ".join(text.decode().split())
    return what if len(what) <= 160 else what[:157] + "..."


class Finder:
    def __init__(self, root, wanted):
        self.root = root
        self.wanted = wanted  # file name relative to root -> bool
        self.found = {}
        self.texts = {}
        self.searched = set()

    def text(self, path):
        if path not in self.texts:
            with open(path, "rb") as file:
                self.texts[path] = file.read()
        return self.texts[path]

    def parse(self, source, arguments):
        """A header is searched in the first source that includes it."""
        unit = cindex.Index.create().parse(source, args=arguments)
        seen = set()
        for top in unit.cursor.get_children():
            file = top.location.file
            if file is not None and file.name.startswith(self.root) and file.name not in self.searched:
                seen.add(file.name)
                self.outside(top)
        self.searched |= seen

    def outside(self, cursor):
        """Namespaces and classes: looks for the bodies of functions."""
        if cursor.spelling in ("check", "digest", "add_to"):
            return  # what only tests call: one that accepts too much, or sees too little, shows in no result
        if kind_of(cursor) in FUNCTIONS:
            name = cursor.location.file.name
            if self.wanted(os.path.relpath(name, self.root)):
                for child in cursor.get_children():
                    if kind_of(child) == K.COMPOUND_STMT:
                        self.path = name
                        self.inside(child, False)
        elif kind_of(cursor) in (K.NAMESPACE, K.CLASS_DECL, K.STRUCT_DECL, K.CLASS_TEMPLATE, K.UNEXPOSED_DECL,
                             K.LINKAGE_SPEC, K.CLASS_TEMPLATE_PARTIAL_SPECIALIZATION):
            for child in cursor.get_children():
                if child.location.file is not None and child.location.file.name.startswith(self.root):
                    self.outside(child)

    def add(self, cursor, kind, begin, end, opening, closing, operator=()):
        text = self.text(self.path)
        if not 0 <= begin < end <= len(text):
            return
        what = described(text[begin:end])
        relative = os.path.relpath(self.path, self.root)
        line = text.count(b"\n", 0, begin) + 1
        last_line = line + text.count(b"\n", begin, end)
        mutation = Mutation(relative, line, last_line, kind, what, begin, end, opening.encode(), closing.encode(), operator)
        self.found[(relative, begin, end, kind)] = mutation

    def inside(self, cursor, is_statement):
        kind = kind_of(cursor)
        if kind in LEFT_OUT:
            return
        begin, end = cursor.extent.start.offset, cursor.extent.end.offset
        text = self.text(self.path)
        if kind == K.VAR_DECL and re.match(rb"(?:static\s+)?(?:constexpr|constinit)|static\b", text[begin:end]):
            return
        children = list(cursor.get_children())
        if is_statement and kind in STATEMENTS:
            self.statement(cursor, children, begin, end)
        if kind == K.BINARY_OPERATOR and len(children) == 2:
            self.binary(cursor, children)
        elif kind == K.INTEGER_LITERAL and re.fullmatch(rb"[0-9]+(?:[uUlL]*)", text[begin:end]):
            self.add(cursor, "literal", begin, end, "::bifolio_mutants::one_more<%d>(", ")")
        elif kind == K.RETURN_STMT and text[begin:end] in (b"return true", b"return false"):
            self.add(cursor, "truth", begin + len("return "), end, "(::bifolio_mutants::is_on(%d) != ", ")")
        elif kind == K.IF_STMT:
            if re.match(rb"if\s+constexpr", text[begin:end]):
                children = children[1:]
            elif children and kind_of(children[0]) not in (K.VAR_DECL, K.DECL_STMT):
                condition = children[0].extent
                self.add(cursor, "condition", condition.start.offset, condition.end.offset,
                         "(!::bifolio_mutants::is_on(%d) && (", "))")
        for index, child in enumerate(children):
            if child.location.file is None or child.location.file.name != self.path:
                continue
            if kind == K.CASE_STMT and index == 0:
                continue
            body = kind == K.COMPOUND_STMT or (kind == K.IF_STMT and index > 0) or (
                kind in (K.FOR_STMT, K.WHILE_STMT, K.CXX_FOR_RANGE_STMT) and index == len(children) - 1)
            self.inside(child, body)

    def binary(self, cursor, children):
        text = self.text(self.path)
        left, right = children[0].extent, children[1].extent
        between = text[left.end.offset:right.start.offset]
        operator = between.strip().decode(errors="replace")
        begin, end = cursor.extent.start.offset, cursor.extent.end.offset
        if begin != left.start.offset or end != right.end.offset:
            return  # a macro's
        if operator in OPERATORS:
            at = left.end.offset + between.index(operator.encode())
            self.add(cursor, "operator", begin, end, f"::bifolio_mutants::{OPERATORS[operator]}<%d>(", ")",
                     (at, at + len(operator)))
        elif operator in ("&&", "||"):
            opening = "(::bifolio_mutants::is_on(%d) || (" if operator == "&&" else "(!::bifolio_mutants::is_on(%d) && ("
            for side in (left, right):
                self.add(cursor, "operand", side.start.offset, side.end.offset, opening, "))")

    def statement(self, cursor, children, begin, end):
        text = self.text(self.path)
        if HINTS.match(text[begin:end]):
            return
        if cursor.kind == K.BINARY_OPERATOR:
            between = text[children[0].extent.end.offset:children[1].extent.start.offset] if len(children) == 2 else b""
            if between.strip() != b"=":
                return
        if cursor.kind == K.UNARY_OPERATOR and b"++" not in text[begin:end] and b"--" not in text[begin:end]:
            return
        rest = re.match(rb"\s*;", text[end:])
        if rest is None:
            return
        self.add(cursor, "statement", begin, end + rest.end(), "{ if (!::bifolio_mutants::is_on(%d)) ", " }")


def rewritten(text, chosen):
    """`chosen`: pairs of a number and a mutation of this text."""
    marks = []
    for number, m in chosen:
        size = m.end - m.begin
        # At one place what ends comes before what begins; the outer begins first and ends last.
        marks.append((m.begin, 1, -size, number, m.opening.replace(b"%d", b"%d" % number), m.begin))
        marks.append((m.end, 0, size, -number, m.closing, m.end))
        if m.operator:
            marks.append((m.operator[0], 2, 0, number, b",", m.operator[1]))
    result, at = [], 0
    for begin, _, _, _, inserted, end in sorted(marks):
        result.append(text[at:begin])
        result.append(inserted)
        at = max(at, end)
    result.append(text[at:])
    return b"".join(result)

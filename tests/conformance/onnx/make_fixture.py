#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Rebuilds the fixture of ONNX's own test cases for Attention, FlexAttention and RotaryEmbedding.

    python3 -m venv /tmp/onnx-venv && /tmp/onnx-venv/bin/pip install onnx==1.23.2
    /tmp/onnx-venv/bin/python tests/conformance/onnx/make_fixture.py           # writes the two files
    /tmp/onnx-venv/bin/python tests/conformance/onnx/make_fixture.py --check   # compares with them

The package `onnx` (Apache-2.0, (c) ONNX Project Contributors) carries the generators of its backend
node tests: models of one operator, inputs, and outputs of ONNX's reference implementation in NumPy.
This script writes those of the operators below, next to itself, as

  cases.txt    text, one item per line, words separated by blanks:
                 source NAME VERSION LICENCE       package that the cases come from
                 numpy VERSION                     NumPy that computed the outputs
                 script HASH                       FNV-1a (64 bit) of this script
                 tensors BYTES HASH                of tensors.bin
                 cases COUNT
                 case NAME OPERATOR OPSET          everything until the next `case` belongs to it
                 attribute NAME VALUE...           a number, or the operators and constants of a graph
                 input|output NAME TYPE OFFSET [DIM...]   a tensor; NAME is that of the operator's schema
  tensors.bin  the tensors, little-endian, row-major, each at a multiple of 8 bytes; equal ones once

Outputs depend on the summation order of the NumPy build in their last bits: --check takes inputs bit
for bit and outputs within 4 units of roundoff of their type, relative to the tensor's largest value.
"""
import argparse
import pathlib
import sys
import warnings

import numpy as np
import onnx
from onnx.backend.test.case.node import collect_testcases

OPERATORS = ("Attention", "FlexAttention", "RotaryEmbedding")
TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "float64": "f64", "bool": "bool", "int64": "i64"}
ROUNDOFF = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8, "f64": 2.0**-53}
FOLDER = pathlib.Path(__file__).resolve().parent


def fnv1a(data):
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


class Tensors:
    """The bytes of tensors.bin; a tensor that is there already is not added again."""

    def __init__(self):
        self.bytes = bytearray()
        self.places = {}

    def place(self, array):
        raw = array.tobytes()
        if raw not in self.places:
            self.bytes += bytes(-len(self.bytes) % 8)
            self.places[raw] = len(self.bytes)
            self.bytes += raw
        return self.places[raw]


def number(value):
    return str(value) if isinstance(value, int) else repr(float(value))


def describe_graph(graph):
    """The operators in order, joined by '+', then the values of the floating-point constants."""
    operators = "+".join(node.op_type for node in graph.node)
    constants = [onnx.numpy_helper.to_array(c) for c in graph.initializer]
    values = [number(v) for c in constants if c.dtype.kind == "f" for v in c.flat]
    return " ".join([operators, *values])


def attribute_lines(node):
    for attribute in sorted(node.attribute, key=lambda a: a.name):
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, onnx.GraphProto):
            yield f"attribute {attribute.name} {describe_graph(value)}"
        elif isinstance(value, (int, float)):
            yield f"attribute {attribute.name} {number(value)}"
        else:
            raise TypeError(f"attribute {attribute.name} is a {type(value).__name__}")


def tensor_lines(kind, names, formal, arrays, tensors):
    present = [formal[i].name for i, name in enumerate(names) if name]
    if len(present) != len(arrays):
        raise ValueError(f"{len(present)} {kind}s are named and {len(arrays)} given")
    for name, array in zip(present, arrays):
        array = np.ascontiguousarray(array)
        if array.dtype.byteorder == ">" or (array.dtype.itemsize > 1 and sys.byteorder != "little"):
            raise ValueError("little-endian machines only")
        dims = " ".join(str(n) for n in array.shape)
        yield f"{kind} {name} {TYPES[array.dtype.name]} {tensors.place(array)} {dims}".rstrip()


def make():
    tensors = Tensors()
    lines = []
    count = 0
    for test in collect_testcases(None):
        # Each case comes twice: as its operator, and written out as a graph of simpler ones.
        if len(test.model.graph.node) != 1 or test.model.graph.node[0].op_type not in OPERATORS:
            continue
        node = test.model.graph.node[0]
        opset = next(o.version for o in test.model.opset_import if o.domain == node.domain)
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
        ((inputs, outputs),) = test.data_sets
        lines.append(f"case {test.name.removeprefix('test_')} {node.op_type} {opset}")
        lines += attribute_lines(node)
        lines += tensor_lines("input", node.input, schema.inputs, inputs, tensors)
        lines += tensor_lines("output", node.output, schema.outputs, outputs, tensors)
        count += 1
    head = [
        f"source onnx {onnx.__version__} Apache-2.0",
        f"numpy {np.__version__}",
        f"script {fnv1a(pathlib.Path(__file__).read_bytes())}",
        f"tensors {len(tensors.bytes)} {fnv1a(tensors.bytes)}",
        f"cases {count}",
    ]
    return "\n".join(head + lines) + "\n", bytes(tensors.bytes)


def read_tensor(words, data):
    """(kind, name, type, dims) and the values of a line of cases.txt."""
    kind, name, type_, offset, *dims = words
    dtype = next(np.dtype(n) if n != "bfloat16" else np.dtype(_bfloat16()) for n, t in TYPES.items() if t == type_)
    shape = [int(n) for n in dims]
    values = np.frombuffer(data, dtype, int(np.prod(shape)), int(offset)).reshape(shape)
    return (kind, name, type_, dims), values


def _bfloat16():
    import ml_dtypes

    return ml_dtypes.bfloat16


def items(text):
    """(case, line) pairs of everything but the head."""
    case = None
    for line in text.splitlines():
        if line.startswith("case "):
            case = line
        elif case is not None:
            yield case, line


def differences(text, data, old_text, old_data):
    new, old = list(items(text)), list(items(old_text))
    if len(new) != len(old):
        yield f"{len(new)} attributes and tensors here, {len(old)} in the fixture"
        return
    for (case, line), (old_case, old_line) in zip(new, old):
        if case != old_case:
            yield f"'{case}' against '{old_case}'"
            return
        if line.startswith("attribute "):
            if line != old_line:
                yield f"{case}: '{line}' against '{old_line}'"
            continue
        shape, values = read_tensor(line.split(), data)
        old_shape, old_values = read_tensor(old_line.split(), old_data)
        if shape != old_shape:
            yield f"{case}: {shape} against {old_shape}"
        elif shape[0] == "input" or shape[2] not in ROUNDOFF:
            if values.tobytes() != old_values.tobytes():
                yield f"{case}: {shape[1]} differs"
        else:
            a, b = values.astype(np.float64), old_values.astype(np.float64)
            finite = np.isfinite(b)
            room = 4 * ROUNDOFF[shape[2]] * np.max(np.abs(b[finite]), initial=0)
            if not np.array_equal(a[~finite], b[~finite], equal_nan=True) or np.any(np.abs(a - b)[finite] > room):
                yield f"{case}: {shape[1]} differs by more than rounding"


def main():
    parser = argparse.ArgumentParser(description="Rebuilds the fixture of ONNX's attention test cases.")
    parser.add_argument("--check", action="store_true", help="compare with the fixture instead of writing it")
    check = parser.parse_args().check
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # divisions by zero in other operators' generators
    text, data = make()
    if not check:
        (FOLDER / "cases.txt").write_text(text)
        (FOLDER / "tensors.bin").write_bytes(data)
        print(f"{text.count(chr(10) + 'case ')} cases, {len(text)} bytes of text, {len(data)} bytes of tensors")
        return 0
    found = list(differences(text, data, (FOLDER / "cases.txt").read_text(), (FOLDER / "tensors.bin").read_bytes()))
    print("\n".join(found) if found else "the fixture is what this package gives")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

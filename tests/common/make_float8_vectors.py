#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes float8_vectors.txt: conversions of 8-bit floats by packages that know nothing of this one.

    pip install "onnx<1.18" ml_dtypes numpy
    python3 make_float8_vectors.py > float8_vectors.txt

Narrowing is ONNX's Cast with saturation (onnx.helper); where nothing saturates, ml_dtypes must agree with it, or the
script stops. Widening is the tables of ml_dtypes. NaN is left out where narrowing: ONNX keeps its sign.
"""

import ml_dtypes
import numpy as np
from onnx import helper


def bits_of(value):
    return int(np.float32(value).view(np.uint32))


def narrow(value):
    value = float(np.float32(value))
    pairs = (
        (helper.float32_to_float8e4m3(value, saturate=True), ml_dtypes.float8_e4m3fn, 448.0),
        (helper.float32_to_float8e5m2(value, saturate=True), ml_dtypes.float8_e5m2, 57344.0),
    )
    codes = []
    for code, dtype, largest in pairs:
        if abs(value) <= largest:
            other = int(np.array([value], dtype=np.float32).astype(dtype).view(np.uint8)[0])
            assert code == other, (value, code, other)
        codes.append(code)
    return codes


def main():
    tables = [
        np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    ]
    for byte in range(256):
        print(f"widen {byte:02x} {bits_of(tables[0][byte]):08x} {bits_of(tables[1][byte]):08x}")
    values = {0.0, float("inf"), 1e38, 1e-38, 1e-45, 449.0, 463.9, 464.0, 464.1, 480.0, 61439.9, 61440.0, 65504.0}
    for table in tables:
        finite = np.unique(np.abs(table[np.isfinite(table)]).astype(np.float64))
        for low, high in zip(finite, finite[1:]):
            middle = np.float32((low + high) / 2)
            values |= {float(high), float(middle)}
            values |= {float(np.nextafter(middle, np.float32(edge), dtype=np.float32)) for edge in (0, np.inf)}
    for value in sorted(values):
        for signed in (value, -value):
            e4m3, e5m2 = narrow(signed)
            print(f"narrow {bits_of(signed):08x} {e4m3:02x} {e5m2:02x}")


if __name__ == "__main__":
    main()

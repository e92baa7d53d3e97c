# SPDX-License-Identifier: Apache-2.0
"""Writes vectors.hpp: rows of latent attention and the 656 bytes that FlashMLA's format makes of each.

Needs numpy and ml_dtypes. The numbers come from the format's definition alone: 512 e4m3 codes, four float32 scales
2^ceil(log2(max(amax / 448, 1e-4))) of 128 dims each, 64 bfloat16.
"""

import pathlib

import ml_dtypes
import numpy as np

# Of each row, the exponent bits of its four groups of 128 dims and of its rotated dims; None: all zero.
ROWS = [(120, 127, 124, 130, 126), (96, 140, None, 100, 110), (127, 128, 129, 126, 135), (85, 200, 133, 118, 127)]


def bits_of_row(index, exponents):
    """bfloat16 bits of 576 dims: a linear congruential generator gives sign, three bits of exponent and mantissa."""
    state = np.uint32(index + 1)
    bits = np.zeros(576, dtype=np.uint16)
    for dim in range(576):
        with np.errstate(over="ignore"):
            state = np.uint32(state * np.uint32(1664525) + np.uint32(1013904223))
        exponent = exponents[dim // 128]
        if exponent is None:
            continue
        sign, low, mantissa = int(state >> 31), int(state >> 24) & 7, int(state >> 16) & 0x7F
        bits[dim] = sign << 15 | (exponent - low) << 7 | mantissa
    if index == 2:
        bits[5] = 0x43E0  # 448 is the largest of its group: a scale that is a power of two already
        bits[130] = 0x43E1  # one bit more: the next power of two
    return bits


def record_of(bits):
    values = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    codes, scales = [], []
    for group in range(4):
        dims = values[128 * group : 128 * (group + 1)]
        wanted = np.maximum(np.abs(dims).max() / np.float32(448), np.float32(1e-4))
        scale = np.float32(2.0) ** np.ceil(np.log2(wanted)).astype(np.float32)
        scales.append(scale)
        codes.append((dims / scale).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    parts = [*codes, np.array(scales, dtype="<f4").view(np.uint8), bits[512:].view(np.uint8)]
    record = np.concatenate(parts)
    assert record.size == 656
    return record.tobytes()


def main():
    lines = [
        "// SPDX-License-Identifier: Apache-2.0",
        "#pragma once",
        "",
        "/// Written by make_vectors.py: bytes of records in hexadecimal digits, by another program.",
        "",
        "namespace bifolio::test {",
        "",
        "// clang-format off",
        "inline constexpr const char* record_digits[] = {",
    ]
    for index, exponents in enumerate(ROWS):
        digits = record_of(bits_of_row(index, exponents)).hex()
        rows = [digits[i : i + 112] for i in range(0, len(digits), 112)]
        lines += [f'    "{row}"' for row in rows[:-1]] + [f'    "{rows[-1]}",']
    lines += ["};", "// clang-format on", "", "}  // namespace bifolio::test", ""]
    (pathlib.Path(__file__).parent / "vectors.hpp").write_text("\n".join(lines))


if __name__ == "__main__":
    main()

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the arithmetic `integers` needs besides a micro-kernel (`quad_column`): queries rounded to bytes, and i8 codes
/// of keys in fours.
///
/// A query q is step · (its bytes) + what was rounded off, at most step / 2 per dim; step is max |q_d| / 127. The
/// integer products take unsigned keys: code + 128, of which 128 · Σ (query bytes) is taken away again.

#include "cpu/kernels/attention/kernels.hpp"
#include "cpu/kernels/attention/prefetch_queue.hpp"
#include "cpu/kernels/simd/simd.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

/// Of one query.
struct query_step {
  float step = 0;           ///< of its bytes; NaN where an element is not finite
  std::int32_t offset = 0;  ///< to be added to its sums
};
/// Floats behind a query's bytes that hold it.
inline constexpr int query_step_floats = 2;

/// Queries whose largest element is below this count as 0: 127 times its reciprocal is beyond float32.
inline constexpr float smallest_query = 0x1p-119f;

/// `count` elements, in place, as fours of bytes, then a `query_step`. The array has room for `count` elements and for
/// (count + 3) / 4 + 2.
BIFOLIO_INLINE void round_query(float* values, int count) noexcept {
  float largest = 0;
  bool is_finite = true;
  for (int d = 0; d < count; ++d) {
    const float magnitude = __builtin_fabsf(values[d]);
    is_finite = is_finite && magnitude <= 0x1.fffffep127f;
    largest = magnitude > largest ? magnitude : largest;
  }
  const bool is_zero = !is_finite || largest < smallest_query;
  const float inverse = is_zero ? 0.0f : 127.0f / largest;
  std::int32_t sum = 0;
  const int num_quads = (count + 3) / 4;
  for (int quad = 0; quad < num_quads; ++quad) {
    std::uint32_t bytes = 0;
    for (int i = 0; i < 4 && 4 * quad + i < count; ++i) {
      // Adding 1.5 · 2^23 rounds to an integer and leaves it in the low bits.
      const float shifted = (is_zero ? 0.0f : values[4 * quad + i] * inverse) + 0x1.8p23f;
      const std::int32_t code = __builtin_bit_cast(std::int32_t, shifted) - 0x4b400000;
      sum += code;
      bytes |= (static_cast<std::uint32_t>(code) & 0xffu) << (8 * i);
    }
    values[quad] = __builtin_bit_cast(float, bytes);
  }
  values[num_quads] = is_finite ? (is_zero ? 0.0f : largest / 127.0f) : __builtin_nanf("");
  values[num_quads + 1] = __builtin_bit_cast(float, -128 * sum);
}

/// keys[four dims][lane] of `lanes` rows of codes and `dims` dims; keys [fours][tile_keys]. Of a last four that is not
/// whole the rows have any bytes.
template <class Rows>
BIFOLIO_INLINE void transpose_fours(const Rows& rows, int dims, float* keys, prefetcher& prefetch) noexcept {
  constexpr int step = lanes * 4;
  prefetch_poller poller(prefetch);
  const auto store_column = [&](int dim, vf column) __attribute__((always_inline)) {
    store(keys + dim / 4 * tile_keys, above_lowest(column));
    poller.poll();
  };
  int dim = 0;
  for (; dim + step <= dims; dim += step) {
    transpose(
        [&](int i) __attribute__((always_inline)) { return load_bits(rows.at(i, dim)); },
        [&](int j, vf column) __attribute__((always_inline)) { store_column(dim + 4 * j, column); });
  }
  if (dim >= dims) return;
  const int num_bytes = (dims - dim + 3) / 4 * 4;
  transpose(
      [&](int i) __attribute__((always_inline)) { return load_first(rows.at(i, dim), num_bytes); },
      [&](int j, vf column) __attribute__((always_inline)) {
        if (dim + 4 * j < dims) store_column(dim + 4 * j, column);
      });
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

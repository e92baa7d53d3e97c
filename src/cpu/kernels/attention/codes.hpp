// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Rows of K or V of any code and layout as float32. One function for all codes, with a branch per row: the loops of
/// attention are not compiled again for each.

#include "cpu/kernels/attention/kernels.hpp"
#include "cpu/kernels/simd/storage_convert.hpp"

namespace bifolio::cpu::BIFOLIO_ISA {
namespace {

/// `count` ≤ 64 contiguous elements; reads no further.
template <class Stored>
BIFOLIO_FORCE_INLINE void decode_elements(const Stored* from, int count, const detail::scale_pair& scales,
                                          const coded_plane& plane, float* to) noexcept {
  constexpr int step = max_lanes;
  const f32_vector<step> scale = f32_vector<step>{} + scales.scale;
  const f32_vector<step> zero = f32_vector<step>{} + scales.zero;
  const auto value_of = [&](const Stored* source) __attribute__((always_inline)) {
    f32_vector<step> values = cpu::widen<step>(source);
    if (plane.is_scaled) values = values * scale;
    if (plane.tail_floats > 1) values = values + zero;
    return values;
  };
  int i = 0;
  for (; i + step <= count; i += step) {
    const f32_vector<step> values = value_of(from + i);
    __builtin_memcpy(to + i, &values, sizeof(values));
  }
  if (i == count) return;
  Stored padded[std::size_t{step}] = {};
  for (int e = 0; i + e < count; ++e) padded[e] = from[i + e];
  const f32_vector<step> values = value_of(padded);
  for (int e = 0; i + e < count; ++e) to[i + e] = values[e];
}

/// The row whose dim 0 is `offset` elements, and whose scales, if it has its own, are `tail` bytes from the start of
/// the plane.
[[gnu::noinline]] void decode_row(const coded_plane& plane, const void* base, std::int64_t offset, std::int64_t tail,
                                  const kv_strides& strides, int kv_head, int head_dim, float* to) noexcept {
  detail::scale_pair scales;
  if (plane.tail_floats > 0) {
    const char* const stored = static_cast<const char*>(base) + tail;
    __builtin_memcpy(&scales.scale, stored, sizeof(float));
    if (plane.tail_floats > 1) __builtin_memcpy(&scales.zero, stored + sizeof(float), sizeof(float));
  } else if (plane.static_scales != nullptr) {
    scales.scale = plane.static_scales[plane.scale_per_head ? kv_head : 0];
  }
  visit_dtype(plane.type, [&](auto traits) {
    using stored = typename decltype(traits)::storage;
    const stored* const row = static_cast<const stored*>(base) + offset;
    constexpr int at_once = 64;
    for (int d = 0; d < head_dim; d += at_once) {
      const int count = head_dim - d < at_once ? head_dim - d : at_once;
      if (strides.dim == 1 && strides.chunk >= head_dim) {
        decode_elements(row + d, count, scales, plane, to + d);
        continue;
      }
      stored elements[std::size_t{at_once}];
      int chunk = d / strides.chunk;
      int in_chunk = d - chunk * strides.chunk;
      for (int i = 0; i < count; ++i) {
        elements[i] = row[chunk * strides.chunk_stride + in_chunk * strides.dim];
        if (++in_chunk == strides.chunk) {
          in_chunk = 0;
          ++chunk;
        }
      }
      decode_elements(elements, count, scales, plane, to + d);
    }
  });
}

}  // namespace
}  // namespace bifolio::cpu::BIFOLIO_ISA

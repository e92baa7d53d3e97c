// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Rows of K or V of any code and layout, as float32 or, without their scales, as bfloat16; and the scales of a KV
/// tile. A branch per row or per tile chooses the code: the loops of attention are not compiled again for each.

#include "cpu/kernels/attention/kernels.hpp"
#include "cpu/kernels/attention/prefetch_queue.hpp"
#include "cpu/kernels/simd/code_widen.hpp"
#include "cpu/kernels/simd/storage_convert.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
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

/// Elements [dim, dim + count) of a row of any layout. `row` is its dim 0.
template <class Stored>
BIFOLIO_FORCE_INLINE void gather_elements(const Stored* row, const kv_strides& strides, int dim, int count,
                                          Stored* to) noexcept {
  int chunk = dim / strides.chunk;
  int in_chunk = dim - chunk * strides.chunk;
  for (int i = 0; i < count;) {
    const int left = strides.chunk - in_chunk;
    const int run = left < count - i ? left : count - i;
    const Stored* const from = row + chunk * strides.chunk_stride + in_chunk * strides.dim;
    if (strides.dim == 1) {
      __builtin_memcpy(static_cast<void*>(to + i), from, static_cast<std::size_t>(run) * sizeof(Stored));
    } else {
      for (int e = 0; e < run; ++e) to[i + e] = from[e * strides.dim];
    }
    i += run;
    in_chunk = 0;
    ++chunk;
  }
}

/// The first `head_dim` dims of a record: all, or those of V.
inline void decode_record(const std::byte* record, const coded_plane& plane, int head_dim, float* to) noexcept {
  for (int i = 0; i < kv_record::num_scales; ++i) {
    detail::scale_pair scales;
    __builtin_memcpy(&scales.scale, record + kv_record::scales_offset + i * static_cast<int>(sizeof(float)),
                     sizeof(float));
    const auto* const codes = reinterpret_cast<const float8_e4m3*>(record) + i * kv_record::dims_per_scale;
    decode_elements(codes, kv_record::dims_per_scale, scales, plane, to + i * kv_record::dims_per_scale);
  }
  if (head_dim == kv_record::v_head_dim) return;
  coded_plane rotated;
  rotated.type = dtype::bf16;
  decode_elements(reinterpret_cast<const bfloat16*>(record + kv_record::rotated_offset), kv_record::rotated_dims, {},
                  rotated, to + kv_record::v_head_dim);
}

/// The row whose dim 0 is `offset` elements, and whose scales, if it has its own, are `tail` bytes from the start of
/// the plane.
[[gnu::noinline]] void decode_row(const coded_plane& plane, const void* base, std::int64_t offset, std::int64_t tail,
                                  const kv_strides& strides, int kv_head, int head_dim, float* to) noexcept {
  if (plane.is_record) return decode_record(static_cast<const std::byte*>(base) + offset, plane, head_dim, to);
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
      gather_elements(row, strides, d, count, elements);
      decode_elements(elements, count, scales, plane, to + d);
    }
  });
}

/// Rows of codes as bfloat16 (code_widen.hpp): rows i of [begin, end), whose dim 0 is `offsets[i]` codes from `base`,
/// to `to + (i − begin) · stride`. Polls twice per row.
template <class Code>
BIFOLIO_FORCE_INLINE void widen_rows_of(const Code* base, const kv_strides& strides, int head_dim,
                                        const std::int64_t* offsets, int begin, int end, bfloat16* to,
                                        std::int64_t stride, prefetcher& prefetch) noexcept {
  const code_widener<Code> widener;
  prefetch_poller poller(prefetch);
  const bool has_runs = strides.dim == 1 && strides.chunk >= head_dim;
  for (int i = begin; i < end; ++i) {
    const Code* const row = base + offsets[i];
    bfloat16* const widened = to + (i - begin) * stride;
    poller.poll(2);
    if (has_runs) {
      widen_codes(widener, row, head_dim, widened);
      continue;
    }
    constexpr int at_once = 64;
    for (int d = 0; d < head_dim; d += at_once) {
      const int count = head_dim - d < at_once ? head_dim - d : at_once;
      Code codes[std::size_t{at_once}];
      gather_elements(row, strides, d, count, codes);
      widen_codes(widener, codes, count, widened + d);
    }
  }
}

[[gnu::noinline]] void widen_rows(dtype type, const void* base, std::int64_t head_offset, const kv_strides& strides,
                                  int head_dim, const std::int64_t* offsets, int begin, int end, bfloat16* to,
                                  std::int64_t stride, prefetcher& prefetch) noexcept {
  visit_dtype(type, [&](auto traits) {
    using code = typename decltype(traits)::storage;
    if constexpr (sizeof(code) == 1) {
      widen_rows_of(static_cast<const code*>(base) + head_offset, strides, head_dim, offsets, begin, end, to, stride,
                    prefetch);
    }
  });
}

/// Polls for a column of four dims of `lanes` keys.
inline constexpr int code_column_polls = 2;

/// Columns of `lanes` rows of codes and `dims` dims: four codes are a lane of 32 bits, whose halves are apart
/// (`transpose<true>`); `store_column(to, column)` gets a column of dims and its place in [columns][`stride`] at
/// `columns`.
template <class Rows, class StoreColumn>
BIFOLIO_FORCE_INLINE void transpose_code_columns(const Rows& rows, int dims, float* columns, int stride,
                                                 prefetcher& prefetch, const StoreColumn& store_column) noexcept {
  constexpr int step = lanes * 4;
  prefetch_poller poller(prefetch);
  int dim = 0;
  for (; dim + step <= dims; dim += step, columns += lanes * stride) {
    transpose<true>(
        [&](int i) __attribute__((always_inline)) { return load_bits(rows.at(i, dim)); },
        [&](int j, vf column) __attribute__((always_inline)) {
          store_column(columns + j * stride, column);
          if (j < lanes / 4) poller.poll(4 * code_column_polls);
        });
  }
  if (dim == dims) return;
  transpose<true>(
      [&](int i) __attribute__((always_inline)) { return load_first(rows.at(i, dim), dims - dim); },
      [&](int j, vf column) __attribute__((always_inline)) {
        if (dim + 4 * j >= dims) return;
        store_column(columns + j * stride, column);
        poller.poll(code_column_polls);
      });
}

/// keys[pair of dims][lane] of `lanes` rows of codes and `dims` dims, as pairs of bfloat16; keys [pairs][tile_keys].
/// Codes are widened after the transposition.
template <class Code, class Rows>
BIFOLIO_FORCE_INLINE void transpose_codes(const code_widener<Code>& widener, const Rows& rows, int dims, float* keys,
                                          prefetcher& prefetch) noexcept {
  transpose_code_columns(
      rows, dims, keys, 2 * tile_keys, prefetch, [&](float* to, vf column) __attribute__((always_inline)) {
        vf first;
        vf second;
        widen_quads(widener, column, first, second);
        store(to, first);
        store(to + tile_keys, second);
      });
}

/// The same without widening: keys [columns of four dims][tile_keys].
template <class Rows>
BIFOLIO_FORCE_INLINE void store_code_columns(const Rows& rows, int dims, float* keys, prefetcher& prefetch) noexcept {
  transpose_code_columns(
      rows, dims, keys, tile_keys,
      prefetch, [&](float* to, vf column) __attribute__((always_inline)) { store(to, column); });
}

/// Calls `body.operator()<Code>()` for the type of a code of eight bits.
template <class Body>
BIFOLIO_INLINE void with_code(dtype type, const Body& body) noexcept {
  visit_dtype(
      type, [&](auto traits) __attribute__((always_inline)) {
        using code = typename decltype(traits)::storage;
        if constexpr (sizeof(code) == 1) body.template operator()<code>();
      });
}

/// Whether rows of K of this many dims can be transposed before they are widened.
[[nodiscard]] constexpr bool transposes_codes(dtype type, int head_dim) noexcept {
  if (head_dim % 4 != 0) return false;
  return visit_dtype(type, [](auto traits) {
    using code = typename decltype(traits)::storage;
    if constexpr (sizeof(code) == 1) return widens_quads<code>;
    return false;
  });
}

/// What the keys of a KV tile multiply and add, where a plane has scales per token; 0 for keys that are not in the
/// tile. An element of bfloat16 e stands for e · scale + zero.
struct tile_scales {
  alignas(64) float scale[tile_keys];
  alignas(64) float zero[tile_keys];  // set if the plane has zero points
};

/// `tails`: bytes from `base` to the scales of each key; `uniform`: of each `lanes` keys, whether they are adjacent.
inline void read_scales(const coded_plane& plane, const void* base, std::int64_t head_offset, const std::int64_t* tails,
                        const bool* uniform, int begin, int end, tile_scales& to) noexcept {
  const char* const first = static_cast<const char*>(base) + head_offset;
  const bool has_zeros = plane.tail_floats > 1;
  const bool adjacent = plane.tail.token == static_cast<std::int64_t>(sizeof(float)) * plane.tail_floats;
  for (int column = 0; column < tile_keys; column += lanes) {
    if (adjacent && uniform[column / lanes]) {
      if (!has_zeros) {
        store(to.scale + column, load_bits(first + tails[column]));
        continue;
      }
      float stored[std::size_t{2 * lanes}];
      __builtin_memcpy(stored, first + tails[column], sizeof(stored));
      for (int i = 0; i < lanes; ++i) {
        to.scale[column + i] = stored[2 * i];
        to.zero[column + i] = stored[2 * i + 1] + unsigned_center * stored[2 * i];
      }
      continue;
    }
    for (int key = column; key < column + lanes; ++key) {
      float stored[2] = {0.0f, 0.0f};
      const bool is_visible = key >= begin && key < end;
      if (is_visible) {
        __builtin_memcpy(stored, first + tails[key], sizeof(float) * (has_zeros ? std::size_t{2} : std::size_t{1}));
      }
      to.scale[key] = stored[0];
      if (has_zeros) to.zero[key] = stored[1] + unsigned_center * stored[0];
    }
  }
}

/// Zero points of V for probabilities that are rounded after they met the scale: what a key adds to all dims is
/// p · zero + rounded · ratio, so that the rounding's error is one of the key's values, not of their distance from the
/// middle of its codes. `ratios`: of the even keys of each 2·lanes, then of the odd ones; 0, and `scales.zero` kept,
/// where the scale is 0, else `scales.zero` becomes 0.
inline void divide_zeros(tile_scales& scales, float* ratios) noexcept {
  const vf none(0.0f);
  for (int first = 0; first < tile_keys; first += 2 * lanes) {
    alignas(64) float in_order[std::size_t{2 * lanes}];
    for (int column = 0; column < 2 * lanes; column += lanes) {
      const vf scale = load(scales.scale + first + column);
      const vf zero = load(scales.zero + first + column);
      store(in_order + column, select(scale == none, none, zero / scale));
      store(scales.zero + first + column, select(scale == none, zero, none));
    }
    for (int i = 0; i < lanes; ++i) {
      ratios[first + i] = in_order[2 * i];
      ratios[first + lanes + i] = in_order[2 * i + 1];
    }
  }
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

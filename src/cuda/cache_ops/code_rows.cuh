// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Rows of planes with codes, and rows of tensors, which are planes like any other: lane_dims dims of a token and head
/// at a time, as float32 in registers. The element type is looked at per row.

#include <algorithm>
#include <bifolio/dtype.hpp>
#include <bifolio/kv_layout.hpp>
#include <cstdint>

#include "common/base/kv_code.hpp"
#include "cuda/cache_ops/transfer.hpp"
#include "cuda/device/codes.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/paged.cuh"
#include "cuda/host/code_scales.hpp"

namespace bifolio::inline v0_2::cuda {

inline constexpr int lane_dims = 8;  // dims that a thread takes at a time

/// One side of a plane: rows of tensors are block 0 of a plane with a slot for each.
struct code_side {
  void* base = nullptr;
  kv_strides strides;
  dtype type = dtype::f32;
  bool is_packed = false;  ///< eight dims can be accessed at once; of records: 16 bytes
  bool is_record = false;
  code_scales scales;

  [[nodiscard]] __device__ __forceinline__ bool is_scaled() const {
    return scales.tail_floats > 0 || scales.static_scales != nullptr;
  }
};

/// One row, as addresses.
struct code_row {
  unsigned char* data;
  float* tail;
  detail::scale_pair scales;

  __device__ __forceinline__ code_row(const code_side& side, std::int64_t block, std::int64_t token,
                                      std::int32_t head) {
    const auto element = static_cast<std::int64_t>(element_bytes(side.type));
    auto* const start = static_cast<unsigned char*>(side.base) + block * side.strides.block * element;
    data = start + (token * side.strides.token + head * side.strides.head) * element;
    tail = nullptr;
    if (side.scales.tail_floats > 0) {
      const kv_tail_strides& t = side.scales.tail;
      tail = reinterpret_cast<float*>(start + t.offset + head * t.head + token * t.token);
    } else if (side.scales.static_scales != nullptr) {
      scales.scale = side.scales.static_scales[head * side.scales.static_step];
    }
  }
};

/// Dims [dim, dim + lane_dims) of a row that has `head_dim`, those past the end 0.
__device__ __forceinline__ void load_values(const code_side& side, const code_row& row, std::int32_t head_dim,
                                            std::int32_t dim, float (&values)[lane_dims]) {
  visit_dtype(side.type, [&](auto traits) {
    using stored = typename decltype(traits)::storage;
    const auto* const data = reinterpret_cast<const stored*>(row.data);
    if (side.is_packed && dim < head_dim) {
      const packed<stored, lane_dims> elements = load_run<lane_dims>(data + dim_offset(side.strides, head_dim, dim));
#pragma unroll
      for (int i = 0; i < lane_dims; ++i) values[i] = convert<float>(elements.values[i]);
      return;
    }
#pragma unroll
    for (int i = 0; i < lane_dims; ++i) {
      values[i] = dim + i < head_dim ? convert<float>(data[dim_offset(side.strides, head_dim, dim + i)]) : 0.0f;
    }
  });
  if (!side.is_scaled()) return;
#pragma unroll
  for (int i = 0; i < lane_dims; ++i) values[i] = decoded(values[i], row.scales, side.scales.tail_floats > 1);
}

/// Dims [dim, dim + Count), those past the end left out. Only lane_dims of them are stored at once.
template <int Count>
__device__ __forceinline__ void store_values(const code_side& side, const code_row& row, std::int32_t head_dim,
                                             std::int32_t dim, const detail::encoding& how, float (&values)[Count]) {
  if (dim >= head_dim) return;
  if (side.is_scaled()) {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const float shifted = side.scales.tail_floats > 1 ? __fsub_rn(values[i], how.stored.zero) : values[i];
      values[i] = how.inverse == 0.0f ? 0.0f : __fmul_rn(shifted, how.inverse);
    }
  }
  visit_dtype(side.type, [&](auto traits) {
    using stored = typename decltype(traits)::storage;
    auto* const data = reinterpret_cast<stored*>(row.data);
    if constexpr (Count == lane_dims) {
      if (side.is_packed) {
        packed<stored, Count> elements;
#pragma unroll
        for (int i = 0; i < Count; ++i) elements.values[i] = narrow<stored>(values[i]);
        *reinterpret_cast<packed<stored, Count>*>(data + dim_offset(side.strides, head_dim, dim)) = elements;
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      if (dim + i < head_dim) data[dim_offset(side.strides, head_dim, dim + i)] = narrow<stored>(values[i]);
    }
  });
}

template <int Count>
__device__ __forceinline__ void measure(const float (&values)[Count], std::int32_t count, detail::dim_range& range) {
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    if (i >= count) continue;
    range.least = fminf(range.least, values[i]);
    range.most = fmaxf(range.most, values[i]);
    range.magnitude = fmaxf(range.magnitude, fabsf(values[i]));
    range.finite = range.finite && (__float_as_uint(values[i]) & 0x7fffffffu) < 0x7f800000u;
  }
}

/// Over the `lanes` threads of a row, which are `members` of their warp.
__device__ __forceinline__ void reduce(detail::dim_range& range, int lanes, std::uint32_t members) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    if (mask >= lanes) continue;
    range.least = fminf(range.least, __shfl_xor_sync(members, range.least, mask));
    range.most = fmaxf(range.most, __shfl_xor_sync(members, range.most, mask));
    range.magnitude = fmaxf(range.magnitude, __shfl_xor_sync(members, range.magnitude, mask));
    range.finite = __shfl_xor_sync(members, static_cast<int>(range.finite), mask) != 0 && range.finite;
  }
}

/// Whether runs of lane_dims dims are contiguous and aligned to their bytes, up to 16.
inline bool is_packed(const void* base, const kv_strides& s, std::int32_t head_dim, dtype type) noexcept {
  const auto element = static_cast<std::int64_t>(size_of(type));
  const std::int64_t run = std::min<std::int64_t>(lane_dims * element, 16);
  const auto steps_in_runs = [&](std::int64_t step) { return step * element % run == 0; };
  return s.dim == 1 && s.chunk % lane_dims == 0 && head_dim % lane_dims == 0 && steps_in_runs(s.block) &&
         steps_in_runs(s.head) && steps_in_runs(s.token) && (s.chunk >= head_dim || steps_in_runs(s.chunk_stride)) &&
         reinterpret_cast<std::uintptr_t>(base) % static_cast<std::uintptr_t>(run) == 0;
}

/// Whether records begin at multiples of 16 bytes.
inline bool has_aligned_records(const void* base, const kv_strides& s) noexcept {
  return s.block % 16 == 0 && s.head % 16 == 0 && s.token % 16 == 0 && reinterpret_cast<std::uintptr_t>(base) % 16 == 0;
}

[[nodiscard]] inline code_side side_of(const void* base, const kv_plane& plane, const float* static_scales) noexcept {
  const bool is_record = plane.code.is_record();
  return {const_cast<void*>(base),
          plane.strides,
          plane.code.type,
          is_record ? has_aligned_records(base, plane.strides)
                    : is_packed(base, plane.strides, plane.head_dim, plane.code.type),
          is_record,
          code_scales::of(plane, static_scales)};
}

[[nodiscard]] inline code_side side_of(const transfer_plane& rows, dtype type) noexcept {
  const kv_strides strides{.block = 0,
                           .head = rows.row_head_stride,
                           .token = rows.row_token_stride,
                           .dim = 1,
                           .chunk_stride = rows.head_dim,
                           .chunk = rows.head_dim};
  return {rows.row, strides, type, is_packed(rows.row, strides, rows.head_dim, type), false, {}};
}

}  // namespace bifolio::inline v0_2::cuda

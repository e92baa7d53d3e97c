// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a CTA of the general kernel has in shared memory, and the loads that fill it: queries, and tiles of K and V as
/// float32 from planes of any type, strides and code.

#include <cstdint>

#include "common/attention/visibility.hpp"
#include "cuda/attention/general/items.hpp"
#include "cuda/device/codes.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/paged.cuh"
#include "cuda/device/records.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/host/kernel_args.hpp"

namespace bifolio::inline v0_2::cuda {

inline constexpr int general_threads = 128;
inline constexpr int general_keys = 64;                   // positions of a tile
inline constexpr int general_round = 128;                 // dims in shared memory at once
inline constexpr int general_kv_row = general_round + 4;  // floats; shifts neighbouring positions by four banks

/// In the place of an element type: K and V of any codes, but for records; and records.
struct any_code {};
struct records {};

/// How one plane is loaded.
enum class load_mode : std::int32_t {
  vectorised,      ///< 16 bytes of dims at a time
  strided_dims,    ///< single elements, dims fastest
  strided_tokens,  ///< single elements, positions fastest
};

struct general_args {
  attention_kernel_args call;
  general_metadata metadata;
  load_mode k_mode;
  load_mode v_mode;
  std::int32_t num_dim_tiles;
};

/// Mask sentinel, the score of a masked position: a NaN that no arithmetic makes.
inline constexpr int mask_sentinel = 0x7fedc0de;

template <int Rows>
struct general_shared {
  static constexpr int weight_row = Rows + 4;  // floats, whole float4
  float k[general_keys][general_kv_row];
  float v[general_keys][general_kv_row];
  float q[Rows][dims_per_tile];             // this round's queries, or all of them when head_dim fits
  float weights[general_keys][weight_row];  // scores, then probabilities
  std::int64_t k_offset[general_keys];
  std::int64_t v_offset[general_keys];
  detail::scale_pair k_scale[general_keys];  // of planes with codes
  detail::scale_pair v_scale[general_keys];
  float m[Rows], l[Rows];              // of the split under way
  float rescale[Rows];                 // factor of what is accumulated
  float total_m[Rows], total_l[Rows];  // of the splits before it
  attn::combine_weights<float> combine[Rows];
  attn::row_epilogue<float> finish[Rows];
  std::int32_t row_position[Rows];  // a row attends to positions [row_begin, row_end)
  std::int32_t row_begin[Rows];
  std::int32_t row_end[Rows];
  float row_slope[Rows];
  std::int64_t row_bias[Rows];  // elements from the start of the bias
  std::uint32_t arrived;
  // Written by thread 0; here they take no registers.
  tile_walk tiles;
  general_item item;
  bool has_item;
};

/// Rows `num_rows` × dims of q as float32.
template <int Rows>
__device__ __forceinline__ void load_queries(general_shared<Rows>& shared, const attention_kernel_args& call,
                                             std::int64_t first_token, std::int32_t first_row, std::int32_t num_rows,
                                             std::int32_t kv_head, std::int32_t first_dim, std::int32_t num_dims) {
  for (std::int32_t i = threadIdx.x; i < Rows * num_dims; i += general_threads) {
    const std::int32_t r = i / num_dims;
    const std::int32_t d = i - r * num_dims;
    float value = 0.0f;
    if (r < num_rows) {
      const std::int32_t row = first_row + r;
      const std::int64_t token = first_token + row / call.group_size;
      const std::int64_t head = static_cast<std::int64_t>(kv_head) * call.group_size + row % call.group_size;
      value =
          load_as_float(call.q, token * call.q_token_stride + head * call.q_head_stride + first_dim + d, call.q_type);
    }
    shared.q[r][d] = value;
  }
}

/// `general_keys` positions × `general_round` dims of one plane to shared memory; zero where there is nothing to read.
template <class T>
__device__ __forceinline__ void load_plane(float (*tile)[general_kv_row], const void* base, const kv_strides& strides,
                                           load_mode mode, const std::int64_t* offsets, std::int32_t head_dim,
                                           std::int32_t first_dim) {
  const T* const data = static_cast<const T*>(base);
  if (mode == load_mode::vectorised) {
    constexpr int count = 16 / sizeof(T);
    constexpr int per_key = general_round / count;
    constexpr int rounds = general_keys * per_key / general_threads;
    constexpr int at_once = rounds < 8 ? rounds : 8;
    const int dim = static_cast<int>(threadIdx.x) % per_key * count;
    const bool dim_there = first_dim + dim < head_dim;
    const T* const mine = data + (dim_there ? dim_offset(strides, head_dim, first_dim + dim) : 0);
#pragma unroll
    for (int outer = 0; outer < rounds; outer += at_once) {
      uint4 held[at_once];
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        const int key = ((outer + i) * general_threads + static_cast<int>(threadIdx.x)) / per_key;
        const std::int64_t offset = offsets[key];
        held[i] = load_16_if(mine + offset, dim_there && offset >= 0);
      }
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        const int key = ((outer + i) * general_threads + static_cast<int>(threadIdx.x)) / per_key;
        const unpacked<T> elements(held[i]);
#pragma unroll
        for (int e = 0; e < count; e += 4) {
          *reinterpret_cast<float4*>(&tile[key][dim + e]) =
              make_float4(elements.values[e], elements.values[e + 1], elements.values[e + 2], elements.values[e + 3]);
        }
      }
    }
  } else {
#pragma unroll 8
    for (int item = threadIdx.x; item < general_keys * general_round; item += general_threads) {
      const int key = mode == load_mode::strided_tokens ? item % general_keys : item / general_round;
      const int dim = mode == load_mode::strided_tokens ? item / general_keys : item % general_round;
      const std::int64_t offset = offsets[key];
      float value = 0.0f;
      if (offset >= 0 && first_dim + dim < head_dim) {
        value = widen(data[offset + dim_offset(strides, head_dim, first_dim + dim)]);
      }
      tile[key][dim] = value;
    }
  }
}

/// The scales of one key of a KV head in a block.
__device__ __forceinline__ detail::scale_pair scales_of(const code_scales& code, const void* plane,
                                                        const kv_strides& strides, std::int64_t block,
                                                        std::int32_t kv_head, std::int32_t token) {
  detail::scale_pair scales;
  if (code.tail_floats > 0) {  // codes with tails are of one byte
    const auto* const start = static_cast<const unsigned char*>(plane) + block * strides.block;
    const auto* const stored =
        reinterpret_cast<const float*>(start + code.tail.offset + kv_head * code.tail.head + token * code.tail.token);
    scales.scale = stored[0];
    if (code.tail_floats > 1) scales.zero = stored[1];
  } else if (code.static_scales != nullptr) {
    scales.scale = code.static_scales[kv_head * code.static_step];
  }
  return scales;
}

/// The same as `load_plane` for a plane of any code: values from elements and the scales of their positions.
__device__ __forceinline__ void load_coded_plane(float (*tile)[general_kv_row], const void* base, dtype type,
                                                 const code_scales& code, const kv_strides& strides, load_mode mode,
                                                 const std::int64_t* offsets, const detail::scale_pair* scales,
                                                 std::int32_t head_dim, std::int32_t first_dim) {
  visit_dtype(type, [&](auto traits) {
    load_plane<typename decltype(traits)::storage>(tile, base, strides, mode, offsets, head_dim, first_dim);
  });
  if (code.tail_floats == 0 && code.static_scales == nullptr) return;
  // Each thread scales what it has loaded itself.
  const bool has_zero = code.tail_floats > 1;
  const auto scale_one = [&](int key, int dim) {
    if (offsets[key] >= 0) tile[key][dim] = decoded(tile[key][dim], scales[key], has_zero);
  };
  if (mode == load_mode::vectorised) {
    constexpr int count = 16;  // elements with scales are of one byte
    constexpr int per_key = general_round / count;
    for (int item = threadIdx.x; item < general_keys * per_key; item += general_threads) {
#pragma unroll
      for (int e = 0; e < count; ++e) scale_one(item / per_key, item % per_key * count + e);
    }
  } else {
    for (int item = threadIdx.x; item < general_keys * general_round; item += general_threads) {
      scale_one(mode == load_mode::strided_tokens ? item % general_keys : item / general_round,
                mode == load_mode::strided_tokens ? item / general_keys : item % general_round);
    }
  }
}

/// The same for records: `offsets` are those of records, and all dims from `first_dim` on, a multiple of
/// general_round, share a scale or are rotated ones.
__device__ __forceinline__ void load_records(float (*tile)[general_kv_row], const void* base, load_mode mode,
                                             const std::int64_t* offsets, std::int32_t first_dim) {
  static_assert(general_round == kv_record::dims_per_scale);
  constexpr int record_run = 8;  // rotated dims of 16 bytes
  const auto* const start = static_cast<const unsigned char*>(base);
  if (first_dim >= kv_record::v_head_dim) {
    constexpr int per_key = general_round / record_run;  // the second half is zero
    for (int item = threadIdx.x; item < general_keys * per_key; item += general_threads) {
      const int key = item / per_key;
      const int dim = item % per_key * record_run;
      const bool is_there = offsets[key] >= 0 && dim < kv_record::rotated_dims;
      float* const to = &tile[key][dim];
      if (!is_there) {
#pragma unroll
        for (int e = 0; e < record_run; ++e) to[e] = 0.0f;
        continue;
      }
      const unpacked<bfloat16> values(
          load_record_16(start + offsets[key], kv_record::rotated_offset + dim * 2, mode == load_mode::vectorised));
#pragma unroll
      for (int e = 0; e < record_run; ++e) to[e] = decoded(values.values[e], {}, false);
    }
    return;
  }
  constexpr int count = 16;
  constexpr int per_key = general_round / count;
  constexpr int rounds = general_keys * per_key / general_threads;
  const int dim = static_cast<int>(threadIdx.x) % per_key * count;
  uint4 held[rounds];
  detail::scale_pair scales[rounds];
#pragma unroll
  for (int i = 0; i < rounds; ++i) {
    const std::int64_t offset = offsets[(i * general_threads + static_cast<int>(threadIdx.x)) / per_key];
    if (mode == load_mode::vectorised) {
      held[i] = load_16_if(start + offset + first_dim + dim, offset >= 0);
    } else {
      held[i] = offset < 0 ? make_uint4(0, 0, 0, 0) : load_record_16(start + offset, first_dim + dim, false);
    }
    if (offset >= 0) scales[i].scale = record_scale(start + offset, first_dim);
  }
#pragma unroll
  for (int i = 0; i < rounds; ++i) {
    const int key = (i * general_threads + static_cast<int>(threadIdx.x)) / per_key;
    const unpacked<float8_e4m3> codes(held[i]);
#pragma unroll
    for (int e = 0; e < count; ++e) tile[key][dim + e] = decoded(codes.values[e], scales[i], false);
  }
}

template <class T, int Rows>
__device__ __forceinline__ void load_k(general_shared<Rows>& shared, const attention_kernel_args& call, load_mode mode,
                                       std::int32_t first_dim) {
  if constexpr (__is_same(T, records)) {
    load_records(shared.k, call.k, mode, shared.k_offset, first_dim);
  } else if constexpr (__is_same(T, any_code)) {
    load_coded_plane(shared.k, call.k, call.k_type, call.k_scales, call.k_strides, mode, shared.k_offset,
                     shared.k_scale, call.head_dim, first_dim);
  } else {
    load_plane<T>(shared.k, call.k, call.k_strides, mode, shared.k_offset, call.head_dim, first_dim);
  }
}
template <class T, int Rows>
__device__ __forceinline__ void load_v(general_shared<Rows>& shared, const attention_kernel_args& call, load_mode mode,
                                       std::int32_t first_dim) {
  if constexpr (__is_same(T, records)) {
    load_records(shared.v, call.v, mode, shared.v_offset, first_dim);
  } else if constexpr (__is_same(T, any_code)) {
    load_coded_plane(shared.v, call.v, call.v_type, call.v_scales, call.v_strides, mode, shared.v_offset,
                     shared.v_scale, call.v_head_dim, first_dim);
  } else {
    load_plane<T>(shared.v, call.v, call.v_strides, mode, shared.v_offset, call.v_head_dim, first_dim);
  }
}

}  // namespace bifolio::inline v0_2::cuda

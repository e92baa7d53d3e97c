// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What rotate_append does with rows of k whose cache holds records: dims in runs of Width, which share a scale.

#include <bifolio/kv_layout.hpp>
#include <cstdint>

#include "common/base/kv_code.hpp"
#include "cuda/cache_ops/code_packs.cuh"
#include "cuda/cache_ops/rotate_units.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/records.cuh"
#include "cuda/device/softmax.cuh"

namespace bifolio::inline v0_2::cuda {

/// The scales of a record, from the runs of all lanes of its row.
class record_scales {
 public:
  template <int Width>
  __device__ __forceinline__ void take(const float (&values)[Width], std::int32_t dim) {
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < Width; ++i) largest = max(largest, magnitude_of(values[i]));
#pragma unroll
    for (int i = 0; i < kv_record::num_scales; ++i) {
      magnitudes_[i] = max(magnitudes_[i], dim / kv_record::dims_per_scale == i ? largest : 0u);
    }
  }
  /// After all runs have been taken: the `lanes` threads of `members` get the same scales.
  __device__ __forceinline__ void finish(int lanes, std::uint32_t members) {
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
#pragma unroll
      for (int i = 0; i < kv_record::num_scales; ++i) {
        magnitudes_[i] = max(magnitudes_[i], __shfl_xor_sync(members, magnitudes_[i], mask));
      }
    }
#pragma unroll
    for (int i = 0; i < kv_record::num_scales; ++i) {
      detail::dim_range range;
      range.finite = magnitudes_[i] < 0x7f800000u;
      range.magnitude = __uint_as_float(magnitudes_[i]);
      encodings_[i] = detail::encode_record_dims<device_math>(range);
    }
  }
  __device__ __forceinline__ void store(unsigned char* record) const {
#pragma unroll
    for (int i = 0; i < kv_record::num_scales; ++i) {
      reinterpret_cast<float*>(record + kv_record::scales_offset)[i] = encodings_[i].stored.scale;
    }
  }
  [[nodiscard]] __device__ __forceinline__ float inverse(std::int32_t dim) const {
    float of_dim = 0;
#pragma unroll
    for (int i = 0; i < kv_record::num_scales; ++i) {
      of_dim = dim / kv_record::dims_per_scale == i ? encodings_[i].inverse : of_dim;
    }
    return of_dim;
  }

 private:
  std::uint32_t magnitudes_[kv_record::num_scales] = {};
  detail::encoding encodings_[kv_record::num_scales];
};

/// Dims [dim, dim + Width) to their place, which is a multiple of 4 bytes where there are eight.
template <int Width>
__device__ __forceinline__ void store_record_run(unsigned char* record, const record_scales& scales, std::int32_t dim,
                                                 const float (&values)[Width]) {
  if (dim >= kv_record::v_head_dim) {
    unsigned char* const rotated = record + kv_record::rotated_offset + (dim - kv_record::v_head_dim) * 2;
    if constexpr (Width == 1) {
      *reinterpret_cast<bfloat16*>(rotated) = narrow<bfloat16>(one_nan(values[0]));
    } else {
      auto* const to = reinterpret_cast<std::uint32_t*>(rotated);
      std::uint32_t words[Width / 2];
      pack_halves<bfloat16>(values, words);
#pragma unroll
      for (int i = 0; i < Width / 2; ++i) to[i] = words[i];
    }
    return;
  }
  const float inverse = scales.inverse(dim);
  float scaled[Width];
#pragma unroll
  for (int i = 0; i < Width; ++i) scaled[i] = inverse == 0.0f ? 0.0f : __fmul_rn(values[i], inverse);
  if constexpr (Width == 1) {
    *reinterpret_cast<float8_e4m3*>(record + dim) = narrow<float8_e4m3>(scaled[0]);
  } else {
    auto* const to = reinterpret_cast<std::uint32_t*>(record + dim);
    std::uint32_t words[Width / 4];
    pack_codes<e4m3_code, true>(scaled, words);
#pragma unroll
    for (int i = 0; i < Width / 4; ++i) to[i] = words[i];
  }
}

}  // namespace bifolio::inline v0_2::cuda

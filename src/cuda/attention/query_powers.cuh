// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Queries of bfloat16 as float16, in which codes of K are multiplied. A power of two takes the largest magnitude of a
/// row to [1, 2): then it loses nothing but what is below 2^-14 of that. Scores of the row lack the power.

#include <cstdint>

#include "cuda/device/float16_types.cuh"

namespace bifolio::inline v0_2::cuda {

/// Of one row.
struct query_power {
  std::uint32_t exponent = 127;  // biased, from 1 to 253

  query_power() = default;
  /// `largest`: bits of the row's largest magnitude. Rows with an infinity or a NaN stay as they are.
  __device__ __forceinline__ explicit query_power(std::uint32_t largest) {
    const std::uint32_t field = largest >> 7;
    exponent = field == 255 ? 127 : min(max(field, 1u), 253u);
  }
  [[nodiscard]] __device__ __forceinline__ float value() const { return __uint_as_float(exponent << 23); }

  /// Two elements of bfloat16 over the power, in float16.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t divide(std::uint32_t pair) const {
    const float inverse = __uint_as_float((254 - exponent) << 23);
    return device::pack<__half>(__uint_as_float(pair << 16) * inverse, __uint_as_float(pair & 0xffff0000u) * inverse);
  }
};

/// Bits of the largest magnitude of two elements and of `largest`.
[[nodiscard]] __device__ __forceinline__ std::uint32_t larger_magnitude(std::uint32_t largest, std::uint32_t pair) {
  return max(largest, max(pair & 0x7fffu, pair >> 16 & 0x7fffu));
}

}  // namespace bifolio::inline v0_2::cuda

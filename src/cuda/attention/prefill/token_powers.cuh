// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Rows of K or V of bfloat16 as float16, beside codes. A power of two takes the largest finite magnitude of a token's
/// row to [2^14, 2^15): then the row loses nothing but what is below 2^-29 of that, at most 2^-39 of it an element. The
/// power is the token's scale. Infinities and NaN stay what they are.

#include <cstdint>

#include "cuda/attention/query_powers.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// `largest`: bits of that magnitude.
[[nodiscard]] __device__ __forceinline__ query_power power_of_token(std::uint32_t largest) {
  query_power power;
  power.exponent = max(largest >> 7, 15u) - 14;
  return power;
}

/// Of two pairs of bfloat16, element by element, the larger magnitude, with any sign; a NaN is less than all.
[[nodiscard]] __device__ __forceinline__ std::uint32_t larger_magnitudes(std::uint32_t a, std::uint32_t b) {
  std::uint32_t larger;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;\n" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

}  // namespace bifolio::inline v0_2::cuda::prefill

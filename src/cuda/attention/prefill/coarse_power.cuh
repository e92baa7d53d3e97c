// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Powers of queries that are mostly the same for all rows, for prefill with scales per token: K's scales have the
/// usual one in them.

#include <cstdint>

#include "cuda/attention/query_powers.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// Of one row: takes the largest magnitude to [1, 2^16), and is 2^-8 for all from 2^-8 to 2^8. Float16 then loses what
/// is below 2^-25 in absolute terms, which is no more of the largest magnitude than with query_power.
struct coarse_power : query_power {
  static constexpr std::uint32_t usual = 119;  // biased

  /// Rows of zeros have the usual one.
  __device__ __forceinline__ explicit coarse_power(std::uint32_t largest) {
    const std::uint32_t field = largest >> 7;
    if (field == 255) return;  // stays as it is
    exponent = largest == 0 ? usual : min(max((field + 9) / 16 * 16, 10u) - 9, 245u);
  }
  /// Over the usual one.
  [[nodiscard]] __device__ __forceinline__ float value() const {
    return __uint_as_float((exponent + (127 - usual)) << 23);
  }
  [[nodiscard]] static __device__ __forceinline__ float usual_value() { return __uint_as_float(usual << 23); }
};

}  // namespace bifolio::inline v0_2::cuda::prefill

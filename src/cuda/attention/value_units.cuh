// SPDX-License-Identifier: Apache-2.0
#pragma once

/// V's scales per token in what a row accumulates. Outputs are in units of a power of two per row, the one that the
/// largest scale of a visible token has: probabilities times scales then stay in float16's range.

#include <cstdint>

namespace bifolio::inline v0_2::cuda {

/// Of a thread's two rows.
struct value_units {
  std::uint32_t exponent[2];  // of the units, biased: from 1 to 253, and that of 1 without scales

  __device__ __forceinline__ void clear(bool has_scales) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      exponent[i] = has_scales ? 1 : 127;
    }
  }
  [[nodiscard]] __device__ __forceinline__ float unit(int i) const { return __uint_as_float(exponent[i] << 23); }
  [[nodiscard]] __device__ __forceinline__ float inverse_unit(int i) const {
    return __uint_as_float((254 - exponent[i]) << 23);
  }
  /// Takes the unit of a scale if it is larger. Returns the old one over the new one.
  [[nodiscard]] __device__ __forceinline__ float raise(int i, float scale) {
    const std::uint32_t to = max(exponent[i], exponent_of(scale));
    const std::uint32_t by = to - exponent[i];
    exponent[i] = to;
    return by > 126 ? 0.0f : __uint_as_float((127 - by) << 23);
  }
  /// Magnitudes from here on ask for a larger unit.
  [[nodiscard]] __device__ __forceinline__ float limit(int i) const { return __uint_as_float((exponent[i] + 1) << 23); }
  /// The exponent of the unit that a magnitude asks for; an infinity asks for none.
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t exponent_of(float magnitude) {
    const std::uint32_t field = __float_as_uint(magnitude) >> 23;
    return field >= 255 ? 1 : min(max(field, 1u), 253u);
  }
};

}  // namespace bifolio::inline v0_2::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Heads of q and k on their way to where they are stored: float32 values in, float32 values out. The arithmetic is
/// that of rotate_append.hpp.

#include <cstdint>

namespace bifolio::inline v0_2::cpu {

/// What is done to the heads of one token. Values, table and weights do not overlap.
struct head_rotation {
  std::int32_t head_dim = 0;
  std::int32_t rotary_dim = 0;
  std::int32_t rotary_offset = 0;
  bool neighbours = false;         ///< pairs are (2i, 2i + 1), not halves
  const float* cosines = nullptr;  ///< [rotary_dim / 2]
  const float* sines = nullptr;    ///< [rotary_dim / 2]
  const float* weights = nullptr;  ///< [head_dim]; null: no norm
  float epsilon = 0;
};

struct rotate_kernels {
  /// Norm, rotation and the one NaN, in place.
  void (*head)(float* values, const head_rotation& how) noexcept;
  /// One position per pair: to[i] = table[rows[axes[i]] + i].
  void (*gather_pairs)(float* to, const float* table, const std::int64_t* rows, const std::uint8_t* axes,
                       std::int32_t count) noexcept;
};

}  // namespace bifolio::inline v0_2::cpu

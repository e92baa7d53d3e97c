// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the latent kernels and their planner share beside prefill's records: tile sizes.

#include <cstdint>

#include "cuda/attention/prefill/metadata.hpp"

namespace bifolio::inline v0_2::cuda {

inline constexpr std::int32_t latent_qk_dims = 576;
inline constexpr std::int32_t latent_v_dims = 512;
inline constexpr std::int32_t latent_tile_keys = 64;
inline constexpr std::int32_t latent_tile_rows = prefill_warpgroup_rows;
/// Steps whose sequences have no more rows each take a kernel of their own.
inline constexpr std::int32_t latent_few_rows = 16;
/// More would read the same keys too often.
inline constexpr std::int32_t latent_max_head_tiles = 8;

/// Heads of a row tile; 0: the heads do not divide into few enough tiles.
[[nodiscard]] constexpr std::int32_t latent_packed_heads(std::int32_t num_q_heads) noexcept {
  for (std::int32_t tiles = 1; tiles <= latent_max_head_tiles; ++tiles) {
    if (num_q_heads % tiles == 0 && num_q_heads / tiles <= latent_tile_rows) return num_q_heads / tiles;
  }
  return 0;
}

}  // namespace bifolio::inline v0_2::cuda

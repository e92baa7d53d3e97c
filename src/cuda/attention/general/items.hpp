// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the general attention kernel reads of a plan, shared by host and device.

#include <cstdint>

namespace bifolio::cuda {

/// Positions of one split, counted from position 0 of the sequence.
inline constexpr std::int32_t split_positions = 512;
/// Output dims of one thread block; a head of more is cut into several, each of which computes the scores again.
inline constexpr std::int32_t dims_per_tile = 256;
/// Row tiles that the kernel is compiled for.
inline constexpr std::int32_t few_rows = 4;
inline constexpr std::int32_t many_rows = 16;

/// One thread block's work, for each KV head and dim tile. A sequence's rows are (token, head of the group), the head
/// fastest.
struct general_item {
  std::int32_t seq;
  std::int32_t first_row;
  std::int32_t first_split;
  std::int32_t num_splits;  ///< 0: nothing is visible
  /// Tile whose splits are items of their own, numbered from 0; −1: this item is the whole tile.
  std::int32_t tile;
  std::int32_t partial;        ///< number of this item's partial result
  std::int32_t first_partial;  ///< that of the tile's first split
  std::int32_t num_partials;
};
static_assert(sizeof(general_item) == 32);

/// First words of a plan on the device; the items follow.
struct general_header {
  std::int32_t num_items;
  std::int32_t unused[7];
};
static_assert(sizeof(general_header) == 32);

/// Floats of one partial result, for one KV head and dim tile: m [rows], l [rows], then the accumulators [rows, dims].
[[nodiscard]] constexpr std::int64_t partial_floats(std::int32_t rows_per_tile, std::int32_t v_head_dim) noexcept {
  const std::int32_t dims = v_head_dim < dims_per_tile ? (v_head_dim + 3) / 4 * 4 : dims_per_tile;
  return static_cast<std::int64_t>(rows_per_tile) * (dims + 2);
}

}  // namespace bifolio::cuda

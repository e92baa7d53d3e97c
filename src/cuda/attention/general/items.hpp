// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the general attention kernel reads of a plan, shared by host and device.

#include <cstdint>

#include "common/attention/visibility.hpp"
#include "cuda/host/kernel_args.hpp"

namespace bifolio::inline v0_2::cuda {

/// Positions of one split, counted from position 0 of the sequence.
inline constexpr std::int32_t split_positions = 512;
/// Output dims of one CTA; a head of more is split into several, each of which computes the scores again.
inline constexpr std::int32_t dims_per_tile = 256;
/// Row tiles that the kernel is compiled for.
inline constexpr std::int32_t few_rows = 4;
inline constexpr std::int32_t many_rows = 16;

/// One CTA's work, for each KV head and dim tile. A sequence's rows are (token, head of the group), the head
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

/// First of a plan's scheduler metadata on the device, whichever implementation serves its calls.
struct general_header {
  std::int32_t num_items;  ///< negative: there is no list, the kernel takes whole row tiles of all sequences
  std::int32_t num_seqs;
  std::int32_t unused[6];
};
static_assert(sizeof(general_header) == 32);

/// The scheduler metadata on the device.
struct general_metadata {
  const general_header* header = nullptr;
  const general_item* items = nullptr;
};

/// Sets the splits of an item that is a whole row tile: those that tokens at first_position … last_position attend to.
BIFOLIO_HOST_DEVICE void set_splits(general_item& item, const attn::attention_window& window,
                                    std::int64_t first_position, std::int64_t last_position, std::int64_t seq_len) {
  const attn::visible_range keys = window.of_run(first_position, last_position, seq_len);
  if (keys.begin >= keys.end) return;
  item.first_split = static_cast<std::int32_t>(keys.begin / split_positions);
  item.num_splits = static_cast<std::int32_t>((keys.end + split_positions - 1) / split_positions) - item.first_split;
}

/// Whole row tiles in the order of the sequences, where the plan has no list of items. Every CTA walks the sequences
/// along with its work.
struct tile_walk {
  std::int32_t seq;
  std::int64_t tiles_before;  ///< of earlier sequences

  /// The row tile of this ordinal, which is not below that of the call before, as an item. False: there is none.
  BIFOLIO_HOST_DEVICE bool find(const attention_kernel_args& call, std::int32_t num_seqs, std::int32_t rows_per_tile,
                                std::int64_t ordinal, general_item& item) {
    for (; seq < num_seqs; ++seq) {
      const std::int64_t query_len = call.query_start_loc[seq + 1] - call.query_start_loc[seq];
      const std::int64_t num_rows = query_len * call.group_size;
      const std::int64_t num_tiles = (num_rows + rows_per_tile - 1) / rows_per_tile;
      if (ordinal >= tiles_before + num_tiles) {
        tiles_before += num_tiles;
        continue;
      }
      // The last tokens first, as in a list.
      const std::int64_t first_row = (num_tiles - 1 - (ordinal - tiles_before)) * rows_per_tile;
      const std::int64_t end_row = first_row + rows_per_tile < num_rows ? first_row + rows_per_tile : num_rows;
      const std::int64_t seq_len = call.seq_lens[seq];
      const std::int64_t first = attn::first_query_position(call.query_positions, seq, query_len, seq_len);
      item = {};
      item.seq = seq;
      item.first_row = static_cast<std::int32_t>(first_row);
      item.tile = -1;
      set_splits(item, attn::window_of(call), first + first_row / call.group_size,
                 first + (end_row - 1) / call.group_size, seq_len);
      return true;
    }
    return false;
  }
};

/// Floats of one partial result, for one KV head and dim tile: m [rows], l [rows], then the accumulators [rows, dims].
[[nodiscard]] constexpr std::int64_t partial_floats(std::int32_t rows_per_tile, std::int32_t v_head_dim) noexcept {
  const std::int32_t dims = v_head_dim < dims_per_tile ? (v_head_dim + 3) / 4 * 4 : dims_per_tile;
  return static_cast<std::int64_t>(rows_per_tile) * (dims + 2);
}

}  // namespace bifolio::inline v0_2::cuda

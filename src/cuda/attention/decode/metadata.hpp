// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the decode kernels and their planner share: tile sizes, and the records of the scheduler metadata. plan.hpp
/// says what they mean.

#include <bifolio/detail/host_device.hpp>
#include <bifolio/dtype.hpp>
#include <cstdint>
#include <initializer_list>

namespace bifolio::inline v0_2::cuda {

inline constexpr std::int32_t decode_tile_tokens = 64;
inline constexpr std::int32_t decode_tile_rows = 16;
inline constexpr std::int32_t decode_few_rows = 8;           // of codes and f32: up to so many have their own kernel
inline constexpr std::int32_t decode_fixed_overhead = 1;     // per output tile, in KV tiles
inline constexpr std::int32_t decode_min_tiles_per_cta = 2;  // overhead included; smaller shares cost more in combining
inline constexpr std::int32_t decode_combine_fan_in = 16;    // partial results that are combined at once
inline constexpr std::int32_t decode_max_flat_splits = 24;   // of an output tile; more are combined in two levels
inline constexpr std::int32_t decode_patience = 1 << 16;     // cycles that a CTA waits for others to combine with
// Of deterministic plans.
inline constexpr std::int32_t decode_leaf_tiles = 4;  // 256 positions
inline constexpr std::int32_t decode_node_tiles = decode_leaf_tiles * decode_combine_fan_in;
inline constexpr std::int32_t decode_root_tiles = 1 << 30;  // output tiles are not split
inline constexpr std::int32_t decode_splits_per_cta = 8;    // leaves at most; of pieces twice as many, on average

/// The tile that ends the piece which begins with `tile`, of a part that ends before `end`.
[[nodiscard]] BIFOLIO_HOST_DEVICE constexpr std::int32_t decode_piece_end(std::int32_t first_tile, std::int32_t tile,
                                                                          std::int32_t end) noexcept {
  const std::int32_t node = tile / decode_node_tiles;
  // The first tile that is visible may be in the middle of a leaf.
  const bool begins_node = tile <= first_tile || tile == node * decode_node_tiles;
  const std::int32_t last =
      begins_node ? (node + 1) * decode_node_tiles : (tile / decode_leaf_tiles + 1) * decode_leaf_tiles;
  return last < end ? last : end;
}
/// How many pieces of a part that begins with `part_tile` come before the one that `tile` is in.
[[nodiscard]] BIFOLIO_HOST_DEVICE constexpr std::int32_t decode_piece_ordinal(std::int32_t first_tile,
                                                                              std::int32_t part_tile,
                                                                              std::int32_t tile) noexcept {
  const std::int32_t node = part_tile / decode_node_tiles;
  const std::int32_t nodes = tile / decode_node_tiles - node;
  if (part_tile <= first_tile || part_tile == node * decode_node_tiles) return nodes;
  const std::int32_t part_leaf = part_tile / decode_leaf_tiles;
  if (nodes == 0) return tile / decode_leaf_tiles - part_leaf;
  return (node + 1) * decode_combine_fan_in - part_leaf + nodes - 1;
}

/// Dims of a row of partial results, and of the compiled shape that takes rows of `head_dim`; 0 where none does.
[[nodiscard]] constexpr std::int32_t decode_padded_dim(dtype type, std::int32_t head_dim) noexcept {
  if (type == dtype::f32) return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 0;
  for (const std::int32_t padded : {64, 80, 96, 128, 160, 192, 256}) {
    if (padded == 80 && size_of(type) == 1) continue;  // codes take two vectors of 16 dims at a time
    if (head_dim <= padded) return padded;
  }
  return 0;
}

/// Of K and V of these types the one that says which shapes there are: that of the codes, where only one has codes.
[[nodiscard]] constexpr dtype decode_shape_type(dtype k_type, dtype v_type) noexcept {
  return size_of(k_type) < size_of(v_type) ? k_type : v_type;
}

/// Whether deterministic plans sum as prefill does.
[[nodiscard]] constexpr bool decode_splits_dims(int element_bytes) noexcept { return element_bytes != 1; }

/// Whether output tiles of few rows have a kernel of their own in the compiled shape that takes rows of `head_dim`. In
/// deterministic plans it sums as the one for all numbers of rows does.
[[nodiscard]] constexpr bool decode_has_few_rows(dtype type, std::int32_t head_dim) noexcept {
  return size_of(type) == 1 ? head_dim <= 256 : type == dtype::f32 && head_dim <= 128;
}

struct decode_seq {
  std::int32_t row;          // of the block tables
  std::int32_t work_begin;   // of the sequence in the work range
  std::int32_t work_length;  // tiles and overhead of one output tile, or of one split of a deterministic plan
  std::int32_t first_tile;   // earlier tiles are outside every row's window
  std::int32_t num_tiles;
  std::int32_t row_tiles;
  std::int32_t seq_len;
  std::int32_t query_start;
  std::int32_t query_len;
  std::int32_t first_split;  // ordinal of its first split; deterministic plans only
  std::int32_t num_splits;   // per output tile; 1 in other plans
};

/// A CTA's share of the work range, with its first sequence: the kernel needs one load before its first key.
struct alignas(16) decode_cta {
  std::int32_t begin;
  std::int32_t end;
  std::int32_t seq_index;  // of `first` in the list of sequences
  decode_seq first;
  std::int32_t unused[2];
};
static_assert(sizeof(decode_cta) == 64);

/// A CTA's part of an output tile that several CTAs share, in a deterministic plan without splits.
struct decode_part {
  std::int32_t partial;        // of its first piece
  std::int32_t first_partial;  // of the output tile; those of its parts follow one another
  std::int32_t num_partials;
  std::int32_t first_cta;  // of the output tile
  std::int32_t num_ctas;   // that have a part
};
/// The output tile in whose middle the CTA's share begins, and the one that begins in the share and does not end there.
struct decode_parts {
  decode_part continued;
  decode_part begun;
};

struct alignas(16) decode_header {
  std::int32_t total;  // length of the work range
  std::int32_t num_ctas;
  std::int32_t split_tiles;   // of deterministic plans: leaves or whole output tiles; 0: not deterministic
  std::int32_t num_partials;  // in one of their ranges: CTAs, or splits of a deterministic plan
  std::int32_t overhead;      // in tiles, of an output tile
  std::int32_t cut_tiles;     // where output tiles are not split: shares begin at multiples of it
  std::int32_t together;      // 1: every CTA has one split of one output tile, and its CTAs combine together
  std::int32_t patience;      // cycles that one waits for the others then
};

/// The scheduler metadata on the device. The kernel's CTAs find their share of the work by it.
struct decode_metadata {
  const decode_header* header = nullptr;
  const decode_cta* ctas = nullptr;     ///< [grid]; those from num_ctas on are empty
  const decode_parts* parts = nullptr;  ///< [grid], of deterministic plans
  const decode_seq* seqs = nullptr;
};

/// Partial results in the workspace: three ranges of num_partials, or two and each CTA's running node and root.
[[nodiscard]] constexpr std::int64_t decode_num_partials(bool deterministic, std::int64_t num_partials,
                                                         std::int64_t grid) noexcept {
  return deterministic ? 2 * num_partials + 2 * grid : 3 * num_partials;
}

}  // namespace bifolio::inline v0_2::cuda

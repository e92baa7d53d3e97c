// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the prefill kernels and their planner share: tile sizes, and the records of the scheduler metadata. plan.hpp
/// says what they mean.

#include <bifolio/detail/host_device.hpp>
#include <bifolio/dtype.hpp>
#include <cstdint>

namespace bifolio::inline v0_2::cuda {

inline constexpr std::int32_t prefill_warpgroup_rows = 64;

/// Steps of more work tiles for an SM than this are not cut: their last round is a small part of the whole.
inline constexpr std::int32_t prefill_max_tiles_per_sm_to_cut = 8;

/// Keys of a part of a row tile in deterministic plans above 256 dims. Each further part of a row tile costs 256 KB of
/// traffic with the L2; a sequence with few rows has as many CTAs per head as it has parts.
inline constexpr std::int32_t prefill_part_keys = 1024;
/// Most parts of a step that are work tiles, for an SM.
inline constexpr std::int32_t prefill_max_parts_per_sm = 16;

inline constexpr std::int32_t prefill_all_tile_dims[] = {64, 96, 128, 192, 256, 512};
inline constexpr std::int32_t prefill_all_f32_tile_dims[] = {64, 128};

/// Sizes of the compiled kernel that computes a head_dim.
struct prefill_tiling {
  std::int32_t dims = 0;           ///< what is past head_dim is padding. 0: no kernel computes it
  std::int32_t keys = 0;           ///< of a tile: as many as shared memory and registers hold
  std::int32_t num_consumers = 0;  ///< warpgroups that rows are divided among, 64 each
  std::int32_t cost = 1;           ///< of a product, in those of 16-bit types
  std::int32_t dim_parts = 1;      ///< warpgroups that share the output's dims of the same rows
  /// Of a tile whose rows one warpgroup has, in eighths of a full one's.
  std::int32_t one_warpgroup_cost = 5;
  [[nodiscard]] constexpr std::int32_t rows() const noexcept { return num_consumers * prefill_warpgroup_rows; }
  [[nodiscard]] constexpr std::int32_t num_warpgroups() const noexcept { return num_consumers * dim_parts; }
};

/// Whether the kernel of deterministic plans sums as decode does; that of more dims has parts.
[[nodiscard]] constexpr bool prefill_has_tree(std::int32_t tile_dims) noexcept { return tile_dims <= 256; }
/// 16-bit tiles of deterministic plans, of which a leaf of their tree has a whole number. Above 128 dims shared memory
/// has room for parts of the nodes besides.
[[nodiscard]] constexpr std::int32_t prefill_tree_tile_keys(std::int32_t tile_dims) noexcept {
  return tile_dims <= 128 ? 128 : 64;
}

/// `type`: of q, which the products are computed in.
[[nodiscard]] constexpr prefill_tiling prefill_tiling_of(dtype type, std::int32_t head_dim, bool deterministic,
                                                         bool is_coded = false) noexcept {
  if (type == dtype::f32) {
    for (const std::int32_t dims : prefill_all_f32_tile_dims) {
      if (head_dim <= dims) return {dims, 32, 2, 6, 1, 6};
    }
    return {};
  }
  for (const std::int32_t dims : prefill_all_tile_dims) {
    if (head_dim > dims) continue;
    // Registers of one warpgroup do not hold 512 dims of the output. Two do, and each computes all scores.
    if (dims > 256) return {dims, 32, 1, 3, 2};
    // Narrow heads have three consumers: their products are too short to hide the softmax of one other.
    // Beside two producers of codes consumers of 256 dims have registers for 64 keys.
    const std::int32_t keys = deterministic ? prefill_tree_tile_keys(dims)
                              : dims <= 128 ? 128
                              : dims <= 192 ? 96
                              : is_coded    ? 64
                                            : 80;
    return {dims, keys, dims <= 64 ? 3 : 2};
  }
  return {};
}
/// What a 16-bit kernel is compiled for.
enum class prefill_kind : std::uint8_t {
  plain,           ///< 16-bit K and V
  tree,            ///< the same in deterministic plans (combine_tree.cuh): keys are taken from the first to the last
  parts,           ///< in deterministic plans above 256 dims: keys are taken as in `plain`, in parts
  coded,           ///< codes, with static scales or none
  coded_by_token,  ///< codes of which K, V or both have scales per token and head, or 16-bit K or V beside codes
  coded_by_zero,   ///< the same where K, V or both are u8, with zero points
};
/// Of codes: the most floats that a token and head has in the tails of K and V. `has_wide_plane`: one of them has 16
/// bits, for which bfloat16 has a scale per token.
[[nodiscard]] constexpr prefill_kind coded_prefill_kind(std::int32_t tail_floats, bool has_wide_plane) noexcept {
  return tail_floats > 1                      ? prefill_kind::coded_by_zero
         : tail_floats == 1 || has_wide_plane ? prefill_kind::coded_by_token
                                              : prefill_kind::coded;
}
[[nodiscard]] constexpr prefill_kind prefill_kind_without_codes(dtype type, std::int32_t head_dim,
                                                                bool deterministic) noexcept {
  if (!deterministic) return prefill_kind::plain;
  return prefill_has_tree(prefill_tiling_of(type, head_dim, true).dims) ? prefill_kind::tree : prefill_kind::parts;
}
/// Whether there are kernels of these dims over codes.
[[nodiscard]] constexpr bool prefill_has_codes(std::int32_t tile_dims) noexcept { return tile_dims <= 256; }
/// Whether those take K or V of 16 bits beside codes: shared memory holds a tile of them as well.
[[nodiscard]] constexpr bool prefill_takes_wide_planes(std::int32_t tile_dims) noexcept { return tile_dims <= 128; }

struct alignas(16) prefill_work_tile {
  std::int32_t seq;  // row of the block tables
  std::int32_t seq_len;
  std::int32_t query_start;
  std::int32_t query_len;
  std::int32_t row_tile;
  std::int32_t head;        // first query head of the packed ones
  std::int32_t tile_begin;  // KV tiles, counted from position 0
  std::int32_t tile_end;
  std::int32_t partial;  // negative: rows are complete; else the number of the partial result
  std::int32_t unused[3];
};
static_assert(sizeof(prefill_work_tile) == 48);

/// What a CTA begins with: the kernel needs one load before its first keys.
struct alignas(16) prefill_cta {
  prefill_work_tile first;  // seq < 0: the CTA has no work
  std::int32_t next;        // work tile of its share after that, or negative: the counter says
  std::int32_t end;         // of its share, or of all items
  std::int32_t unused[2];
};
static_assert(sizeof(prefill_cta) == 64);

/// A row tile that is computed in parts.
struct alignas(16) prefill_split_output {
  std::int32_t work_tile;      // one of its parts
  std::int32_t first_partial;  // the parts' results follow each other in the order of their keys
  std::int32_t num_partials;
  std::int32_t partial_rows;  // of deterministic plans, where numbers of partial results are those of their first rows
};

/// Of the list of work tiles.
struct alignas(16) prefill_header {
  std::int32_t num_items;       // work tiles, over all heads
  std::int32_t num_work_tiles;  // in the list
  std::int32_t heads_in_group;  // each stands for all heads, in groups of this many row tiles; 0: CTAs have shares
  std::int32_t num_split_outputs;
  std::int32_t log_combine_groups;  // of lanes that share the parts of a row
  std::int32_t unused[3];
};

/// Warps of a CTA of the combine, and CTAs of its grid for an SM.
inline constexpr std::int32_t prefill_combine_warps = 8;
inline constexpr std::int32_t prefill_combine_ctas_per_sm = 4;
/// Columns of a row that a warp combines without groups, and partial results that a lane loads at once.
inline constexpr std::int32_t prefill_combine_columns = 128;
inline constexpr std::int32_t prefill_combine_batch = 8;
inline constexpr std::int32_t prefill_max_log_combine_groups = 3;

/// The scheduler metadata on the device.
struct prefill_metadata {
  const prefill_header* header = nullptr;
  const prefill_cta* ctas = nullptr;                    ///< [num_sms]
  const prefill_split_output* split_outputs = nullptr;  ///< [num_sms]
  const prefill_work_tile* work_tiles = nullptr;
};

/// How query rows are packed into tiles.
struct prefill_packing {
  std::int32_t heads = 1;  ///< query heads of a KV head that share a row tile: all of them or one
  std::int32_t tokens_per_warpgroup = 0;
  std::int32_t num_consumers = 2;  ///< warpgroups of a row tile
  [[nodiscard]] constexpr std::int32_t tokens_per_tile() const noexcept { return num_consumers * tokens_per_warpgroup; }
};

/// The work tile of item n of the list, of which each entry stands for all heads: groups of heads, in each entry after
/// entry, for each the heads of the group.
struct prefill_place {
  std::int32_t entry;
  std::int32_t head;  // in units of packed ones
};
[[nodiscard]] BIFOLIO_HOST_DEVICE constexpr prefill_place prefill_place_of(const prefill_header& header,
                                                                           std::int32_t n) noexcept {
  const std::int32_t group_items = header.num_work_tiles * header.heads_in_group;
  const std::int32_t group = n / group_items;
  const std::int32_t rest = n - group * group_items;
  const std::int32_t entry = rest / header.heads_in_group;
  return {entry, group * header.heads_in_group + rest - entry * header.heads_in_group};
}

/// Partial results that a step has at most, and their bytes: outputs of the rows of a tile, then their maxima and sums.
/// Deterministic plans up to 256 dims have none; there each CTA has room for the outputs of one tile's root and, above
/// 128 dims and of float32, of its nodes. Those of more dims have room for twice as many, which have only the rows that
/// they need, and in each CTA for a tile's parts so far.
[[nodiscard]] constexpr std::int32_t prefill_tree_outputs(dtype type, std::int32_t tile_dims) noexcept {
  return tile_dims <= 128 && type != dtype::f32 ? 1 : 2;
}
[[nodiscard]] constexpr std::int32_t prefill_max_partials(std::int32_t num_sms, bool deterministic = false) noexcept {
  return (deterministic ? 4 : 2) * num_sms;
}

}  // namespace bifolio::inline v0_2::cuda

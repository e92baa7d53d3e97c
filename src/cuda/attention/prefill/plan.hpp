// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The host side of prefill's tile scheduler. A row tile is 64 packed query rows of one sequence for each
/// consumer warpgroup; they hold as many tokens as fit with `packed_heads` heads of a KV head each. A work tile
/// is a row tile of some heads over a range of KV tiles. CTAs of a persistent grid, one per SM, get work tiles in one
/// of two ways, whichever is estimated to end earlier:
///
/// - From a counter on the device, next in the list when ready for it. Work tiles are whole; the list consists of
///   groups of heads whose keys fit into five eighths of the L2, in each the longest first. It is stored once for all
///   heads.
/// - As equal shares, where whole work tiles are too few for the SMs. A share begins with whole ones, dealt out in the
///   order of the list, so that CTAs read the same keys at the same time. The KV tiles of all others form one range,
///   which is cut at the ends of the shares. A row tile that a cut falls into is computed in parts, whose partial
///   results a second kernel combines, in the order of their keys. There are two per CTA at most. Where many row tiles
///   read the same keys, too many for the L2, all are cut at the same ones.
///
/// No bit of a row depends on its place in a tile, on packing, or on the order of work tiles; it does on the cuts, and
/// in float32 on whether its row tile has rows for more than one warpgroup. Row tiles of deterministic plans are not
/// cut up to 256 dims. Above that no other kernel computes few rows: there row tiles consist of parts of
/// `prefill_part_keys` keys, counted from position 0, whose results are always combined in one order, from the last to
/// the first. One CTA computes them all, or each is a work tile of its own; no bit depends on that.

#include <bifolio/detail/host_device.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/host/plan_input.hpp"

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
[[nodiscard]] constexpr prefill_tiling prefill_tiling_of(const attention_spec& spec) noexcept {
  return prefill_tiling_of(spec.q_type, spec.qk_head_dim, spec.deterministic,
                           size_of(spec.k_code.type) == 1 || size_of(spec.v_code.type) == 1);
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
};

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
[[nodiscard]] constexpr prefill_packing prefill_packing_of(std::int32_t packed_heads,
                                                           const attention_spec& spec) noexcept {
  return {packed_heads, prefill_warpgroup_rows / packed_heads, prefill_tiling_of(spec).num_consumers};
}

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

/// Prefill's part of a step. The vectors keep their capacity.
struct prefill_plan {
  std::vector<std::int32_t> seqs;
  prefill_packing packing;
  prefill_header header{};
  std::vector<std::int32_t> shares;  ///< [num_sms + 1]: first work tile of each CTA's share, and the end
  std::vector<prefill_split_output> split_outputs;
  std::vector<prefill_work_tile> work_tiles;
  std::int32_t num_partials = 0;
  /// Tokens of the whole step. The tensor map of q, which a captured launch holds, ends at the last one: another number
  /// needs another capture.
  std::int64_t num_tokens = 0;
  /// The combine kernel is launched: this step or an earlier one of the plan has partial results. Once it is, a
  /// captured launch stays right for steps with and without them.
  bool combines = false;

  /// Used while planning: row tiles of one head, a sequence's next to each other, and their order by time.
  struct row_tile {
    std::int32_t seq;
    std::int32_t tile;
    std::int32_t tile_begin, tile_end;
    std::int32_t cost;
  };
  std::vector<row_tile> row_tiles, other_row_tiles;
  std::vector<std::uint64_t> order;
  std::vector<std::int64_t> loads, ready;
  std::vector<std::uint64_t> whole;  ///< those that are not cut: CTA, place in its share, number
  std::vector<char> is_whole;
  std::vector<std::int32_t> parts;           ///< of the row tile that is being cut: their work tiles
  std::vector<prefill_work_tile> cut_tiles;  ///< work tiles before CTAs have them, and of which output each is a part
  std::vector<std::int32_t> outputs;

  [[nodiscard]] bool empty() const noexcept { return seqs.empty(); }
};

/// Makes the work tiles of `plan.seqs`; sets `combines` where there are partial results. May throw std::bad_alloc.
void plan_prefill(const plan_input& input, prefill_plan& plan);

/// Microseconds that prefill takes for a sequence on an H200.
struct prefill_estimate {
  double alone_us;  ///< on an otherwise idle device
  double share_us;  ///< among others that keep all SMs busy
};
[[nodiscard]] prefill_estimate estimate_prefill(const plan_input& input, std::int32_t query_len,
                                                std::int32_t seq_len) noexcept;

/// Most work tiles of steps within these limits.
[[nodiscard]] std::int64_t max_prefill_work_tiles(const attention_spec& spec, const step_limits& limits,
                                                  std::int32_t num_sms) noexcept;

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
[[nodiscard]] constexpr std::size_t prefill_workspace_bytes(const attention_spec& spec, std::int32_t num_sms) noexcept {
  const prefill_tiling tiling = prefill_tiling_of(spec);
  const auto rows = static_cast<std::size_t>(tiling.rows());
  const auto tile_floats = rows * static_cast<std::size_t>(tiling.dims);
  if (spec.deterministic && prefill_has_tree(tiling.dims)) {
    return static_cast<std::size_t>(num_sms * prefill_tree_outputs(spec.q_type, tiling.dims)) * tile_floats *
           sizeof(float);
  }
  const std::size_t partials = static_cast<std::size_t>(prefill_max_partials(num_sms, spec.deterministic)) * rows *
                               (static_cast<std::size_t>(spec.v_head_dim) + 2);
  return (partials + (spec.deterministic ? static_cast<std::size_t>(num_sms) * tile_floats : 0)) * sizeof(float);
}

inline constexpr std::size_t prefill_num_counters = 1;

/// Bytes of the scheduler metadata: header, CTAs, split outputs, work tiles, in this order.
[[nodiscard]] constexpr std::size_t prefill_metadata_bytes(std::int64_t num_work_tiles, std::int32_t num_sms) noexcept {
  return sizeof(prefill_header) +
         static_cast<std::size_t>(num_sms) * (sizeof(prefill_cta) + sizeof(prefill_split_output)) +
         static_cast<std::size_t>(num_work_tiles) * sizeof(prefill_work_tile);
}
/// Writes them to `begin`, which is aligned to 16 bytes.
void write_metadata(const prefill_plan& plan, std::int32_t num_sms, std::byte* begin) noexcept;
/// Where they are on the device when they begin at `begin`.
[[nodiscard]] prefill_metadata prefill_metadata_at(const std::byte* begin, std::int32_t num_sms) noexcept;

}  // namespace bifolio::inline v0_2::cuda

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

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/attention/prefill/metadata.hpp"
#include "cuda/host/plan_input.hpp"

namespace bifolio::inline v0_2::cuda {

[[nodiscard]] constexpr prefill_tiling prefill_tiling_of(const attention_spec& spec) noexcept {
  return prefill_tiling_of(spec.q_type, spec.qk_head_dim, spec.deterministic,
                           size_of(spec.k_code.type) == 1 || size_of(spec.v_code.type) == 1);
}
[[nodiscard]] constexpr prefill_packing prefill_packing_of(std::int32_t packed_heads,
                                                           const attention_spec& spec) noexcept {
  return {packed_heads, prefill_warpgroup_rows / packed_heads, prefill_tiling_of(spec).num_consumers};
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

/// Bytes of a step's partial results (prefill_max_partials).
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
/// Sets `log_combine_groups` of the header, and `combines` where there are partial results. Rows of outputs have
/// `dims`.
void plan_combine(const plan_input& input, std::int32_t dims, prefill_plan& plan) noexcept;

/// Writes them to `begin`, which is aligned to 16 bytes.
void write_metadata(const prefill_plan& plan, std::int32_t num_sms, std::byte* begin) noexcept;
/// Where they are on the device when they begin at `begin`.
[[nodiscard]] prefill_metadata prefill_metadata_at(const std::byte* begin, std::int32_t num_sms) noexcept;

}  // namespace bifolio::inline v0_2::cuda

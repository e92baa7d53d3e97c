// SPDX-License-Identifier: Apache-2.0
#pragma once

/// How the general kernel's work is split: every sequence into splits of 512 positions counted from 0, whatever the
/// batch; rows (token, head of the group) into tiles. A tile's splits are combined in order, starting from nothing,
/// either by one CTA (one item) or, for long sequences in small batches, each split by a CTA of its own, whose partial
/// results the last to arrive combines in the same order. Both give the same bits, so that how a tile is split may
/// depend on the batch and its results do not.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/attention/general/items.hpp"
#include "cuda/host/plan_input.hpp"

namespace bifolio::inline v0_2::cuda {

/// The general implementation's part of a step. The vector keeps its capacity.
struct general_plan {
  std::int32_t rows_per_tile = 0;
  std::int32_t num_dim_tiles = 0;
  /// `items` was made. Otherwise the kernel takes whole row tiles, which it finds by the lengths on the device: with
  /// the same bits, but slower where a few long sequences are too few tiles for the device.
  bool has_items = false;
  bool has_query_positions = false;
  std::int32_t num_seqs = 0;
  std::vector<general_item> items;
  std::int64_t num_tiles = 0;     ///< row tiles that were split into one item per split
  std::int64_t num_partials = 0;  ///< their splits

  /// Over all KV heads.
  [[nodiscard]] std::size_t workspace_bytes(const attention_spec& spec) const noexcept;
  [[nodiscard]] std::size_t num_counters(const attention_spec& spec) const noexcept;
};

/// Fills `plan`; `with_items`: see above. Throws std::bad_alloc, and `error` (unsupported) where numbers leave 32 bits.
/// The input has been checked.
void plan_general(const plan_input& input, bool with_items, general_plan& plan);

/// What plans with items need at most, in steps within these limits.
struct general_room {
  std::int64_t num_items = 0;
  std::size_t workspace_bytes = 0;
  std::size_t num_counters = 0;
};
[[nodiscard]] general_room max_general_room(const attention_spec& spec, const step_limits& limits,
                                            const device_numbers& device) noexcept;

}  // namespace bifolio::inline v0_2::cuda

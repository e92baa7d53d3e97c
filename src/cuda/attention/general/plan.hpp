// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The general kernel's cut: every sequence is cut into splits of 512 positions counted from 0, whatever the batch;
/// rows (token, head of the group) into tiles. A tile's splits are folded in order, starting from nothing, either by
/// one thread block (one item) or, for long sequences in small batches, each split by a thread block of its own, whose
/// partial results the last to arrive folds in the same order. Both give the same bits, so that how a tile is cut may
/// depend on the batch and its results do not.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/attention/general/items.hpp"
#include "cuda/host/plan_input.hpp"

namespace bifolio::cuda {

/// The general kernel's work for one step; pure host data.
struct general_plan {
  std::int32_t rows_per_tile = 0;
  std::int32_t num_dim_tiles = 0;
  std::vector<general_item> items;
  std::int64_t num_tiles = 0;     ///< tiles that were cut into one item per split
  std::int64_t num_partials = 0;  ///< their splits

  /// Floats of workspace and number of counters, over all KV heads.
  [[nodiscard]] std::size_t workspace_floats(const attention_spec& spec) const noexcept;
  [[nodiscard]] std::size_t num_counters(const attention_spec& spec) const noexcept;
};

/// Fills `plan`, whose vector keeps its capacity. Throws std::bad_alloc, and `error` (unsupported) where numbers leave
/// 32 bits. The input has been checked.
void plan_general(const plan_input& input, general_plan& plan);

}  // namespace bifolio::cuda

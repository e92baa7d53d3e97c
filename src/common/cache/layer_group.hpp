// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Parts of a group_manager's state that no inline function needs.

#include <bifolio/detail/group_manager.hpp>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/cache/state_slots.hpp"

namespace bifolio::inline v0_2::detail {

/// Tables or states of one group: one of `core` and `states` is null.
struct group_manager::layer_group {
  group_config config;
  std::int32_t index = 0;
  std::int64_t watermark = 0;
  /// Blocks whose contents end in one block of the first group: so many can be registered under its contents.
  std::int64_t blocks_per_first = 1;
  manager_core* core = nullptr;
  std::unique_ptr<manager_core> owned;  // null for the first group, whose core is the manager's
  std::unique_ptr<state_slots> states;
  std::vector<block_copy> copies;     // not drained yet
  std::vector<block_id> hits;         // scratch of a look-up: those that the new sequence takes
  std::int64_t num_idle_hits = 0;     // of these, free now
  std::vector<std::uint32_t> moving;  // scratch of swaps
  std::vector<std::int32_t> rows;     // scratch of build: block tables that are swapped with a batch's

  [[nodiscard]] prefix_cache* prefix() const noexcept { return states ? states->prefix() : core->prefix_.get(); }
  [[nodiscard]] block_pool& pool() const noexcept { return states ? states->pool() : core->pool_; }
  [[nodiscard]] bool is_cross() const noexcept { return config.kind == group_kind::cross; }
  /// Full or window: its tables cover the positions of the sequence.
  [[nodiscard]] bool has_positions() const noexcept { return core != nullptr && !is_cross(); }
};

/// What a look-up found in all groups. The hits themselves are in the groups and in the first core's scratch.
struct group_manager::joint_hits {
  manager_core::prefix_hits first;
  std::int64_t num_tokens = 0;        ///< that every group has
  std::int64_t num_first_tokens = 0;  ///< that the first group has alone
  bool has_cross = false;             ///< the encoder's output is there
  bool is_cached = true;              ///< the prompt can be looked up and published
};

/// The worse of two answers: never, then later.
[[nodiscard]] constexpr alloc_status worse(alloc_status a, alloc_status b) noexcept { return a < b ? b : a; }
static_assert(alloc_status::ok < alloc_status::later && alloc_status::later < alloc_status::never);

/// Whether `needed` of a pool's blocks are free.
[[nodiscard]] inline alloc_status status_of(std::int64_t needed, const block_pool& pool) noexcept {
  if (needed > pool.num_blocks()) return alloc_status::never;
  return needed > pool.num_free() ? alloc_status::later : alloc_status::ok;
}

}  // namespace bifolio::inline v0_2::detail

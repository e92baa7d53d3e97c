// SPDX-License-Identifier: Apache-2.0
/// group_manager's swapping and fences.

#include <algorithm>
#include <bifolio/detail/group_manager.hpp>

#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "common/cache/layer_group.hpp"

namespace bifolio::inline v0_2::detail {

alloc_status group_manager::swap(std::span<const seq_id> seqs, bool out, std::span<std::vector<block_copy>> copies) {
  if (copies.size() != groups_.size()) {
    refuse(errc::invalid_argument, copies.size(),
           " lists of copies were given, one per layer group is needed: ", groups_.size());
  }
  first_.require_swappable(seqs, out);
  std::size_t i = 0;
  translate_bad_alloc(out ? "swap_out" : "swap_in", [&] {
    for (const auto& group : groups_) {
      std::vector<block_copy>& list = copies[i++];
      if (group->core != nullptr) {
        group->core->reserve_move(seqs, list);
        continue;
      }
      group->moving.clear();
      group->moving.reserve(seqs.size());
      for (const seq_id seq : seqs) group->moving.push_back(index_of(seq));
      group->states->reserve_move(group->moving, list);
    }
    // Blocks that are taken may be evicted, and other groups lose what belonged to them.
    if (!out) {
      std::int64_t num_first = 0;
      for (const seq_id seq : seqs) num_first += first_.table_of(first_.get(seq)).size();
      std::int64_t most = 0;
      for (const auto& group : groups_) {
        std::int64_t num_own = 0;
        for (const seq_id seq : seqs) {
          num_own += group->core != nullptr ? group->core->table_of(group->core->records_[index_of(seq)]).size()
                                            : static_cast<std::int64_t>(group->states->of(index_of(seq)).size());
        }
        most = std::max(most, num_own);
      }
      reserve_all_events(num_first, most);
    }
  });
  alloc_status status = alloc_status::ok;
  for (const auto& group : groups_) {
    if (group->core != nullptr) {
      status = worse(status, group->core->move_status(seqs, out));
    } else {
      const block_pool& to = out ? *group->states->host() : group->pool();
      status = worse(status, status_of(group->states->slots_to_move(group->moving), to));
    }
  }
  if (status != alloc_status::ok) return status;
  i = 0;
  for (const auto& group : groups_) {
    std::vector<block_copy>& list = copies[i++];
    if (group->core != nullptr) {
      group->core->move_all(seqs, out, list);
    } else {
      group->states->move(group->moving, out, list);
    }
  }
  for (const seq_id seq : seqs) note_room(index_of(seq));
  return status;
}

std::int64_t group_manager::blocks_to_swap_in(std::span<const seq_id> seqs, std::int32_t index) const {
  layer_group& group = at(index);
  first_.require_swappable(seqs, false);
  return translate_bad_alloc("blocks_to_swap_in", [&] {
    if (group.core != nullptr) return group.core->blocks_to_move(seqs, false);
    group.moving.clear();
    for (const seq_id seq : seqs) group.moving.push_back(index_of(seq));
    std::vector<block_copy> none;
    group.states->reserve_move(group.moving, none);
    return group.states->slots_to_move(group.moving);
  });
}

void group_manager::forget_copies(std::span<const block_copy> swap_outs, std::span<const block_copy> swap_ins,
                                  std::int32_t index) noexcept {
  if (index < 0 || index >= num_groups()) return;
  manager_core* core = groups_[static_cast<std::size_t>(index)]->core;
  if (core != nullptr) core->forget_copies(swap_outs, swap_ins);  // states have no links to copies
}

fence_id group_manager::open_fence() {
  const fence_id fence = first_.open_fence();
  for (const auto& group : groups_) {
    if (group->index == 0) continue;
    if (group->core != nullptr) {
      (void)group->core->open_fence();  // all count alike
      continue;
    }
    (void)group->pool().open_fence();
    if (group->states->host() != nullptr) (void)group->states->host()->open_fence();
  }
  return fence;
}

void group_manager::retire(fence_id fence) {
  first_.retire(fence);
  for (const auto& group : groups_) {
    if (group->index == 0) continue;
    if (group->core != nullptr) {
      group->core->retire(fence);
      continue;
    }
    group->pool().retire(fence);
    if (group->states->host() != nullptr) group->states->host()->retire(fence);
  }
}

bool group_manager::has_fenced_blocks() const noexcept {
  return std::any_of(groups_.begin(), groups_.end(), [](const auto& group) { return group->pool().num_fenced() > 0; });
}

}  // namespace bifolio::inline v0_2::detail

// SPDX-License-Identifier: Apache-2.0
/// group_manager's look into its groups: pools, statistics, check and digest.

#include <bifolio/detail/group_manager.hpp>

#include "common/base/hash.hpp"
#include "common/base/refuse.hpp"
#include "common/cache/layer_group.hpp"

namespace bifolio::inline v0_2::detail {

const manager_core& group_manager::core(std::int32_t index) const {
  const layer_group& group = at(index);
  if (group.core == nullptr) {
    refuse(errc::invalid_argument, "group ", index, " has states and no block tables");
  }
  return *group.core;
}

const block_pool& group_manager::pool(std::int32_t group) const { return at(group).pool(); }

const prefix_cache* group_manager::prefix(std::int32_t group) const { return at(group).prefix(); }

std::int64_t group_manager::num_free_host_blocks(std::int32_t index) const {
  const layer_group& group = at(index);
  if (group.core != nullptr) return group.core->num_free_host_blocks();
  return group.states->host() != nullptr ? group.states->host()->num_free() : 0;
}

void group_manager::drain_events(std::int32_t group, std::vector<cache_event>& events) {
  prefix_cache* cache = at(group).prefix();
  events.clear();
  if (cache != nullptr) cache->drain_events(events);
}

cache_stats group_manager::stats(std::int32_t index) const {
  const layer_group& group = at(index);
  if (group.core != nullptr) return group.core->stats();
  cache_stats stats = group.states->stats();
  stats.num_sequences = first_.num_sequences_;
  stats.num_tokens = first_.num_tokens_;
  stats.num_forks = first_.num_forks_;
  return stats;
}

std::int64_t group_manager::num_cross_tokens(seq_id seq) const {
  (void)first_.get(seq);
  return crosses_.empty() ? 0 : crosses_.front()->core->records_[index_of(seq)].num_tokens;
}

std::int64_t group_manager::num_held_blocks(seq_id seq, std::int32_t index) const {
  const layer_group& group = at(index);
  (void)first_.get(seq);
  if (group.core == nullptr) return static_cast<std::int64_t>(group.states->of(index_of(seq)).size());
  return group.core->num_table_blocks(seq) - group.core->num_released_blocks(seq);
}

std::string group_manager::check() const {
  const auto named = [](const layer_group& group, const std::string& problem) {
    return "group " + std::to_string(group.index) + ": " + problem;
  };
  for (const auto& group : groups_) {
    const std::string problem = group->core != nullptr ? group->core->check() : group->states->check();
    if (!problem.empty()) return named(*group, problem);
  }
  for (std::uint32_t i = 0; i < first_.num_records_; ++i) {
    const sequence& record = first_.records_[i];
    const bool is_open = (record.generation & 1) != 0;
    if (is_open && room_ends_[i] != room_end(i))
      return "sequence " + std::to_string(i) + ": the end of its room is off";
    for (const auto& group : groups_) {
      const std::string name = "sequence " + std::to_string(i) + " ";
      if (group->states) {
        const std::span<const state_slots::held_state> states = group->states->of(i);
        if (!is_open) {
          if (!states.empty()) return named(*group, name + "is not open and has states");
          continue;
        }
        const std::int32_t last = states.empty() ? 0 : states.back().position;
        if (last != record.num_tokens) return named(*group, name + "has no state after its last token");
        if (group->states->is_out(i) != (record.writable_end == manager_core::swapped_out)) {
          return named(*group, name + "is on the other side");
        }
        continue;
      }
      const sequence& own = group->core->records_[i];
      if (own.generation != record.generation) return named(*group, name + "has another generation");
      if (!is_open) continue;
      const bool agrees = own.num_tokens == record.num_tokens && own.num_committed == record.num_committed;
      if (group->has_positions() && !agrees) return named(*group, name + "has other numbers of tokens");
      if ((own.writable_end == manager_core::swapped_out) != (record.writable_end == manager_core::swapped_out)) {
        return named(*group, name + "is on the other side");
      }
    }
  }
  return {};
}

std::uint64_t group_manager::digest() const noexcept {
  digest_builder hash;
  for (const auto& group : groups_) {
    if (group->core != nullptr) {
      hash.add(group->core->digest());
    } else {
      group->states->add_to(hash);
    }
    hash.add(group->copies.size());
  }
  for (std::uint32_t i = 0; i < first_.num_records_; ++i) {
    if ((first_.records_[i].generation & 1) == 0) continue;
    for (const std::int32_t place : {marks_[i].longer_hit, marks_[i].last_spaced, marks_[i].last_border}) {
      hash.add(static_cast<std::uint64_t>(place));
    }
    hash.add(marks_[i].rolling.serial);
    hash.add(static_cast<std::uint64_t>(marks_[i].cross_key));
    hash.add(marks_[i].is_cached ? 1 : 0);
  }
  if (states_.empty() || states_.front()->prefix() == nullptr) return hash.value();
  for (const std::uint32_t count : rolling_worth_.counts()) hash.add(count);
  for (std::size_t i = 0; i < is_rolling_.size(); ++i) {
    if (is_rolling_[i] && states_.front()->prefix()->holds(block_id{static_cast<std::int32_t>(i)})) hash.add(i);
  }
  return hash.value();
}

}  // namespace bifolio::inline v0_2::detail

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/copy_audit.hpp>
#include <bifolio/detail/group_manager.hpp>
#include <bifolio/kv_layout.hpp>
#include <cmath>
#include <limits>
#include <numeric>

#include "common/base/make_room.hpp"
#include "common/base/refuse.hpp"
#include "common/base/require.hpp"
#include "common/base/translate.hpp"
#include "common/cache/group_config.hpp"
#include "common/cache/layer_group.hpp"
#include "common/cache/manager_steps.hpp"

namespace bifolio::inline v0_2::detail {
namespace {

/// What the core of another group than the first is configured with.
kv_cache_config config_of(const kv_cache_config& all, const group_config& group, std::uint32_t first_generation) {
  kv_cache_config config = all;
  config.groups.clear();
  config.block_size = group.block_size;
  config.num_blocks = group.num_blocks;
  config.sliding_window = group.kind == group_kind::window ? group.window : 0;
  config.num_host_blocks = group.num_host_blocks;
  if (group.kind == group_kind::cross) config.max_seq_len = group.max_tokens;
  config.first_generation = first_generation | 1;  // 0 would mean another one; the last bit is not used
  return config;
}

}  // namespace

group_manager::group_manager(manager_core& first)
    : first_(first), config_(translate_bad_alloc("kv_cache_manager", [&] { return first.config_; })) {
  translate_bad_alloc("kv_cache_manager", [&] {
    likely_policy_ = config_.prefix.policy == nullptr ? &priority_policy() : config_.prefix.policy;
    if (likely_policy_->make_tracker(idle_queues(first_.pool_)) != nullptr) likely_policy_ = &lru_policy();
    config_.prefix.policy = &priority_policy();  // of the other groups, which are given levels
    marks_.resize(first_.num_records_);
    room_ends_.resize(first_.num_records_, 0);
    for (const group_config& what : config_.groups) {
      groups_.push_back(std::make_unique<layer_group>());
      layer_group& group = *groups_.back();
      group.config = what;
      group.index = num_groups() - 1;
      snapshot_interval_ = std::max<std::int64_t>(snapshot_interval_, what.snapshot_interval);
      group.watermark = static_cast<std::int64_t>(std::floor(config_.watermark * static_cast<double>(what.num_blocks)));
      const auto number = static_cast<std::uint32_t>(group.index);
      if (what.kind == group_kind::state) {
        group.states = std::make_unique<state_slots>(what, config_, std::uint64_t{number} << 56 | 1);
        if (states_.empty()) is_rolling_.resize(static_cast<std::size_t>(what.num_blocks));
        states_.push_back(&group);
        continue;
      }
      if (number == 0) {
        group.core = &first_;
      } else {
        group.owned = std::make_unique<manager_core>(config_of(config_, what, first_.first_generation_),
                                                     core_role::follower, number);
        group.core = group.owned.get();
      }
      if (group.is_cross()) {
        crosses_.push_back(&group);
        continue;
      }
      tables_.push_back(group.core);
      alignment_ = std::lcm(alignment_, std::int64_t{what.block_size});
      group.blocks_per_first = std::max(1, first_.config_.block_size / what.block_size);
    }
  });
  if (snapshot_interval_ > 0) snapshot_interval_ = std::lcm(snapshot_interval_, alignment_);
  records_events_ = config_.prefix.enabled && config_.prefix.record_events;
  first_.groups_ = this;
  first_.num_lone_records_ = 0;
  for (manager_core* core : tables_) core->num_lone_records_ = 0;
  if (first_.prefix_) first_.prefix_->observe_removals(this);
}

group_manager::~group_manager() = default;

group_manager::layer_group& group_manager::at(std::int32_t group) const {
  if (group < 0 || group >= num_groups()) {
    refuse(errc::out_of_range, "layer group ", group, " is not between 0 and ", num_groups() - 1);
  }
  return *groups_[static_cast<std::size_t>(group)];
}

group_manager::sequence_marks& group_manager::marks_of(const sequence& record) const noexcept {
  return marks_[static_cast<std::size_t>(&record - first_.records_)];
}

std::int64_t group_manager::watermark_blocks(std::int32_t group) const { return at(group).watermark; }

std::int64_t group_manager::blocks_at_peak(std::int64_t num_tokens, std::int64_t step_tokens,
                                           std::int32_t index) const {
  const layer_group& group = at(index);
  if (group.states) return 2 + group.config.num_draft_slots;
  if (group.is_cross()) return 0;
  return group.core->blocks_at_peak(num_tokens, step_tokens);
}

alloc_status group_manager::can_allocate(std::int64_t num_tokens, std::int64_t step_tokens,
                                         const group_blocks& promised, std::int64_t num_cross_tokens) const {
  require_between("num_tokens", num_tokens, 1, config_.max_seq_len);
  require_between("step_tokens", step_tokens, 0, INT64_MAX);
  alloc_status status = first_.num_sequences_ == config_.max_sequences ? alloc_status::later : alloc_status::ok;
  for (const auto& group : groups_) {
    const std::int64_t others = promised[static_cast<std::size_t>(group->index)];
    require_between("num_promised", others, 0, max_num_blocks);
    std::int64_t needed = group->watermark + blocks_at_peak(num_tokens, step_tokens, group->index);
    if (group->is_cross()) {
      require_between("num_cross_tokens", num_cross_tokens, 0, group->config.max_tokens);
      needed += group->core->blocks_of(num_cross_tokens);
    }
    if (needed > group->config.num_blocks) return alloc_status::never;
    if (needed + others > group->pool().num_free()) status = alloc_status::later;
  }
  return status;
}

// Room for events of `num_first` blocks that the first group takes or publishes and of `num_own` that each other group
// takes: what the first group loses, others lose with it.
void group_manager::reserve_all_events(std::int64_t num_first, std::int64_t num_own) {
  if (!first_.prefix_) return;
  first_.prefix_->reserve_events(2 * num_first);
  for (const auto& group : groups_) {
    if (group->core != &first_) group->prefix()->reserve_events(4 * num_first * group->blocks_per_first + num_own);
  }
}

allocate_result group_manager::allocate(std::int64_t num_tokens, std::int64_t num_cross_tokens) {
  require_between("num_tokens", num_tokens, 1, config_.max_seq_len);
  const auto need_of = [&](const layer_group& group) -> std::int64_t {
    if (group.states) return group.states->slots_for(num_tokens);
    return group.core->blocks_of(group.is_cross() ? num_cross_tokens : num_tokens);
  };
  if (crosses_.empty()) require_between("num_cross_tokens without a cross group", num_cross_tokens, 0, 0);
  alloc_status status = alloc_status::ok;
  for (const auto& group : groups_) {
    if (group->is_cross()) require_between("num_cross_tokens", num_cross_tokens, 0, group->config.max_tokens);
    status = worse(status, status_of(need_of(*group), group->pool()));
  }
  if (status == alloc_status::ok && first_.free_record_ < 0) status = alloc_status::later;
  if (status != alloc_status::ok) return {invalid_seq, status};
  std::int64_t most = 1;
  for (const auto& group : groups_) {
    most = std::max(most, need_of(*group));
    if (group->core != nullptr) group->core->reserve_allocate(static_cast<std::int32_t>(need_of(*group)));
  }
  translate_bad_alloc("allocate", [&] { reserve_all_events(first_.blocks_of(num_tokens), most); });
  seq_id seq = invalid_seq;
  for (const auto& group : groups_) {
    if (group->core != nullptr) {
      const std::int64_t count = group->is_cross() ? num_cross_tokens : num_tokens;
      const seq_id opened = group->core->open_with_slots(count, static_cast<std::int32_t>(need_of(*group)));
      if (group->index == 0) seq = opened;
      if (group->is_cross()) group->core->find(opened)->writable_end = 0;  // never appended to, and soon shared
    } else {
      group->states->append(index_of(seq), 0, num_tokens);
    }
  }
  note_room(index_of(seq));
  sequence_marks& marks = marks_[index_of(seq)];
  marks = {};
  // Nothing identifies the encoder's input.
  if (num_cross_tokens > 0) {
    marks.is_cached = false;
    if (first_.publications_ != nullptr) first_.publication_of(*first_.find(seq)).num_published = -1;
  }
  return {seq, alloc_status::ok};
}

// --- growing

std::int32_t group_manager::room_end(std::uint32_t index) const noexcept {
  std::int32_t end = std::numeric_limits<std::int32_t>::max();
  for (const manager_core* core : tables_) end = std::min(end, core->records_[index].writable_end);
  return end;
}

// Every decoding sequence passes here in every step, twice.
[[gnu::always_inline]] inline bool group_manager::has_room_at(std::uint32_t index,
                                                              std::int64_t num_tokens) const noexcept {
  if (num_tokens > std::int64_t{room_ends_[index]} - first_.records_[index].num_tokens) return false;
  for (const layer_group* group : states_) {
    const state_slots& states = *group->states;
    if (!states.has_room(index, num_tokens) || states.slots_for(num_tokens) > states.pool().num_free()) return false;
  }
  return !records_events_ || states_.empty();  // a slot that is taken may be one that is evicted
}

bool group_manager::has_room(seq_id seq, std::int64_t num_tokens) const noexcept {
  return first_.find(seq) != nullptr && has_room_at(index_of(seq), num_tokens);
}

bool group_manager::append_in_place(seq_id seq, std::int64_t num_tokens) noexcept {
  const std::uint32_t index = index_of(seq);
  if (num_tokens < 0 || first_.find(seq) == nullptr || !has_room_at(index, num_tokens)) return false;
  const std::int64_t position = first_.records_[index].num_tokens;
  for (const layer_group* group : states_) group->states->append(index, position, num_tokens);
  for (manager_core* core : tables_) {
    core->records_[index].num_tokens += static_cast<std::int32_t>(num_tokens);
    core->num_tokens_ += num_tokens;
  }
  return true;
}

alloc_status group_manager::can_append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead) const {
  const sequence& first = first_.get_resident(seq);
  alloc_status status = alloc_status::ok;
  for (const manager_core* core : tables_) {
    const manager_core::growth grown =
        core->plan_growth(core->records_[&first - first_.records_], num_tokens, num_lookahead);
    status = worse(status, grown.status);
  }
  for (const layer_group* group : states_) {
    group->states->require_room(index_of(seq), num_tokens);
    status = worse(status, status_of(group->states->slots_for(num_tokens), group->states->pool()));
  }
  return status;
}

std::int64_t group_manager::blocks_to_append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead,
                                             std::int32_t index) const {
  const layer_group& group = at(index);
  const sequence& first = first_.get_resident(seq);
  if (group.is_cross()) return 0;
  const manager_core& core = group.core != nullptr ? *group.core : first_;
  const manager_core::growth grown =
      core.plan_growth(core.records_[&first - first_.records_], num_tokens, num_lookahead);
  return group.states ? group.states->slots_for(num_tokens) : grown.num_blocks;
}

append_result group_manager::append(seq_id seq, std::int64_t num_tokens, std::int64_t num_lookahead) {
  if (num_lookahead == 0 && append_in_place(seq, num_tokens)) return {alloc_status::ok, {}};
  const std::ptrdiff_t at = &first_.get_resident(seq) - first_.records_;
  const auto index = static_cast<std::uint32_t>(at);
  std::array<manager_core::growth, max_layer_groups> grown;
  alloc_status status = alloc_status::ok;
  std::int64_t num_taken = 0;
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    grown[i] = tables_[i]->plan_growth(tables_[i]->records_[at], num_tokens, num_lookahead);
    status = worse(status, grown[i].status);
    num_taken = std::max(num_taken, grown[i].num_blocks);
  }
  for (const layer_group* group : states_) {
    group->states->require_room(index, num_tokens);
    status = worse(status, status_of(group->states->slots_for(num_tokens), group->states->pool()));
    num_taken = std::max(num_taken, group->states->slots_for(num_tokens));
  }
  if (status != alloc_status::ok || num_tokens + num_lookahead == 0) return {status, {}};
  for (std::size_t i = 0; i < tables_.size(); ++i) tables_[i]->reserve_append(tables_[i]->records_[at], grown[i]);
  translate_bad_alloc("append", [&] {
    reserve_all_events(grown[0].num_blocks + 1, num_taken + 1);
    for (const auto& group : groups_) make_room(group->copies, 1);
  });
  append_result result{alloc_status::ok, {}};
  const std::int64_t position = first_.records_[at].num_tokens;
  for (const layer_group* group : states_) group->states->append(index, position, num_tokens);
  std::size_t i = 0;
  for (const auto& group : groups_) {
    if (!group->has_positions()) continue;
    const block_copy copy = group->core->grow(group->core->records_[at], grown[i++], num_tokens);
    if (group->index == 0) {
      result.copy = copy;
    } else if (copy.src != invalid_block) {
      group->copies.push_back(copy);
      if (copy_audit* const audit = first_.config_.audit) [[unlikely]]
        audit->announce(copy_kind::on_write, group->index, {&copy, 1}, seq, position);
    }
  }
  note_room(index);
  return result;
}

void group_manager::drain_copies(std::int32_t group, std::vector<block_copy>& copies) {
  std::vector<block_copy>& waiting = at(group).copies;
  translate_bad_alloc("drain_copies", [&] { make_room(copies, waiting.size()); });
  copies.insert(copies.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

std::int64_t group_manager::next_cut(const sequence_marks& marks, std::int64_t position) const noexcept {
  std::int64_t next = std::numeric_limits<std::int64_t>::max();
  if (states_.empty() || !first_.prefix_ || !marks.is_cached) return next;
  for (const std::int32_t place : {marks.longer_hit, marks.last_spaced, marks.last_border}) {
    if (place > position) next = std::min<std::int64_t>(next, place);
  }
  if (snapshot_interval_ > 0) next = std::min(next, (position / snapshot_interval_ + 1) * snapshot_interval_);
  return next;
}

std::int64_t group_manager::step_limit(seq_id seq) const {
  const sequence& record = first_.get_resident(seq);
  const std::int64_t next = next_cut(marks_of(record), record.num_tokens);
  return next == std::numeric_limits<std::int64_t>::max() ? next : next - record.num_tokens;
}

// --- committing

void group_manager::commit_all(sequence& record, std::int64_t num_tokens) noexcept {
  const std::ptrdiff_t at = &record - first_.records_;
  const sequence_marks& marks = marks_[static_cast<std::size_t>(at)];
  const std::int64_t num_committed = record.num_committed + num_tokens;
  for (manager_core* core : tables_) {
    sequence& own = core->records_[at];
    // Of a prompt the levels of its blocks say which are kept longer, as long as they are registered.
    if (core->config_.sliding_window > 0) core->slide(own, num_committed, marks.last_border);
    own.num_committed += static_cast<std::int32_t>(num_tokens);
  }
  for (const layer_group* group : states_) group->states->commit(static_cast<std::uint32_t>(at), num_committed);
  if (num_tokens == 0) return;
  for (layer_group* group : crosses_) {
    sequence& own = group->core->records_[at];
    if (own.num_committed == own.num_tokens) continue;
    own.num_committed = own.num_tokens;
    publish_cross(own, *group);
  }
}

// The common case of a commit, for which no group needs memory: no window gives back a block, and no encoder's output
// is new.
[[gnu::always_inline]] inline bool group_manager::commit_in_place(sequence& record, std::int64_t num_tokens) noexcept {
  if (num_tokens < 0 || num_tokens > std::int64_t{record.num_tokens} - record.num_committed) return false;
  const std::ptrdiff_t at = &record - first_.records_;
  const std::int64_t num_committed = record.num_committed + num_tokens;
  for (const manager_core* core : tables_) {
    // What the tokens before do not see is given back already.
    if (core->first_visible_block(num_committed) != core->first_visible_block(record.num_committed)) return false;
  }
  for (const layer_group* group : crosses_) {
    const sequence& own = group->core->records_[at];
    if (own.num_committed != own.num_tokens) return false;
  }
  for (manager_core* core : tables_) core->records_[at].num_committed += static_cast<std::int32_t>(num_tokens);
  for (const layer_group* group : states_) group->states->commit(static_cast<std::uint32_t>(at), num_committed);
  return true;
}

void group_manager::commit(seq_id seq, std::int64_t num_tokens) {
  sequence& record = first_.get_resident(seq);
  if (first_.publications_ == nullptr && commit_in_place(record, num_tokens)) [[likely]]
    return;
  for (manager_core* core : tables_) {
    core->reserve_commit(core->records_[&record - first_.records_], num_tokens);
    if (core->config_.sliding_window > 0) translate_bad_alloc("commit", [&] { core->slab_.reserve(3); });
  }
  for (const layer_group* group : crosses_) {
    if (group->prefix() == nullptr) continue;
    translate_bad_alloc("commit", [&] {
      group->prefix()->reserve_events(2 *
                                      group->core->table_of(group->core->records_[&record - first_.records_]).size());
    });
  }
  if (first_.publications_ != nullptr && num_tokens > 0) first_.publication_of(record).num_published = -1;
  commit_all(record, num_tokens);
}

void group_manager::commit(seq_id seq, std::span<const token_id> tokens) {
  sequence& record = first_.get_resident(seq);
  const std::ptrdiff_t at = &record - first_.records_;
  const auto num_tokens = static_cast<std::int64_t>(tokens.size());
  if (num_tokens == 1 && first_.publications_ != nullptr) [[likely]] {
    // One more token of a block of the first group that is not full yet.
    const std::int32_t num_published = first_.publication_of(record).num_published;
    const std::int32_t offset = record.num_committed - num_published * first_.config_.block_size;
    if (num_published >= 0 && offset + 1 < first_.config_.block_size && commit_in_place(record, 1)) {
      first_.tail_tokens_of(record)[offset] = tokens[0];
      return;
    }
  }
  require_between("num_tokens", num_tokens, 0, record.num_tokens - record.num_committed);
  const std::int64_t num_published =
      first_.whole_blocks(record.num_committed + num_tokens) - first_.whole_blocks(record.num_committed);
  if (first_.prefix_ && num_published > 0) translate_bad_alloc("commit", [&] { reserve_all_events(num_published, 0); });
  for (const manager_core* core : tables_) {
    if (core->config_.sliding_window == 0) continue;
    const std::int32_t first = core->first_visible_block(record.num_committed + num_tokens);
    // The window's edge may cut a chunk that others share, and so may the edges of what is kept longer.
    if (first > core->tables_[at].first())
      translate_bad_alloc("commit", [&] { const_cast<manager_core*>(core)->slab_.reserve(3); });
  }
  for (const layer_group* group : crosses_) {
    const sequence& own = group->core->records_[at];
    if (group->prefix() == nullptr || own.num_committed == own.num_tokens) continue;
    translate_bad_alloc("commit", [&] { group->prefix()->reserve_events(2 * group->core->table_of(own).size()); });
  }
  if (first_.prefix_) first_.publish_tokens(record, tokens);
  commit_all(record, num_tokens);
}

// --- forking, shrinking, ending

allocate_result group_manager::fork(seq_id seq) {
  const std::ptrdiff_t at = &first_.get_resident(seq) - first_.records_;
  if (first_.free_record_ < 0) return {invalid_seq, alloc_status::later};
  // The first group last: it gives its child a copy of the extra keys.
  for (std::size_t i = groups_.size(); i-- > 0;) {
    if (groups_[i]->core != nullptr) groups_[i]->core->reserve_fork(groups_[i]->core->records_[at]);
  }
  seq_id child = invalid_seq;
  for (const auto& group : groups_) {
    if (group->core == nullptr) {
      group->states->fork(static_cast<std::uint32_t>(at), index_of(child));
      continue;
    }
    const seq_id forked = group->core->fork_record(group->core->records_[at]);
    if (group->index == 0) child = forked;
  }
  note_room(static_cast<std::uint32_t>(at));
  note_room(index_of(child));
  sequence_marks& marks = marks_[index_of(child)];
  marks = marks_[static_cast<std::size_t>(at)];
  marks.rolling = {};  // the parent gives it up
  if (marks.cross_key != no_extras) crosses_.front()->prefix()->retain_extras(marks.cross_key);
  return {child, alloc_status::ok};
}

void group_manager::truncate(seq_id seq, std::int64_t num_tokens) {
  const sequence& record = first_.get_resident(seq);
  const std::ptrdiff_t at = &record - first_.records_;
  require_between("num_tokens", num_tokens, 0, record.num_tokens);
  for (const layer_group* group : states_) {
    if (group->states->can_resume(static_cast<std::uint32_t>(at), num_tokens)) continue;
    refuse(errc::invalid_argument, "truncate to ", num_tokens, " tokens needs the state after them, which group ",
           group->index, " does not keep");
  }
  for (manager_core* core : tables_) core->prepare_truncate(core->records_[at], num_tokens);
  for (manager_core* core : tables_) core->truncate_record(core->records_[at], num_tokens);
  note_room(static_cast<std::uint32_t>(at));
  for (const layer_group* group : states_) group->states->truncate(static_cast<std::uint32_t>(at), num_tokens);
}

void group_manager::free(seq_id seq) {
  sequence& record = first_.get(seq);
  const std::ptrdiff_t at = &record - first_.records_;
  release_marks(record);
  for (std::size_t i = groups_.size(); i-- > 0;) {
    if (groups_[i]->core != nullptr) {
      groups_[i]->core->free_record(groups_[i]->core->records_[at]);
    } else {
      groups_[i]->states->free(static_cast<std::uint32_t>(at));
    }
  }
}

void group_manager::release_marks(const sequence& record) noexcept {
  sequence_marks& marks = marks_of(record);
  if (marks.cross_key != no_extras) crosses_.front()->prefix()->release_extras(marks.cross_key);
  marks = {};
}

void group_manager::reserve_host_memory(std::span<const host_demand> demands) {
  const auto num_demands = static_cast<std::int64_t>(demands.size());
  // A commit may cut three chunks of a window group's table instead of one.
  for (manager_core* core : tables_) core->reserve_host_memory(demands, 2 * num_demands);
  translate_bad_alloc("reserve_host_memory", [&] {
    cross_demands_.clear();
    const auto blocks_in = [&](const manager_core& core, const host_demand& demand) {
      const std::int64_t done = demand.seq == invalid_seq ? 0 : core.whole_blocks(first_.get(demand.seq).num_committed);
      return std::max<std::int64_t>(0, core.blocks_of(demand.num_tokens) - done) + 2;
    };
    std::int64_t num_first = 0;
    for (const host_demand& demand : demands) {
      num_first += blocks_in(first_, demand);
      if (demand.seq == invalid_seq && !crosses_.empty()) {
        cross_demands_.push_back({invalid_seq, crosses_.front()->config.max_tokens});
      }
    }
    for (const auto& group : groups_) {
      make_room(group->copies, demands.size());
      if (!first_.prefix_) continue;
      std::int64_t num_own = 0;
      for (const host_demand& demand : demands) {
        if (group->has_positions()) num_own += blocks_in(*group->core, demand);
        if (group->states) num_own += 2 + group->config.num_draft_slots;
        if (group->is_cross()) num_own += group->core->blocks_of(group->config.max_tokens);
      }
      group->prefix()->reserve_events(2 * num_own + 4 * num_first * group->blocks_per_first);
    }
  });
  for (layer_group* group : crosses_) group->core->reserve_host_memory(cross_demands_);
}

}  // namespace bifolio::inline v0_2::detail

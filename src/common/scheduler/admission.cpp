// SPDX-License-Identifier: Apache-2.0
/// Admission: which waiting requests and swapped sequences get device blocks.

#include <algorithm>
#include <bifolio/scheduler.hpp>

#include "common/scheduler/core.hpp"

namespace bifolio::inline v0_2::detail {
namespace {

/// A look-up walks all blocks of a prompt; one that did not fit is tried again when blocks came free, or after this
/// many steps, because what is cached changes too.
constexpr std::int64_t steps_between_look_ups = 16;

}  // namespace

prompt_view scheduler_core::view_of(const sample_state& sample) const noexcept {
  const request_state& owner = *sample.owner;
  prompt_view view;
  view.tokens = sample.num_known > sample.num_prompt ? std::span<const token_id>(sample.known) : owner.prompt;
  view.scope = {owner.salt, owner.adapter_id};
  view.extras = owner.extra_views;
  const std::size_t num_full = view.tokens.size() / static_cast<std::size_t>(manager_->config().block_size);
  view.keys = std::span(sample.keys).first(std::min(sample.keys.size(), num_full));
  view.retention = owner.retention;
  view.cross = {owner.num_cross_tokens, owner.cross_digest};
  return view;
}

// By rank, and never past a sequence that has to wait, so that none waits forever.
void scheduler_core::admit(std::int64_t& budget) noexcept {
  if (waiting_.head == nullptr && swapped_.head == nullptr) return;
  group_blocks promised = promised_blocks();
  for (;;) {
    sample_state* waiting = waiting_.head;
    sample_state* swapped = swapped_.head;
    if (waiting == nullptr && swapped == nullptr) return;
    if (waiting == nullptr || (swapped != nullptr && ranks_before(*swapped, *waiting))) {
      if (!return_swapped(*swapped, promised)) return;
    } else if (!admit_waiting(*waiting, budget, promised)) {
      return;
    }
  }
}

std::int64_t scheduler_core::blocks_of_fork(std::int32_t group) const noexcept {
  switch (kind_of(group)) {
    case group_kind::full:
    case group_kind::window:
      return 1;
    case group_kind::state:
      return peak_of(1, group);
    case group_kind::cross:
      return 0;
  }
  return 1;
}

bool scheduler_core::admit_waiting(sample_state& sample, std::int64_t& budget, group_blocks& promised) noexcept {
  if (budget == 0 || sample.num_pending > 0) return false;  // its last tokens are still being sampled
  const std::int32_t num_running_slots = sample.owner->forked ? 1 : sample.owner->num_live;
  if (num_running_slots_taken_ + num_running_slots > config_.max_running) return false;
  const bool caches = manager_->prefix() != nullptr;
  const std::int64_t forks = num_running_slots - 1;  // each will need a block of its own
  try {
    if (caches && sample.num_known > sample.num_prompt && sample.known.empty()) prepare_look_up(sample);
    const prompt_view view = view_of(sample);
    // Alone in the pool a request needs no watermark: it was accepted because it fits.
    if (running_.size > 0) {
      std::int64_t free = 0;
      group_blocks others{};
      for (std::int32_t g = 0; g < num_groups_; ++g) {
        const std::int64_t taken = promised[static_cast<std::size_t>(g)];
        free += manager_->num_free_blocks(g) - taken;
        others[static_cast<std::size_t>(g)] = std::min(taken + forks * blocks_of_fork(g), max_num_blocks);
      }
      const std::int64_t step = current_->plan.step;
      if (caches && deferred_ == &sample && free <= deferred_free_blocks_ &&
          step < deferred_step_ + steps_between_look_ups) {
        return false;
      }
      const alloc_status status =
          caches ? manager_->can_open(view, chunk_limit(), others).status
                 : manager_->can_allocate(sample.num_known, chunk_limit(), others, sample.owner->num_cross_tokens);
      if (status != alloc_status::ok) {
        deferred_ = &sample;
        deferred_free_blocks_ = free;
        deferred_step_ = step;
        return false;
      }
    }
    open_result opened;
    const std::int64_t most = std::min(budget, chunk_limit());
    if (caches) {
      opened = manager_->open(view, most);
    } else {
      const allocate_result got =
          manager_->allocate(std::min<std::int64_t>(sample.num_known, most), sample.owner->num_cross_tokens);
      opened.seq = got.seq;
      opened.status = got.status;
    }
    if (opened.status != alloc_status::ok) return false;
    waiting_.remove(sample);
    deferred_ = nullptr;
    start_running(sample, opened.seq, static_cast<std::int32_t>(opened.num_cached_tokens));
    const auto query_len = static_cast<std::int32_t>(manager_->num_tokens(opened.seq) - opened.num_cached_tokens);
    add_to_step(sample, query_len, opened.copy);
    current_->plan.seqs.back().num_cached_tokens = static_cast<std::int32_t>(opened.num_cached_tokens);
    if (sample.owner->num_cached_tokens < 0) sample.owner->num_cached_tokens = opened.num_cached_tokens;
    stats_.num_cached_tokens += opened.num_cached_tokens;
    budget -= query_len;
    if (sample.owner->num_cross_tokens > opened.num_cached_cross_tokens) {
      current_->plan.encoded.push_back(opened.seq);
    }
    for (std::int32_t g = 0; g < num_groups_; ++g) {
      promised[static_cast<std::size_t>(g)] +=
          forks * blocks_of_fork(g) + peak_of(sample.num_known, g) - peak_of(opened.num_cached_tokens + query_len, g);
    }
    return true;
  } catch (...) {
    lacked_memory_ = true;  // nothing else can be wrong
    return false;
  }
}

// Blocks that admitted prompts will still need. Growth by decoding is what the watermark is for.
group_blocks scheduler_core::promised_blocks() const noexcept {
  group_blocks promised{};
  for (const sample_state* sample = running_.head; sample != nullptr; sample = sample->next) {
    for (std::int32_t g = 0; g < num_groups_; ++g) {
      std::int64_t& blocks = promised[static_cast<std::size_t>(g)];
      blocks += (sample->num_running_slots - 1) * blocks_of_fork(g);
      if (sample->num_to_schedule() <= 1) continue;
      const std::int64_t held = manager_->num_held_blocks(sample->seq, g);
      blocks += std::max<std::int64_t>(0, peak_of(sample->num_known, g) - held);
    }
  }
  return promised;
}

// Swapped sequences return when, besides the watermark, each of them can also grow by a block: else the next sequence
// to grow would swap them out again. Alone in the pool they need no such room.
bool scheduler_core::return_swapped(sample_state& first, group_blocks& promised) noexcept {
  std::int64_t num_running_slots = 0;
  group_blocks growth{};
  bool is_pending = false;
  unit_seqs_.clear();
  for_unit(first, [&](const sample_state& sample) {
    num_running_slots += sample.owner->forked ? 1 : sample.owner->num_live;
    for (std::int32_t g = 0; g < num_groups_; ++g) {
      growth[static_cast<std::size_t>(g)] +=
          std::max<std::int64_t>(std::min<std::int64_t>(1, blocks_of_fork(g)),
                                 peak_of(sample.num_known, g) - peak_of(sample.num_scheduled, g));
    }
    is_pending = is_pending || sample.num_pending > 0;
    unit_seqs_.push_back(sample.seq);
  });
  if (is_pending || num_running_slots_taken_ + num_running_slots > config_.max_running) return false;
  step_plan& plan = current_->plan;
  const bool alone = running_.size == 0;
  alloc_status status = alloc_status::later;
  try {
    bool fits = true;
    for (std::int32_t g = 0; g < num_groups_ && !alone; ++g) {
      const auto at = static_cast<std::size_t>(g);
      fits = fits &&
             manager_->blocks_to_swap_in(unit_seqs_, g) + growth[at] + promised[at] + manager_->watermark_blocks(g) <=
                 manager_->num_free_blocks(g);
    }
    if (fits) status = move_unit(false);
  } catch (...) {
    lacked_memory_ = true;
  }
  if (status != alloc_status::ok) {
    // With nothing in flight and nothing else running, waiting cannot help: other code has taken blocks of the manager,
    // or host memory is short. A prompt needs less.
    if (!alone || num_in_flight_ > 0 || !plan.seqs.empty()) return false;
    recompute(first);
    return true;
  }
  for_unit(first, [&](sample_state& sample) {
    swapped_.remove(sample);
    plan.swapped_in.push_back(sample.seq);
    start_running(sample, sample.seq, sample.num_computed);
    sample.swap_step = plan.step;
    ++stats_.num_swap_ins;
  });
  for (std::size_t g = 0; g < promised.size(); ++g) promised[g] += growth[g];
  return true;
}

}  // namespace bifolio::inline v0_2::detail

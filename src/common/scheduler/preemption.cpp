// SPDX-License-Identifier: Apache-2.0
/// How sequences lose their blocks: preemption by either way, failed swaps, the end.

#include <algorithm>
#include <bifolio/scheduler.hpp>

#include "common/base/refuse.hpp"
#include "common/scheduler/core.hpp"

namespace bifolio::inline v0_2::detail {

void scheduler_core::start_running(sample_state& sample, seq_id seq, std::int32_t num_computed) noexcept {
  sample.seq = seq;
  sample.num_scheduled = sample.num_computed = num_computed;
  sample.place = sample_place::running;
  sample.num_running_slots = sample.owner->forked ? 1 : sample.owner->num_live;
  num_running_slots_taken_ += sample.num_running_slots;
  std::vector<token_id>().swap(sample.known);
  running_.insert(sample);
}

void scheduler_core::leave_list(sample_state& sample) noexcept {
  if (sample.place == sample_place::running) running_.remove(sample);
  if (sample.place == sample_place::swapped) swapped_.remove(sample);
  if (sample.place == sample_place::waiting) {
    waiting_.remove(sample);
    if (deferred_ == &sample) deferred_ = nullptr;
  }
}

void scheduler_core::drop_blocks(sample_state& sample) noexcept {
  if (manager_->contains(sample.seq)) manager_->free(sample.seq);  // else it has none, or other code freed it
  sample.seq = invalid_seq;
  num_running_slots_taken_ -= sample.num_running_slots;
  sample.num_running_slots = 0;
  sample.num_scheduled = sample.num_computed = 0;
}

void scheduler_core::preempt(sample_state& sample) noexcept {
  for_unit(sample, [&](const sample_state&) { ++stats_.num_preemptions; });
  if (swap_out(sample)) return;
  for_unit(sample, [&](const sample_state& each) { current_->plan.preempted.push_back(each.seq); });
  recompute(sample);
}

alloc_status scheduler_core::move_unit(bool out) {
  step_plan& plan = current_->plan;
  const auto exchange = [&] {
    for (std::size_t g = 0; g < moves_.size(); ++g) {
      if (g == 0) {
        moves_[g].swap(out ? plan.swap_outs : plan.swap_ins);
      } else {
        moves_[g].swap(out ? plan.groups[g - 1].swap_outs : plan.groups[g - 1].swap_ins);
      }
    }
  };
  exchange();
  try {
    const alloc_status status = out ? manager_->swap_out(unit_seqs_, moves_) : manager_->swap_in(unit_seqs_, moves_);
    exchange();
    return status;
  } catch (...) {
    exchange();
    throw;
  }
}

// Moves `one` and the beams that belong to it to the host, if that is the way to preempt them.
bool scheduler_core::swap_out(sample_state& sample) noexcept {
  const kv_cache_config& cache = manager_->config();
  if (config_.preemption == preemption_mode::recompute || cache.num_host_blocks == 0) return false;
  double num_tokens = 0;
  double num_blocks = 0;
  unit_seqs_.clear();
  for_unit(sample, [&](const sample_state& each) {
    num_tokens += each.num_computed;
    for (std::int32_t g = 0; g < num_groups_; ++g) {
      num_blocks += static_cast<double>(manager_->num_held_blocks(each.seq, g));
    }
    unit_seqs_.push_back(each.seq);
  });
  if (num_tokens == 0) return false;
  if (config_.preemption == preemption_mode::automatic && num_tokens <= config_.swap_block_cost * num_blocks) {
    return false;
  }
  // Each keeps its record; there must remain enough for those that run.
  const auto num_records = swapped_.size + static_cast<std::int64_t>(unit_seqs_.size());
  if (num_records > cache.max_sequences - config_.max_running) return false;
  step_plan& plan = current_->plan;
  // What steps in flight compute is computed again: it is not certain yet.
  try {
    for_unit(sample, [&](const sample_state& each) {
      if (each.num_scheduled > each.num_computed) manager_->truncate(each.seq, each.num_computed);
    });
  } catch (...) {
    return false;  // the sequences are about to be freed
  }
  try {
    if (move_unit(true) != alloc_status::ok) return false;
  } catch (...) {
    return false;
  }
  for_unit(sample, [&](sample_state& each) {
    running_.remove(each);
    num_running_slots_taken_ -= each.num_running_slots;
    each.num_running_slots = 0;
    each.num_scheduled = each.num_computed;
    each.place = sample_place::swapped;
    each.swap_step = plan.step;
    ignore_rows(each, 0, false);
    ++each.epoch;
    swapped_.insert(each);
    plan.swapped_out.push_back(each.seq);
    ++stats_.num_swap_outs;
  });
  return true;
}

// Back to the waiting queue, with all tokens. Beams go back as one request: its prompt is computed once for all, and
// each goes on from there with its own tokens.
void scheduler_core::recompute(sample_state& sample) noexcept {
  request_state& owner = *sample.owner;
  const bool beams = sample.is_beam;
  for (sample_state& each : owner.all()) {
    const bool concerned = beams ? each.place < sample_place::draining : &each == &sample;
    if (!concerned) continue;
    leave_list(each);
    drop_blocks(each);
    ignore_rows(each, 0, false);
    ++each.epoch;
    each.place = beams ? sample_place::unforked : sample_place::waiting;
    each.is_beam = false;
    if (beams) each.num_known = each.num_prompt;
    if (!beams) waiting_.insert(each);
  }
  if (!beams) return;
  owner.forked = false;
  for (sample_state& leader : owner.all()) {
    if (leader.place != sample_place::unforked) continue;
    leader.place = sample_place::waiting;
    waiting_.insert(leader);
    return;
  }
}

// Results of steps in flight that nothing can be done with. A sequence that lost its blocks still takes the token that
// a step in flight samples; samples, beams and drafts are computed again instead.
void scheduler_core::ignore_rows(sample_state& sample, std::int64_t from_step, bool pending_ones) noexcept {
  if (sample.num_rows_in_flight == 0) return;
  for (std::size_t age = 0; age < static_cast<std::size_t>(num_in_flight_); ++age) {
    step_in_flight& step = flight(age);
    if (step.plan.step < from_step) continue;
    for (step_row& row : step.rows) {
      if (row.sample != &sample || row.is_ignored || (row.is_pending && !pending_ones)) continue;
      row.is_ignored = true;
      if (row.is_pending) --sample.num_pending;
    }
  }
}

std::int64_t scheduler_core::fail_swaps(const step_plan& plan) {
  std::size_t age = 0;
  const auto num_in_flight = static_cast<std::size_t>(num_in_flight_);
  while (age < num_in_flight && flight(age).plan.step != plan.step) ++age;
  if (age == num_in_flight) {
    refuse(errc::failed_precondition, "fail_swaps: step ", plan.step, " is not in flight");
  }
  const std::int64_t from_step = plan.step;
  for (; age < num_in_flight; ++age) {
    const step_plan& moved = flight(age).plan;
    manager_->forget_copies(moved.swap_outs, moved.swap_ins);
    for (std::size_t g = 0; g < moved.groups.size(); ++g) {
      manager_->forget_copies(moved.groups[g].swap_outs, moved.groups[g].swap_ins, static_cast<std::int32_t>(g) + 1);
    }
  }
  std::int64_t num_failed = 0;
  for (sample_list* list : {&running_, &swapped_}) {
    for (sample_state* sample = list->head; sample != nullptr;) {
      if (sample->swap_step < from_step) {
        sample = sample->next;
        continue;
      }
      for_unit(*sample, [&](sample_state& each) {
        ignore_rows(each, from_step + 1, true);
        each.swap_step = 0;
        ++num_failed;
      });
      recompute(*sample);
      sample = list->head;
    }
  }
  // Some may have lost those blocks since.
  for (sample_state* sample = waiting_.head; sample != nullptr; sample = sample->next) {
    if (sample->swap_step >= from_step) ignore_rows(*sample, from_step + 1, true);
  }
  stats_.num_failed_swaps += num_failed;
  return num_failed;
}

void scheduler_core::end(sample_state& sample) noexcept {
  leave_list(sample);
  --sample.owner->num_live;
  sample.place = sample_place::draining;
  if (sample.num_rows_in_flight == 0) finish_draining(sample);
}

void scheduler_core::finish_draining(sample_state& sample) noexcept {
  drop_blocks(sample);
  sample.place = sample_place::ended;
  if (--sample.owner->num_open == 0) {
    forget(*sample.owner);
    delete sample.owner;
  }
}

}  // namespace bifolio::inline v0_2::detail

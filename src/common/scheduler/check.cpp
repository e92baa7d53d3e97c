// SPDX-License-Identifier: Apache-2.0
/// scheduler's check and digest.

#include <bifolio/scheduler.hpp>

#include "common/base/hash.hpp"
#include "common/scheduler/core.hpp"

namespace bifolio::inline v0_2::detail {

std::string scheduler_core::check() const {
  if (std::string problem = manager_->check(); !problem.empty()) return problem;
  std::int64_t listed = 0, seats = 0;
  for (const auto* list : {&waiting_, &running_, &swapped_}) {
    const bool runs = list == &running_;
    const bool waits = list == &waiting_;
    const sample_state* before = nullptr;
    std::int64_t size = 0;
    for (const sample_state* sample = list->head; sample != nullptr; before = sample, sample = sample->next, ++size) {
      const std::string name =
          "request " + std::to_string(to_index(sample->owner->id)) + " sample " + std::to_string(sample->index) + ": ";
      if (find(sample->owner->id) != sample->owner) return name + "it is not among the requests";
      if (sample->prev != before) return name + "it does not point back in its list";
      if (before != nullptr && !ranks_before(*before, *sample)) return name + "it is out of the order of rank";
      const sample_place place = runs ? sample_place::running : waits ? sample_place::waiting : sample_place::swapped;
      if (sample->place != place) return name + "it is in another list";
      if (sample->num_known >= sample->limit) return name + "it has all its tokens and has not ended";
      if (waits && (sample->seq != invalid_seq || sample->num_computed != 0)) return name + "it waits and holds blocks";
      if (waits != (sample->seq == invalid_seq)) return name + "it has no sequence";
      if (!waits && !manager_->contains(sample->seq)) return name + "its sequence is gone";
      if (!waits && manager_->is_swapped_out(sample->seq) == runs) return name + "its blocks are on the other side";
      if (!waits && manager_->num_committed(sample->seq) != sample->num_computed) return name + "num_computed is off";
      if (!waits && manager_->num_tokens(sample->seq) != sample->num_scheduled) return name + "num_scheduled is off";
      if (sample->num_rows_in_flight == 0 && sample->num_scheduled != sample->num_computed) {
        return name + "it has slots that nobody fills";
      }
      if (sample->num_rows_in_flight == 0 && sample->num_pending != 0) return name + "nobody samples its token";
      if (sample->num_rows_in_flight == 0 && sample->num_to_schedule() < 1) return name + "nothing is left to compute";
      const std::int64_t sampled = static_cast<std::int64_t>(sample->tokens.size());
      if (sample->num_known != sample->num_prompt + (sample->owner->forked ? sampled : 0))
        return name + "num_known is off";
      if (sample->num_running_slots != (!runs ? 0 : sample->owner->forked ? 1 : sample->owner->num_live))
        return name + "its seats";
      if (sample->owner->beams && sample->owner->forked) {
        for (const sample_state& other : sample->owner->all()) {
          if (other.place < sample_place::draining && other.place != place) return name + "its beams are torn apart";
        }
      }
    }
    if (list->tail != before || list->size != size) return "a list's end or size is off";
    listed += size;
  }
  std::int64_t open = 0;
  for (const request_state* chain : buckets_) {
    for (; chain != nullptr; chain = chain->next) {
      std::int32_t num_open = 0, num_live = 0;
      for (const sample_state& sample : chain->all()) {
        num_open += sample.place != sample_place::ended;
        num_live += sample.place < sample_place::draining;
        open += sample.place == sample_place::waiting || sample.place == sample_place::running ||
                sample.place == sample_place::swapped;
        seats += sample.num_running_slots;
        std::int32_t rows = 0;
        for (std::size_t age = 0; age < static_cast<std::size_t>(num_in_flight_); ++age) {
          for (const step_row& row : flight(age).rows) rows += row.sample == &sample;
        }
        if (rows != sample.num_rows_in_flight) return "a sample counts its rows in flight wrong";
        if (sample.place == sample_place::draining && rows == 0) return "a sample drains without rows in flight";
      }
      if (num_open != chain->num_open || num_open == 0 || num_live != chain->num_live) {
        return "a request counts its open samples wrong";
      }
    }
  }
  if (open != listed) return "a sample is in no list";
  if (seats != num_running_slots_taken_ || seats > config_.max_running)
    return "the counter of running sequences is off";
  return {};
}

std::uint64_t scheduler_core::digest() const noexcept {
  digest_builder hash;
  const auto add = [&](auto value) { hash.add(static_cast<std::uint64_t>(value)); };
  add(manager_->digest());
  for (const auto* list : {&waiting_, &running_, &swapped_}) {
    add(list->size);
    for (const sample_state* sample = list->head; sample != nullptr; sample = sample->next) {
      add(to_index(sample->owner->id));
      add(sample->index);
      add(sample->num_computed);
      add(sample->num_scheduled);
      add(sample->num_pending);
      add(sample->swap_step);
      add(sample->num_rows_in_flight * 2 + (sample->owner->forked ? 1 : 0));
      for (const token_id token : sample->tokens) add(to_index(token));
      for (const token_id token : sample->drafts) add(to_index(token));
    }
  }
  for (std::size_t age = 0; age < static_cast<std::size_t>(num_in_flight_); ++age) {
    const step_in_flight& step = flight(age);
    add(step.plan.step);
    for (std::size_t i = 0; i < step.rows.size(); ++i) {
      add(to_index(step.plan.seqs[i].request));
      add(step.plan.seqs[i].seq_len);
      add(step.rows[i].is_ignored);
      add(step.rows[i].sample->place);
    }
  }
  add(num_planned_);
  add(deferred_ == nullptr ? 0 : to_index(deferred_->owner->id));
  add(deferred_ == nullptr ? 0 : deferred_free_blocks_);
  add(deferred_ == nullptr ? 0 : deferred_step_);
  return hash.value();
}

}  // namespace bifolio::inline v0_2::detail

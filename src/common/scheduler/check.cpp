// SPDX-License-Identifier: Apache-2.0
/// scheduler's check and digest.

#include <bifolio/scheduler.hpp>

#include "common/base/hash.hpp"
#include "common/scheduler/core.hpp"

namespace bifolio::detail {

std::string scheduler_core::check() const {
  if (std::string problem = manager_->check(); !problem.empty()) return problem;
  std::int64_t listed = 0, seats = 0;
  for (const auto* list : {&waiting_, &running_, &swapped_}) {
    const bool runs = list == &running_;
    const bool waits = list == &waiting_;
    const sample_state* before = nullptr;
    std::int64_t size = 0;
    for (const sample_state* one = list->head; one != nullptr; before = one, one = one->next, ++size) {
      const std::string name =
          "request " + std::to_string(to_index(one->owner->id)) + " sample " + std::to_string(one->index) + ": ";
      if (find(one->owner->id) != one->owner) return name + "it is not among the requests";
      if (one->prev != before) return name + "it does not point back in its list";
      if (before != nullptr && !ranks_before(*before, *one)) return name + "it is out of the order of rank";
      const sample_place place = runs ? sample_place::running : waits ? sample_place::waiting : sample_place::swapped;
      if (one->place != place) return name + "it is in another list";
      if (one->num_known >= one->limit) return name + "it has all its tokens and has not ended";
      if (waits && (one->seq != invalid_seq || one->num_computed != 0)) return name + "it waits and holds blocks";
      if (waits != (one->seq == invalid_seq)) return name + "it has no sequence";
      if (!waits && !manager_->contains(one->seq)) return name + "its sequence is gone";
      if (!waits && manager_->is_swapped_out(one->seq) == runs) return name + "its blocks are on the other side";
      if (!waits && manager_->num_committed(one->seq) != one->num_computed) return name + "num_computed is off";
      if (!waits && manager_->num_tokens(one->seq) != one->num_scheduled) return name + "num_scheduled is off";
      if (one->num_rows_in_flight == 0 && one->num_scheduled != one->num_computed) {
        return name + "it has slots that nobody fills";
      }
      if (one->num_rows_in_flight == 0 && one->num_pending != 0) return name + "nobody samples its token";
      if (one->num_rows_in_flight == 0 && one->num_to_schedule() < 1) return name + "nothing is left to compute";
      const std::int64_t sampled = static_cast<std::int64_t>(one->tokens.size());
      if (one->num_known != one->num_prompt + (one->owner->forked ? sampled : 0)) return name + "num_known is off";
      if (one->num_seats != (!runs ? 0 : one->owner->forked ? 1 : one->owner->num_live)) return name + "its seats";
      if (one->owner->beams && one->owner->forked) {
        for (const sample_state& other : one->owner->all()) {
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
      for (const sample_state& one : chain->all()) {
        num_open += one.place != sample_place::ended;
        num_live += one.place < sample_place::draining;
        open += one.place == sample_place::waiting || one.place == sample_place::running ||
                one.place == sample_place::swapped;
        seats += one.num_seats;
        std::int32_t rows = 0;
        for (std::size_t age = 0; age < static_cast<std::size_t>(num_in_flight_); ++age) {
          for (const step_row& row : flight(age).rows) rows += row.sample == &one;
        }
        if (rows != one.num_rows_in_flight) return "a sample counts its rows in flight wrong";
        if (one.place == sample_place::draining && rows == 0) return "a sample drains without rows in flight";
      }
      if (num_open != chain->num_open || num_open == 0 || num_live != chain->num_live) {
        return "a request counts its open samples wrong";
      }
    }
  }
  if (open != listed) return "a sample is in no list";
  if (seats != num_seats_taken_ || seats > config_.max_running) return "the counter of running sequences is off";
  return {};
}

std::uint64_t scheduler_core::digest() const noexcept {
  digest_builder hash;
  const auto add = [&](auto value) { hash.add(static_cast<std::uint64_t>(value)); };
  add(manager_->digest());
  for (const auto* list : {&waiting_, &running_, &swapped_}) {
    add(list->size);
    for (const sample_state* one = list->head; one != nullptr; one = one->next) {
      add(to_index(one->owner->id));
      add(one->index);
      add(one->num_computed);
      add(one->num_scheduled);
      add(one->num_pending);
      add(one->swap_step);
      add(one->num_rows_in_flight * 2 + (one->owner->forked ? 1 : 0));
      for (const token_id token : one->tokens) add(to_index(token));
      for (const token_id token : one->drafts) add(to_index(token));
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
  add(put_off_ == nullptr ? 0 : to_index(put_off_->owner->id));
  add(put_off_ == nullptr ? 0 : put_off_free_);
  add(put_off_ == nullptr ? 0 : put_off_step_);
  return hash.value();
}

}  // namespace bifolio::detail

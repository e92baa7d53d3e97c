// SPDX-License-Identifier: Apache-2.0
/// scheduler's check and digest.

#include <bifolio/scheduler.hpp>

#include "common/hash.hpp"
#include "common/scheduler_state.hpp"

namespace bifolio {

using detail::sample_place;

std::string scheduler::check() const {
  if (std::string problem = manager_->check(); !problem.empty()) return problem;
  std::int64_t listed = 0, seats = 0;
  for (const auto* list : {&waiting_, &running_}) {
    const bool runs = list == &running_;
    const sample_state* before = nullptr;
    std::int64_t size = 0;
    for (const sample_state* one = list->head; one != nullptr; before = one, one = one->next, ++size) {
      const std::string name =
          "request " + std::to_string(to_index(one->owner->id)) + " sample " + std::to_string(one->index) + ": ";
      if (find(one->owner->id) != one->owner) return name + "it is not among the requests";
      if (one->prev != before) return name + "it does not point back in its list";
      if (before != nullptr && !arrived_before(*before, *one)) return name + "it is out of the order of arrival";
      if (one->place != (runs ? sample_place::running : sample_place::waiting)) return name + "it is in another list";
      if (one->num_remaining() < 1) return name + "nothing is left to compute";
      if (one->in_step && !(in_flight_ && runs)) return name + "it is marked as part of a step";
      if (!runs && (one->seq != invalid_seq || one->num_computed != 0)) return name + "it waits and holds blocks";
      if (runs && !manager_->contains(one->seq)) return name + "its sequence is gone";
      if (runs && manager_->num_committed(one->seq) != one->num_computed) return name + "num_computed is off";
      if (runs && !one->in_step && manager_->num_tokens(one->seq) != one->num_computed) {
        return name + "it has slots that nobody fills";
      }
      if (runs) seats += one->num_seats();
    }
    if (list->tail != before || list->size != size) return "a list's end or size is off";
    listed += size;
  }
  if (seats != num_seats_taken_ || seats > config_.max_running) return "the counter of running sequences is off";
  std::int64_t open = 0;
  for (const request_state* chain : buckets_) {
    for (; chain != nullptr; chain = chain->next) {
      std::int32_t samples = 0;
      for (std::int32_t i = 0; i < chain->num_samples; ++i) {
        const sample_place place = chain->samples[static_cast<std::size_t>(i)].place;
        samples += place != sample_place::ended;
        open += place == sample_place::waiting || place == sample_place::running;
      }
      if (samples != chain->num_open || samples == 0) return "a request counts its open samples wrong";
    }
  }
  if (open != listed) return "a sample is in no list";
  return {};
}

std::uint64_t scheduler::digest() const noexcept {
  detail::digest_builder hash;
  hash.add(manager_->digest());
  for (const auto* list : {&waiting_, &running_}) {
    hash.add(static_cast<std::uint64_t>(list->size));
    for (const sample_state* one = list->head; one != nullptr; one = one->next) {
      hash.add(to_index(one->owner->id));
      hash.add(static_cast<std::uint64_t>(one->index));
      hash.add(static_cast<std::uint64_t>(one->num_computed));
      hash.add(static_cast<std::uint64_t>(one->owner->forked) * 4 +
               static_cast<std::uint64_t>(one->owner->aborted) * 2 + static_cast<std::uint64_t>(one->in_step));
      for (const token_id token : one->tokens) hash.add(static_cast<std::uint64_t>(to_index(token)));
    }
  }
  hash.add(static_cast<std::uint64_t>(plan_.step) * 2 + (in_flight_ ? 1 : 0));
  return hash.value();
}

}  // namespace bifolio

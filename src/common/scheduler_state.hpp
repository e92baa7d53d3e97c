// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The scheduler's own records: requests, their samples, and the lists that the samples stand in.

#include <algorithm>
#include <bifolio/scheduler.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <memory>
#include <vector>

namespace bifolio::detail {

enum class sample_place : std::uint8_t {
  unforked,  ///< its request's prompt is still being computed, by sample 0 for all
  waiting,   ///< in the waiting list, without blocks
  running,   ///< in the running list, with a sequence of the manager
  ended,
};

struct sample_state {
  request_state* owner = nullptr;
  std::int32_t index = 0;
  sample_place place = sample_place::unforked;
  bool in_step = false;           ///< part of the step in flight
  seq_id seq = invalid_seq;       ///< while running
  std::int64_t num_computed = 0;  ///< leading tokens whose K and V are in the cache
  std::vector<token_id> tokens;   ///< sampled
  sample_state* prev = nullptr;
  sample_state* next = nullptr;

  /// Tokens whose value is known: the prompt and what was sampled. The last sampled one is not computed yet.
  [[nodiscard]] std::int64_t num_known() const noexcept;
  [[nodiscard]] std::int64_t num_remaining() const noexcept { return num_known() - num_computed; }
  [[nodiscard]] token_id token_at(std::int64_t position) const noexcept;
  /// Running sequences that this one stands for: an unforked request's sample 0 keeps the places of all.
  [[nodiscard]] std::int64_t num_seats() const noexcept;
  [[nodiscard]] bool is_decoding() const noexcept { return num_remaining() == 1 && !tokens.empty(); }
};

struct request_state {
  request_id id = invalid_request;
  std::vector<token_id> prompt;
  std::int64_t max_new_tokens = 0;
  std::int32_t num_samples = 1;
  std::int32_t num_open = 1;  ///< samples that have not ended
  bool forked = false;        ///< each sample goes its own way
  bool aborted = false;       ///< gone when the step in flight is committed
  std::unique_ptr<sample_state[]> samples;
  request_state* next = nullptr;  ///< in its bucket, or among the arrivals
};

inline std::int64_t sample_state::num_known() const noexcept {
  return static_cast<std::int64_t>(owner->prompt.size() + tokens.size());
}

inline token_id sample_state::token_at(std::int64_t position) const noexcept {
  const auto i = static_cast<std::size_t>(position);
  return i < owner->prompt.size() ? owner->prompt[i] : tokens[i - owner->prompt.size()];
}

inline std::int64_t sample_state::num_seats() const noexcept { return owner->forked ? 1 : owner->num_samples; }

[[nodiscard]] inline bool arrived_before(const sample_state& a, const sample_state& b) noexcept {
  return a.owner->id != b.owner->id ? a.owner->id < b.owner->id : a.index < b.index;
}

/// From the back, where nearly all belong.
inline void insert(sample_list& list, sample_state& one) noexcept {
  sample_state* before = list.tail;
  while (before != nullptr && arrived_before(one, *before)) before = before->prev;
  sample_state* after = before != nullptr ? before->next : list.head;
  one.prev = before;
  one.next = after;
  (before != nullptr ? before->next : list.head) = &one;
  (after != nullptr ? after->prev : list.tail) = &one;
  ++list.size;
}

inline void remove(sample_list& list, sample_state& one) noexcept {
  (one.prev != nullptr ? one.prev->next : list.head) = one.next;
  (one.next != nullptr ? one.next->prev : list.tail) = one.prev;
  one.prev = one.next = nullptr;
  --list.size;
}

}  // namespace bifolio::detail

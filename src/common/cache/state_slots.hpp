// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The states of the sequences of one layer group: which slot (a block of the group's pool) holds the state after which
/// number of tokens.
///
/// A state is written once, by the step that computes it, and never changed: each step reads the state before it and
/// writes to fresh slots. So a step that is aborted, and drafts that are refused, are undone by giving up the slots
/// after them; samples of one prompt share its state; and a snapshot for later prompts is a slot that is registered
/// instead of copied. A sequence holds the state after its committed tokens and those of steps that are not committed,
/// in order; the one that its last token wrote is always among them.
///
/// Everything is in flat arrays, `capacity` entries per sequence, so that a decoding step takes and gives back one slot
/// and touches two cache lines.

#include <algorithm>
#include <bifolio/block_pool.hpp>
#include <bifolio/buffer.hpp>
#include <bifolio/kv_cache_config.hpp>
#include <bifolio/layer_groups.hpp>
#include <bifolio/prefix_cache.hpp>
#include <bifolio/step.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/cache/group_config.hpp"

namespace bifolio::inline v0_2::detail {

class digest_builder;

class state_slots {
 public:
  struct held_state {
    std::int32_t position;  ///< tokens that the state has taken in, ≥ 1; before the first there is nothing to keep
    block_id slot;
  };

  /// `options.memory` is set. Throws `error` (out_of_memory), std::bad_alloc.
  state_slots(const group_config& group, const kv_cache_config& options, std::uint64_t first_serial);

  [[nodiscard]] const block_pool& pool() const noexcept { return pool_; }
  [[nodiscard]] block_pool& pool() noexcept { return pool_; }
  [[nodiscard]] prefix_cache* prefix() const noexcept { return prefix_.get(); }
  [[nodiscard]] block_pool* host() const noexcept { return host_.get(); }
  [[nodiscard]] std::span<const held_state> of(std::uint32_t record) const noexcept {
    return {entries_ + std::size_t{record} * capacity_, counts_[record]};
  }
  /// The slot with the state after `position` tokens; `invalid_block` when it is not kept, and for 0 tokens.
  [[nodiscard]] block_id at(std::uint32_t record, std::int64_t position) const noexcept {
    for (const held_state& state : of(record)) {
      if (state.position == position) return state.slot;
    }
    return invalid_block;
  }
  /// The states that the step from `begin` to `end` tokens writes; the one that it reads is right before them, unless
  /// `begin` is 0. Empty when these are not the states of one step.
  [[nodiscard]] std::span<const held_state> written_by(std::uint32_t record, std::int64_t begin,
                                                       std::int64_t end) const noexcept {
    const std::span<const held_state> states = of(record);
    std::size_t last = states.size();
    while (last > 0 && states[last - 1].position > end) --last;
    const auto count = static_cast<std::size_t>(slots_for(end - begin));
    if (count > last || states[last - 1].position != end) return {};
    const std::size_t first = last - count;
    const std::int64_t before = first > 0 ? states[first - 1].position : 0;
    return before == begin ? states.subspan(first, count) : std::span<const held_state>{};
  }
  /// Whether a sequence can go on after `position` tokens.
  [[nodiscard]] bool can_resume(std::uint32_t record, std::int64_t position) const noexcept {
    return position == 0 || at(record, position) != invalid_block;
  }

  [[nodiscard]] std::int64_t slots_for(std::int64_t num_tokens) const noexcept {
    return states_of_step(num_tokens, num_draft_slots_);
  }
  /// Throws `error` (failed_precondition): more steps are not committed than states are kept of.
  void require_room(std::uint32_t record, std::int64_t num_tokens) const;
  [[nodiscard]] bool has_room(std::uint32_t record, std::int64_t num_tokens) const noexcept {
    return counts_[record] + slots_for(num_tokens) <= capacity_;
  }
  /// The slots that a step of `num_tokens` tokens after `position` writes. Requires as many free slots, and room.
  void append(std::uint32_t record, std::int64_t position, std::int64_t num_tokens) noexcept {
    const std::int64_t count = slots_for(num_tokens);
    held_state* end = entries_ + std::size_t{record} * capacity_ + counts_[record];
    for (std::int64_t i = 0; i < count; ++i) {
      *end++ = {static_cast<std::int32_t>(position + num_tokens - count + 1 + i), take()};
    }
    counts_[record] += static_cast<std::uint32_t>(count);
    num_entries_ += count;
    peak_used_ = std::max(peak_used_, pool_.num_used());
  }
  /// A new sequence that begins with a snapshot of the first `position` tokens (0: with none).
  void open(std::uint32_t record, std::int64_t position, block_id snapshot) noexcept;
  /// Gives up the states before the last one that has taken in no more than `position` tokens.
  void commit(std::uint32_t record, std::int64_t position) noexcept {
    const held_state* states = entries_ + std::size_t{record} * capacity_;
    std::uint32_t num_past = 0;
    while (num_past + 1 < counts_[record] && states[num_past + 1].position <= position) ++num_past;
    if (num_past > 0) drop_first(record, num_past);
  }
  /// Gives up the states after `position`.
  void truncate(std::uint32_t record, std::int64_t position) noexcept;
  void fork(std::uint32_t parent, std::uint32_t child) noexcept;
  void free(std::uint32_t record) noexcept;

  // Swapping. Sequences of one call that share a state share its copy.
  [[nodiscard]] bool is_out(std::uint32_t record) const noexcept { return out_[record] != 0; }
  /// Slots of the other pool that moving `records` takes, in scratch memory that `reserve_move` made.
  [[nodiscard]] std::int64_t slots_to_move(std::span<const std::uint32_t> records) const noexcept;
  void reserve_move(std::span<const std::uint32_t> records, std::vector<block_copy>& copies) const;
  void move(std::span<const std::uint32_t> records, bool out, std::vector<block_copy>& copies) noexcept;

  [[nodiscard]] cache_stats stats() const noexcept;
  [[nodiscard]] std::string check() const;
  void add_to(digest_builder& hash) const noexcept;

 private:
  [[nodiscard]] block_id take() noexcept {
    ++num_allocated_;
    if (prefix_) {
      // Mostly one that was given up a moment ago: it has nothing to evict, nor has the next one.
      const block_id next = pool_.front(0);
      if (next == invalid_block || prefix_->holds(next)) return prefix_->allocate_one();
    }
    return pool_.allocate_one();
  }
  void release(block_id slot, bool out) noexcept {
    const bool is_snapshot = !out && prefix_ && prefix_->holds(slot);
    (out ? *host_ : pool_).release(slot, is_snapshot ? reuse_order::last : reuse_order::first);
  }
  void drop_first(std::uint32_t record, std::uint32_t count) noexcept {
    held_state* states = entries_ + std::size_t{record} * capacity_;
    for (std::uint32_t i = 0; i < count; ++i) release(states[i].slot, false);
    counts_[record] -= count;
    num_entries_ -= count;
    for (std::uint32_t i = 0; i < counts_[record]; ++i) states[i] = states[i + count];
  }

  std::int32_t num_draft_slots_;
  std::uint32_t num_records_;
  std::uint32_t capacity_;
  block_pool pool_;
  std::unique_ptr<prefix_cache> prefix_;
  std::unique_ptr<block_pool> host_;
  buffer storage_;
  held_state* entries_ = nullptr;         // [num_records_, capacity_]
  std::uint32_t* counts_ = nullptr;       // [num_records_]
  std::uint8_t* out_ = nullptr;           // [num_records_], whether its slots are the host's
  mutable std::vector<block_id> moving_;  // scratch
  std::int64_t num_entries_ = 0;          // of sequences that are not swapped out
  std::int64_t num_swapped_ = 0;
  std::int64_t num_slots_out_ = 0;
  std::int64_t num_slots_in_ = 0;
  std::int64_t peak_used_ = 0;
  std::int64_t num_allocated_ = 0;
};

}  // namespace bifolio::inline v0_2::detail

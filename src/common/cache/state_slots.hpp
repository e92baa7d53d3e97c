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

namespace bifolio::detail {

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
  [[nodiscard]] block_id at(std::uint32_t record, std::int64_t position) const noexcept;
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
  void append(std::uint32_t record, std::int64_t position, std::int64_t num_tokens) noexcept;
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
  [[nodiscard]] block_id take() noexcept;
  void release(block_id slot, bool out) noexcept;
  void drop_first(std::uint32_t record, std::uint32_t count) noexcept;

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

}  // namespace bifolio::detail

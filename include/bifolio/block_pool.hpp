// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A fixed set of blocks, each with a reference count, and the free blocks in eviction order. The pool hands out ids
/// and never touches the contents of blocks. It knows nothing of sequences, nor of what makes contents worth keeping.
///
/// Eviction order: there are eight queues, one per level. Blocks of the lowest level are handed out first, within a
/// level from the front. Level 0 is for blocks whose contents are worthless; the prefix cache (prefix_cache.hpp) raises
/// the level of contents that it keeps. Every operation is O(1) per block.
///
/// Fences, for engines that submit a step before the step before it has finished: a block that loses its last reference
/// between `open_fence` and `retire` is neither used nor free until all fences that were open then have retired,
/// because a kernel in flight may still read or write it.

#include <bifolio/detail/block_queues.hpp>
#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/types.hpp>
#include <bit>
#include <cstdint>
#include <span>
#include <string>

namespace bifolio::inline v0_2 {

/// Block ids stay below this, so that `padding_entry` (step.hpp) never names a block.
inline constexpr std::int64_t max_num_blocks = 2147480000;

/// Where a block enters the queue of its level when its last reference is released.
enum class reuse_order : std::uint8_t {
  last,   ///< after every block that is free now: its contents may be wanted again
  first,  ///< before all others: its contents are worthless
};

/// Eviction level of a block, 0 … num_block_levels − 1: no block is handed out while one of a lower level is free.
using block_level = std::uint8_t;
inline constexpr block_level num_block_levels = 8;

/// A point in the order of submitted steps; see `block_pool::open_fence`. Numbered from 1.
enum class fence_id : std::uint64_t {};

/// Thread-safety: one thread at a time.
class BIFOLIO_API block_pool {
 public:
  /// All blocks are free, in the order of their ids. `memory` is borrowed and must outlive the pool.
  /// Throws `error`: invalid_argument unless 1 ≤ num_blocks ≤ max_num_blocks, out_of_memory.
  explicit block_pool(std::int64_t num_blocks, memory_resource& memory = default_host_memory());
  block_pool(const block_pool&) = delete;
  block_pool& operator=(const block_pool&) = delete;

  [[nodiscard]] std::int64_t num_blocks() const noexcept { return num_blocks_; }
  [[nodiscard]] std::int64_t num_free() const noexcept { return num_free_; }
  /// Blocks with references, and blocks that wait for a fence.
  [[nodiscard]] std::int64_t num_used() const noexcept { return num_blocks_ - num_free_; }
  /// Blocks without references that wait for a fence.
  [[nodiscard]] std::int64_t num_fenced() const noexcept { return num_fenced_; }

  /// Takes out.size() blocks in eviction order, each with one reference; all of them or none.
  /// `later`: fewer are free now. `never`: the pool has fewer. Nothing changes in both cases.
  [[nodiscard]] alloc_status allocate(std::span<block_id> out) noexcept;

  /// One block, or `invalid_block` when none is free.
  [[nodiscard]] block_id allocate_one() noexcept {
    if (num_free_ == 0) return invalid_block;
    const block_id id = queues_.pop_front(lowest_level());
    queues_.of(id).num_refs = 1;
    --num_free_;
    return id;
  }

  /// Adds a reference to each of `ids`, which are all in use. Throws `error`: invalid_argument (an id outside the
  /// pool), not_found (a free block); nothing has changed then.
  void retain(std::span<const block_id> ids);
  void retain(block_id id) {
    if (is_used(id)) [[likely]] {
      ++queues_.of(id).num_refs;
    } else {
      throw_not_used(id, "retain");
    }
  }

  /// Adds a reference to a block in any state: in use, free or waiting for a fence. A prefix hit takes up contents that
  /// are still there in this way. Throws `error` (invalid_argument) for an id outside the pool.
  void touch(block_id id) {
    if (!is_used(id)) [[unlikely]]
      leave_queue(id);
    ++queues_.of(id).num_refs;
  }

  /// Removes a reference from each of `ids`. Blocks that lose their last one become free, the last of `ids` first, so
  /// that the tail of a sequence is evicted before its head. Throws `error`: invalid_argument (an id outside the pool),
  /// not_found (a block without that many references: a double free); nothing has changed then.
  void release(std::span<const block_id> ids, reuse_order order = reuse_order::last);
  void release(block_id id, reuse_order order = reuse_order::last) {
    if (!is_used(id)) [[unlikely]]
      throw_not_used(id, "release");
    if (--queues_.of(id).num_refs == 0) push(id, order);
  }

  /// Moves a block to another level; a free one to the back of the new level's queue. Throws `error`: invalid_argument
  /// (an id outside the pool, a level ≥ num_block_levels).
  void set_level(block_id id, block_level level) {
    if (is_used(id) && level < num_block_levels) [[likely]] {
      queues_.set_level_unqueued(id, level);
    } else {
      set_level_of_unused(id, level);
    }
  }
  /// Requires a block of the pool.
  [[nodiscard]] block_level level(block_id id) const noexcept { return static_cast<block_level>(queues_.level(id)); }

  /// Moves a free block to an end of the queue of `level`, which becomes its level: for eviction policies that
  /// reconsider a block when its turn comes. Requires a free block of the pool and a level < num_block_levels.
  void requeue(block_id id, block_level level, reuse_order order) noexcept;
  /// The free block of a level that is handed out first; `invalid_block` when the level has none.
  [[nodiscard]] block_id front(block_level level) const noexcept {
    return queues_.is_empty(level) ? invalid_block : queues_.front(level);
  }

  /// From now on, blocks that lose their last reference wait until this fence and all before it have retired.
  /// Throws `error` (failed_precondition) when max_open_fences are open.
  fence_id open_fence();
  /// Fences retire in the order in which they were opened. Blocks that wait for this one become free, in the order in
  /// which they were released, unless they were touched meanwhile. Throws `error` (invalid_argument) for any but the
  /// oldest open fence.
  void retire(fence_id fence);
  static constexpr std::uint32_t max_open_fences = 16;
  [[nodiscard]] std::uint32_t num_open_fences() const noexcept { return num_fences_; }

  /// Neither used nor waiting for a fence. Requires a block of the pool.
  [[nodiscard]] bool is_free(block_id id) const noexcept {
    return queues_.is_queued(id) && queues_.queue_of(id) < num_block_levels;
  }
  /// References to a block; 0 for a free one. Throws `error` (invalid_argument) for an id outside the pool.
  /// A chunk of a block table that several sequences share (block_table.hpp) holds one reference for all of them.
  [[nodiscard]] std::uint32_t num_refs(block_id id) const;
  [[nodiscard]] bool is_shared(block_id id) const noexcept { return queues_.of(id).num_refs > 1; }

  /// Copies the first out.size() free blocks, the next to be handed out first. For tests and tools; O(out.size() +
  /// queues). Returns how many there were.
  std::int64_t peek_free(std::span<block_id> out) const noexcept;

  /// Prefetch hints, for callers that work on many blocks. They change nothing. The block that will be handed out after
  /// `distance` others; `invalid_block` when finding it takes a long look.
  [[nodiscard]] block_id upcoming(std::uint32_t distance) const noexcept {
    return num_free_ == 0 ? invalid_block : queues_.upcoming(lowest_level(), distance);
  }
  /// `ids` are about to be retained or released. Any ids.
  void prefetch(std::span<const block_id> ids) const noexcept {
    for (const block_id id : ids) {
      if (is_block(id)) queues_.prefetch_record(id);
    }
  }
  /// A free block is about to be touched: call the first some time before the second, and that some time before
  /// `touch`. Require a block of the pool that was prefetched.
  void prefetch_node(block_id id) const noexcept { queues_.prefetch_node(id); }
  void prefetch_neighbours(block_id id) const noexcept { queues_.prefetch_neighbours(id); }

  /// The first broken invariant as a sentence; empty when all hold. O(num_blocks).
  [[nodiscard]] std::string check() const;
  /// Hash of all reference counts and levels and of the order in each queue, those of fences too. O(num_blocks).
  [[nodiscard]] std::uint64_t digest() const noexcept;

 private:
  /// Whether the pool has a block of this id; as unsigned numbers, negative ids are above all others.
  [[nodiscard]] bool is_block(block_id id) const noexcept {
    return static_cast<std::uint32_t>(id) < static_cast<std::uint32_t>(num_blocks_);
  }
  [[nodiscard]] bool is_used(block_id id) const noexcept { return is_block(id) && queues_.of(id).num_refs != 0; }
  /// Requires a free block; queues of levels come before those of fences.
  [[nodiscard]] std::uint32_t lowest_level() const noexcept {
    return static_cast<std::uint32_t>(std::countr_zero(queues_.filled()));
  }
  void push(block_id id, reuse_order order) noexcept {
    if (num_fences_ != 0) [[unlikely]] {
      queues_.push_back(id, fence_queue(num_fences_ - 1));
      ++num_fenced_;
      return;
    }
    push_free(id, order);
  }
  void push_free(block_id id, reuse_order order) noexcept {
    if (order == reuse_order::last) {
      queues_.push_back(id, queues_.level(id));
    } else {
      queues_.push_front(id, queues_.level(id));
    }
    ++num_free_;
  }
  /// Queue of the i-th oldest open fence.
  [[nodiscard]] std::uint32_t fence_queue(std::uint32_t i) const noexcept {
    return num_block_levels + static_cast<std::uint32_t>((oldest_fence_ + i) % max_open_fences);
  }
  void leave_queue(block_id id);
  void set_level_of_unused(block_id id, block_level level);
  [[noreturn]] void throw_not_used(block_id id, const char* what) const;

  std::int64_t num_blocks_;
  std::int64_t num_free_ = 0;
  std::int64_t num_fenced_ = 0;
  std::uint32_t num_fences_ = 0;    // open
  std::uint64_t oldest_fence_ = 1;  // that one's number, or the next one's when none is open
  detail::block_queues queues_;
};

}  // namespace bifolio::inline v0_2

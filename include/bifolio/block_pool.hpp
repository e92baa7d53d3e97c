// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A fixed set of blocks, each with a reference count, and a queue of the free ones in eviction order. It hands out
/// ids and never touches what the blocks hold; it knows nothing of sequences.
///
/// One 16-byte record a block: the two links of an intrusive doubly-linked list and the reference count. The list runs
/// through the records of the free blocks; one record past the last is its head and tail. The front is handed out next,
/// so a block whose contents are of no more use is released to the front and one whose contents may be wanted again to
/// the back. Every operation is O(1) a block; nothing is allocated after construction.

#include <bifolio/buffer.hpp>
#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <span>
#include <string>

namespace bifolio {

/// Block ids stay below this, so that `free_table_entry` (step.hpp) never names a block.
inline constexpr std::int64_t max_num_blocks = 2147480000;

/// Where in the eviction order a block goes when its last reference is released.
enum class reuse_order : std::uint8_t {
  last,   ///< after every block that is free now: its contents may be wanted again
  first,  ///< before all others: its contents are worthless
};

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
  [[nodiscard]] std::int64_t num_used() const noexcept { return num_blocks_ - num_free_; }

  /// Takes out.size() blocks off the front of the queue, each with one reference; all of them or none.
  /// `later`: fewer are free now. `never`: the pool has fewer. Nothing changes in both cases.
  [[nodiscard]] alloc_status allocate(std::span<block_id> out) noexcept;

  /// One block, or `invalid_block` when none is free.
  [[nodiscard]] block_id allocate_one() noexcept {
    const std::uint32_t index = records_[sentinel()].next;
    if (index == sentinel()) return invalid_block;
    record& taken = records_[index];
    records_[sentinel()].next = taken.next;
    records_[taken.next].prev = sentinel();
    prefetch(taken.next);
    taken.prev = not_linked;
    taken.num_refs = 1;
    --num_free_;
    return block_id{static_cast<std::int32_t>(index)};
  }

  /// One more reference to each of `ids`, which are all in use. Throws `error`: invalid_argument (an id outside the
  /// pool), not_found (a free block); nothing has changed then.
  void retain(std::span<const block_id> ids);
  void retain(block_id id) {
    if (is_used(id)) [[likely]] {
      ++record_of(id).num_refs;
    } else {
      throw_not_used(id, "retain");
    }
  }

  /// One reference less to each of `ids`. Blocks that lose their last one become free, the last of `ids` first, so that
  /// the tail of a sequence is evicted before its head. Throws `error`: invalid_argument (an id outside the pool),
  /// not_found (a block without that many references: a double free); nothing has changed then.
  void release(std::span<const block_id> ids, reuse_order order = reuse_order::last);
  void release(block_id id, reuse_order order = reuse_order::last) {
    if (!is_used(id)) [[unlikely]]
      throw_not_used(id, "release");
    record& one = record_of(id);
    if (--one.num_refs == 0) link(static_cast<std::uint32_t>(to_index(id)), order);
  }

  /// References to a block; 0 for a free one. Throws `error` (invalid_argument) for an id outside the pool.
  /// A chunk of a block table that several sequences share (block_table.hpp) holds one reference for all of them.
  [[nodiscard]] std::uint32_t num_refs(block_id id) const;
  [[nodiscard]] bool is_shared(block_id id) const noexcept { return record_of(id).num_refs > 1; }

  /// Copies the first out.size() free blocks, next to be handed out first. For tests and tools; O(out.size()).
  /// Returns how many there were.
  std::int64_t peek_free(std::span<block_id> out) const noexcept;

  /// The first broken invariant as a sentence; empty when all hold. O(num_blocks).
  [[nodiscard]] std::string check() const;
  /// Hash of all reference counts and of the order of the free queue. O(num_blocks).
  [[nodiscard]] std::uint64_t digest() const noexcept;

 private:
  struct record {
    std::uint32_t prev;  ///< not_linked while in use
    std::uint32_t next;
    std::uint32_t num_refs;
    std::uint32_t reserved;
  };
  static constexpr std::uint32_t not_linked = UINT32_MAX;

  [[nodiscard]] std::uint32_t sentinel() const noexcept { return static_cast<std::uint32_t>(num_blocks_); }
  [[nodiscard]] record& record_of(block_id id) const noexcept { return records_[static_cast<std::uint32_t>(id)]; }
  [[nodiscard]] bool is_used(block_id id) const noexcept {
    return static_cast<std::uint32_t>(id) < sentinel() && record_of(id).num_refs != 0;
  }
  void prefetch(std::uint32_t index) const noexcept { __builtin_prefetch(&records_[index], 1); }
  void link(std::uint32_t index, reuse_order order) noexcept {
    const std::uint32_t before = order == reuse_order::last ? records_[sentinel()].prev : sentinel();
    const std::uint32_t after = order == reuse_order::last ? sentinel() : records_[sentinel()].next;
    records_[index].prev = before;
    records_[index].next = after;
    records_[before].next = index;
    records_[after].prev = index;
    ++num_free_;
  }
  [[noreturn]] void throw_not_used(block_id id, const char* what) const;

  std::int64_t num_blocks_ = 0;
  std::int64_t num_free_ = 0;
  record* records_ = nullptr;  // [num_blocks_ + 1]
  buffer storage_;
};

}  // namespace bifolio

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A fixed set of blocks, each with a reference count, and a queue of the free ones in eviction order. It hands out
/// ids and never touches what the blocks hold; it knows nothing of sequences.
///
/// Two arrays, made once. One 8-byte record a block: its reference count and, while it is free, its place in the queue.
/// And the queue: a doubly-linked list of nodes of one cache line, each with up to 13 ids in order; only the first and
/// the last node are partly filled. The front is handed out next, so a block whose contents are of no more use is
/// released to the front and one whose contents may be wanted again to the back. Every operation is O(1) a block.
///
/// Why nodes, and not links in the records: after some traffic the queue runs through memory in random order, and each
/// allocation waits for the record that only the one before it names: 146 ns a block with links, 7 ns with nodes
/// (1,000,000 blocks freed in random order, Zen 4).

#include <array>
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

namespace detail {
/// Asks for a cache line that is about to be written. The empty asm keeps GCC 12 from deleting functions that do
/// nothing else.
[[gnu::always_inline]] inline void prefetch_to_write(const void* address) noexcept {
  __builtin_prefetch(address, 1);
  asm volatile("" : : "r"(address));
}
}  // namespace detail

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
    if (num_free_ == 0) return invalid_block;
    const block_id id = pop_front();
    record_of(id).num_refs = 1;
    return id;
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
    if (--one.num_refs == 0) push(id, order);
  }

  /// A hint that `ids` are about to be retained or released. Any ids.
  void prefetch(std::span<const block_id> ids) const noexcept {
    for (const block_id id : ids) {
      if (static_cast<std::uint32_t>(id) < static_cast<std::uint32_t>(num_blocks_)) {
        detail::prefetch_to_write(&record_of(id));
      }
    }
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
    std::uint32_t num_refs;
    std::uint32_t place;  ///< while free: node · 16 + index in it; in use: not_queued
  };
  static constexpr std::uint32_t not_queued = UINT32_MAX;
  static constexpr std::uint32_t no_node = UINT32_MAX;

  struct alignas(64) node {
    static constexpr std::uint32_t capacity = 13;
    std::uint32_t prev;
    std::uint32_t next;  ///< in the queue, or in the list of unused nodes
    std::uint16_t begin;
    std::uint16_t end;  ///< ids [begin, end) are queued
    std::array<block_id, capacity> ids;
  };

  [[nodiscard]] record& record_of(block_id id) const noexcept { return records_[static_cast<std::uint32_t>(id)]; }
  [[nodiscard]] bool is_used(block_id id) const noexcept {
    return static_cast<std::uint32_t>(id) < static_cast<std::uint32_t>(num_blocks_) && record_of(id).num_refs != 0;
  }
  /// Requires a free block.
  [[nodiscard]] block_id pop_front() noexcept {
    node& first = nodes_[head_];
    const block_id id = first.ids[first.begin++];
    record_of(id).place = not_queued;
    --num_free_;
    if (first.begin == first.end) [[unlikely]]
      drop_head();
    return id;
  }
  void push(block_id id, reuse_order order) noexcept {
    std::uint32_t at = 0;
    std::uint32_t index = 0;
    if (order == reuse_order::last) {
      if (tail_ == no_node || nodes_[tail_].end == node::capacity) [[unlikely]]
        add_tail();
      at = tail_;
      index = nodes_[at].end++;
    } else {
      if (head_ == no_node || nodes_[head_].begin == 0) [[unlikely]]
        add_head();
      at = head_;
      index = --nodes_[at].begin;
    }
    nodes_[at].ids[index] = id;
    record_of(id).place = at * 16 + index;
    ++num_free_;
  }
  [[nodiscard]] std::uint32_t take_unused() noexcept;
  void drop_head() noexcept;
  void add_head() noexcept;
  void add_tail() noexcept;
  void prefetch_records(const node& of) const noexcept;
  [[noreturn]] void throw_not_used(block_id id, const char* what) const;

  std::int64_t num_blocks_ = 0;
  std::int64_t num_free_ = 0;
  record* records_ = nullptr;  // [num_blocks_]
  node* nodes_ = nullptr;      // [num_nodes]
  std::uint32_t head_ = no_node;
  std::uint32_t tail_ = no_node;
  std::uint32_t unused_ = no_node;
  buffer storage_;  // nodes, then records
};

}  // namespace bifolio

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A fixed set of blocks, each with a reference count, and the free ones in eviction order. It hands out ids and never
/// touches what the blocks hold; it knows nothing of sequences or of what makes contents worth keeping.
///
/// Eviction order: eight queues, one per level. Blocks of the lowest level go first, within a level from the front.
/// Level 0 is for blocks whose contents nobody will ask for; who keeps contents for later (prefix_cache.hpp) raises it.
///
/// One 8-byte record a block: its reference count, its level, and, while it is free, the node it stands in. A queue is
/// a doubly-linked list of nodes of one cache line, each with up to 13 ids in order. A block can leave from anywhere
/// (`touch`): the gap is closed within the node, and a node that then fits into a neighbour is merged with it, so that
/// two neighbours always hold more than 12 ids together, the ends of a queue excepted. Every operation is O(1) a block.
///
/// Why nodes, and not links in the records: after some traffic a queue runs through memory in random order, and each
/// allocation waits for the record that only the one before it names: 146 ns a block with links, 2.5 ns with nodes
/// (1,000,000 blocks freed in random order, `bifolio_bench manager`, Zen 5, 2026-11-20).
///
/// Fences, for engines that submit a step before the one before it has finished: between `open_fence` and `retire`,
/// blocks that lose their last reference are set aside, neither used nor free, until the fences that were open then
/// have retired, because a kernel in flight may still read or write them.

#include <array>
#include <bifolio/buffer.hpp>
#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/types.hpp>
#include <bit>
#include <cstdint>
#include <span>
#include <string>

namespace bifolio {

/// Block ids stay below this, so that `padding_entry` (step.hpp) never names a block.
inline constexpr std::int64_t max_num_blocks = 2147480000;

namespace detail {
/// Asks for a cache line that is about to be written. The empty asm keeps GCC 12 from deleting functions that do
/// nothing else.
[[gnu::always_inline]] inline void prefetch_to_write(const void* address) noexcept {
  __builtin_prefetch(address, 1);
  asm volatile("" : : "r"(address));
}
}  // namespace detail

/// Where in the queue of its level a block goes when its last reference is released.
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
  /// Those with references, and those that wait for a fence.
  [[nodiscard]] std::int64_t num_used() const noexcept { return num_blocks_ - num_free_; }
  /// Without references, waiting for a fence.
  [[nodiscard]] std::int64_t num_fenced() const noexcept { return num_fenced_; }

  /// Takes out.size() blocks in eviction order, each with one reference; all of them or none.
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

  /// One more reference to a block of the pool, be it in use, free or waiting for a fence: how contents that are still
  /// there are taken up again. Throws `error` (invalid_argument) for an id outside the pool.
  void touch(block_id id) {
    if (!is_used(id)) [[unlikely]]
      leave_queue(id);
    ++record_of(id).num_refs;
  }

  /// One reference less to each of `ids`. Blocks that lose their last one become free, the last of `ids` first, so that
  /// the tail of a sequence is evicted before its head. Throws `error`: invalid_argument (an id outside the pool),
  /// not_found (a block without that many references: a double free); nothing has changed then.
  void release(std::span<const block_id> ids, reuse_order order = reuse_order::last);
  void release(block_id id, reuse_order order = reuse_order::last) {
    if (!is_used(id)) [[unlikely]]
      throw_not_used(id, "release");
    record& block = record_of(id);
    if (--block.num_refs == 0) push(id, order);
  }

  /// Moves a block to another level; a free one to the back of its queue. Throws `error`: invalid_argument (an id
  /// outside the pool, a level ≥ num_block_levels).
  void set_level(block_id id, block_level level) {
    if (is_used(id) && level < num_block_levels) [[likely]] {
      record_of(id).place = not_queued * num_block_levels + level;
    } else {
      set_level_of_unused(id, level);
    }
  }
  /// Requires a block of the pool.
  [[nodiscard]] block_level level(block_id id) const noexcept {
    return static_cast<block_level>(record_of(id).place % num_block_levels);
  }

  /// From now on, blocks that lose their last reference wait until this fence and all before it have retired.
  /// Throws `error` (failed_precondition) when max_open_fences are open.
  fence_id open_fence();
  /// Fences retire in the order in which they were opened: blocks that wait for this one become free, in the order in
  /// which they were released, unless they were taken up again meanwhile. Throws `error` (invalid_argument) for any but
  /// the oldest open fence.
  void retire(fence_id fence);
  static constexpr std::uint32_t max_open_fences = 16;
  [[nodiscard]] std::uint32_t num_open_fences() const noexcept { return num_fences_; }

  /// The block that will be handed out after `distance` others, if no other is released before; `invalid_block` when
  /// finding it takes a look past two nodes. For prefetching.
  [[nodiscard]] block_id upcoming(std::uint32_t distance) const noexcept {
    if (filled_levels_ == 0) return invalid_block;
    const node* at = &nodes_[lists_[static_cast<std::uint32_t>(std::countr_zero(filled_levels_))].head];
    if (distance >= at->size()) {
      if (at->next == no_node) return invalid_block;
      distance -= at->size();
      at = &nodes_[at->next];
      if (distance >= at->size()) return invalid_block;
    }
    return at->ids[at->begin + distance];
  }
  /// Neither used nor waiting for a fence. Requires a block of the pool.
  [[nodiscard]] bool is_free(block_id id) const noexcept {
    const std::uint32_t at = record_of(id).place / num_block_levels;
    return at != not_queued && nodes_[at].list < num_block_levels;
  }
  /// Ask for what `touch` of a free block will need: first the node that it stands in, and once that is near, the
  /// nodes beside it. Require a block of the pool whose record is near.
  void prefetch_node(block_id id) const noexcept {
    const std::uint32_t at = record_of(id).place / num_block_levels;
    if (at != not_queued) detail::prefetch_to_write(&nodes_[at]);
  }
  void prefetch_neighbours(block_id id) const noexcept {
    const std::uint32_t at = record_of(id).place / num_block_levels;
    if (at == not_queued) return;
    if (nodes_[at].prev != no_node) detail::prefetch_to_write(&nodes_[nodes_[at].prev]);
    if (nodes_[at].next != no_node) detail::prefetch_to_write(&nodes_[nodes_[at].next]);
  }

  /// A hint that `ids` are about to be retained or released. Any ids.
  void prefetch(std::span<const block_id> ids) const noexcept {
    for (const block_id id : ids) {
      if (is_block(id)) detail::prefetch_to_write(&record_of(id));
    }
  }

  /// References to a block; 0 for a free one. Throws `error` (invalid_argument) for an id outside the pool.
  /// A chunk of a block table that several sequences share (block_table.hpp) holds one reference for all of them.
  [[nodiscard]] std::uint32_t num_refs(block_id id) const;
  [[nodiscard]] bool is_shared(block_id id) const noexcept { return record_of(id).num_refs > 1; }

  /// Copies the first out.size() free blocks, next to be handed out first. For tests and tools; O(out.size() + queues).
  /// Returns how many there were.
  std::int64_t peek_free(std::span<block_id> out) const noexcept;

  /// The first broken invariant as a sentence; empty when all hold. O(num_blocks).
  [[nodiscard]] std::string check() const;
  /// Hash of all reference counts and levels and of the order in each queue, those behind fences too. O(num_blocks).
  [[nodiscard]] std::uint64_t digest() const noexcept;

 private:
  struct record {
    std::uint32_t num_refs;
    std::uint32_t place;  ///< (node while queued, else not_queued) · num_block_levels + level
  };
  static constexpr std::uint32_t not_queued = (std::uint32_t{1} << 29) - 1;
  static constexpr std::uint32_t no_node = UINT32_MAX;

  struct alignas(64) node {
    static constexpr std::uint32_t capacity = 13;
    std::uint32_t prev;
    std::uint32_t next;  ///< in the queue, or in the list of unused nodes
    std::uint8_t begin;
    std::uint8_t end;  ///< ids [begin, end) are queued; begin is 0 in all but the first node of a queue
    std::uint8_t list;
    std::array<block_id, capacity> ids;
    [[nodiscard]] std::uint32_t size() const noexcept { return std::uint32_t{end} - begin; }
  };
  struct queue {
    std::uint32_t head = no_node;
    std::uint32_t tail = no_node;
  };
  /// The levels' queues, then one for each fence that may be open.
  static constexpr std::uint32_t num_lists = num_block_levels + max_open_fences;

  [[nodiscard]] record& record_of(block_id id) const noexcept { return records_[static_cast<std::uint32_t>(id)]; }
  /// Whether the pool has a block of this id; negative ones are above all others.
  [[nodiscard]] bool is_block(block_id id) const noexcept {
    return static_cast<std::uint32_t>(id) < static_cast<std::uint32_t>(num_blocks_);
  }
  [[nodiscard]] bool is_used(block_id id) const noexcept { return is_block(id) && record_of(id).num_refs != 0; }
  /// Requires a free block.
  [[nodiscard]] block_id pop_front() noexcept {
    const auto list = static_cast<std::uint32_t>(std::countr_zero(filled_levels_));
    node& first = nodes_[lists_[list].head];
    const block_id id = first.ids[first.begin++];
    record_of(id).place |= not_queued * num_block_levels;
    --num_free_;
    if (first.begin == first.end) drop_head(list);
    return id;
  }
  void push(block_id id, reuse_order order) noexcept {
    record& block = record_of(id);
    const std::uint32_t list = num_fences_ == 0 ? block.place % num_block_levels : fence_list(num_fences_ - 1);
    queue& to = lists_[list];
    std::uint32_t at;
    if (order == reuse_order::last || list >= num_block_levels) {
      if (to.tail == no_node || nodes_[to.tail].end == node::capacity) [[unlikely]]
        add_tail(list);
      at = to.tail;
      nodes_[at].ids[nodes_[at].end++] = id;
    } else {
      if (to.head == no_node || nodes_[to.head].begin == 0) [[unlikely]]
        add_head(list);
      at = to.head;
      nodes_[at].ids[--nodes_[at].begin] = id;
    }
    block.place = at * num_block_levels + block.place % num_block_levels;
    ++(list < num_block_levels ? num_free_ : num_fenced_);
  }
  /// List of the i-th oldest open fence.
  [[nodiscard]] std::uint32_t fence_list(std::uint32_t i) const noexcept {
    return num_block_levels + static_cast<std::uint32_t>((oldest_fence_ + i) % max_open_fences);
  }
  [[nodiscard]] std::uint32_t take_unused() noexcept;
  void drop_head(std::uint32_t list) noexcept;
  void add_head(std::uint32_t list) noexcept;
  void add_tail(std::uint32_t list) noexcept;
  void unlink(std::uint32_t dropped) noexcept;
  void leave_queue(block_id id);
  void set_level_of_unused(block_id id, block_level level);
  void leave_node(block_id id) noexcept;
  void merge(std::uint32_t second, std::uint32_t first) noexcept;
  [[nodiscard]] std::string check_list(std::uint32_t list, std::int64_t& queued) const;
  void prefetch_records(const node& of) const noexcept;
  [[noreturn]] void throw_not_used(block_id id, const char* what) const;

  std::int64_t num_blocks_ = 0;
  std::int64_t num_free_ = 0;
  std::int64_t num_fenced_ = 0;
  record* records_ = nullptr;        // [num_blocks_]
  node* nodes_ = nullptr;            // [num_nodes]
  std::uint32_t filled_levels_ = 0;  // bit i: level i has a free block
  std::uint32_t unused_ = no_node;
  std::uint32_t num_fences_ = 0;    // open
  std::uint64_t oldest_fence_ = 1;  // that one's number, or the next one's when none is open
  std::array<queue, num_lists> lists_;
  buffer storage_;  // nodes, then records
};

}  // namespace bifolio

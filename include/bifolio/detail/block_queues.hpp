// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The records of a block pool and its queues of blocks without references; private to block_pool.hpp.
///
/// There is one 8-byte record per block: its reference count, its level, and, while the block is queued, the node that
/// holds it. A queue is a doubly-linked list of nodes of one cache line, each with up to 13 ids in order. A block can
/// leave from anywhere: the gap is closed within the node, and a node that then fits into a neighbour is merged with
/// it. So two neighbours always hold more than 12 ids together, except at the ends of a queue. Every operation is O(1)
/// per block.
///
/// Why nodes, and not links in the records: after some traffic a queue runs through memory in random order, and each
/// allocation waits for the record that only the block before it names. Links cost 146 ns per block, nodes 2.5 ns
/// (1,000,000 blocks freed in random order, `bifolio_bench manager`, Zen 5, 2026-11-20).

#include <array>
#include <bifolio/buffer.hpp>
#include <bifolio/detail/prefetch.hpp>
#include <bifolio/export.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <string>

namespace bifolio::inline v0_2::detail {

class BIFOLIO_API block_queues {
 public:
  /// One queue per level, then one per fence that may be open.
  static constexpr std::uint32_t num_levels = 8;
  static constexpr std::uint32_t num_queues = num_levels + 16;

  struct record {
    std::uint32_t num_refs;
    std::uint32_t place;  ///< (node while queued, else not_queued) · num_levels + level
  };

  /// All blocks are unqueued, at level 0 and without references. Throws `error` (out_of_memory).
  block_queues(std::int64_t num_blocks, memory_resource& memory);

  [[nodiscard]] record& of(block_id id) const noexcept { return records_[static_cast<std::uint32_t>(id)]; }
  [[nodiscard]] std::uint32_t level(block_id id) const noexcept { return of(id).place % num_levels; }
  [[nodiscard]] bool is_queued(block_id id) const noexcept { return of(id).place / num_levels != not_queued; }
  /// Queue of a queued block.
  [[nodiscard]] std::uint32_t queue_of(block_id id) const noexcept { return nodes_[of(id).place / num_levels].list; }
  [[nodiscard]] bool is_empty(std::uint32_t queue) const noexcept { return (filled_ >> queue & 1) == 0; }
  /// Bit i: queue i has a block.
  [[nodiscard]] std::uint32_t filled() const noexcept { return filled_; }
  /// The level of a block that is in no queue.
  void set_level_unqueued(block_id id, std::uint32_t level) noexcept { of(id).place = not_queued * num_levels + level; }
  /// The level of a block in the queue of a fence.
  void set_level_fenced(block_id id, std::uint32_t level) noexcept {
    of(id).place = of(id).place / num_levels * num_levels + level;
  }
  /// Requires a queue with a block.
  [[nodiscard]] block_id front(std::uint32_t queue) const noexcept {
    const node& first = nodes_[lists_[queue].head];
    return first.ids[first.begin];
  }
  /// Requires a queue with a block.
  [[nodiscard]] block_id pop_front(std::uint32_t queue) noexcept {
    node& first = nodes_[lists_[queue].head];
    const block_id id = first.ids[first.begin++];
    of(id).place |= not_queued * num_levels;
    if (first.begin == first.end) drop_head(queue);
    return id;
  }
  /// Requires a block that is in no queue.
  void push_back(block_id id, std::uint32_t queue) noexcept {
    list& to = lists_[queue];
    record& block = of(id);
    if (to.tail == no_node || nodes_[to.tail].end == node::capacity) [[unlikely]]
      add_tail(queue);
    const std::uint32_t at = to.tail;
    nodes_[at].ids[nodes_[at].end++] = id;
    block.place = at * num_levels + block.place % num_levels;
  }
  /// Requires a block that is in no queue.
  void push_front(block_id id, std::uint32_t queue) noexcept {
    list& to = lists_[queue];
    record& block = of(id);
    if (to.head == no_node || nodes_[to.head].begin == 0) [[unlikely]]
      add_head(queue);
    const std::uint32_t at = to.head;
    nodes_[at].ids[--nodes_[at].begin] = id;
    block.place = at * num_levels + block.place % num_levels;
  }
  /// Takes a block out of its queue, which is returned. Requires a queued block.
  std::uint32_t leave(block_id id) noexcept;

  /// The block of a queue that has `distance` others before it; `invalid_block` when finding it takes a look past two
  /// nodes. Requires a queue with a block.
  [[nodiscard]] block_id upcoming(std::uint32_t queue, std::uint32_t distance) const noexcept {
    const node* at = &nodes_[lists_[queue].head];
    if (distance >= at->size()) {
      if (at->next == no_node) return invalid_block;
      distance -= at->size();
      at = &nodes_[at->next];
      if (distance >= at->size()) return invalid_block;
    }
    return at->ids[at->begin + distance];
  }
  void prefetch_record(block_id id) const noexcept { prefetch_to_write(&of(id)); }
  /// Prefetch what `leave` will need: first the block's node, and once that has arrived, the nodes next to it. Require
  /// that the record has arrived.
  void prefetch_node(block_id id) const noexcept {
    const std::uint32_t at = of(id).place / num_levels;
    if (at != not_queued) prefetch_to_write(&nodes_[at]);
  }
  void prefetch_neighbours(block_id id) const noexcept {
    const std::uint32_t at = of(id).place / num_levels;
    if (at == not_queued) return;
    if (nodes_[at].prev != no_node) prefetch_to_write(&nodes_[nodes_[at].prev]);
    if (nodes_[at].next != no_node) prefetch_to_write(&nodes_[nodes_[at].next]);
  }

  /// Calls visit(id) for the blocks of a queue from the front while it returns true; false when it did not.
  template <class Visit>
  bool for_each(std::uint32_t queue, Visit visit) const {
    for (std::uint32_t at = lists_[queue].head; at != no_node; at = nodes_[at].next) {
      for (std::uint32_t i = nodes_[at].begin; i < nodes_[at].end; ++i) {
        if (!visit(nodes_[at].ids[i])) return false;
      }
    }
    return true;
  }
  /// The first broken invariant of one queue as a sentence; its length is added to `num_queued`.
  [[nodiscard]] std::string check(std::uint32_t queue, std::int64_t& num_queued) const;

 private:
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
  struct list {
    std::uint32_t head = no_node;
    std::uint32_t tail = no_node;
  };
  [[nodiscard]] static constexpr std::int64_t nodes_for(std::int64_t num_blocks) noexcept;
  [[nodiscard]] std::uint32_t take_unused() noexcept;
  void drop_head(std::uint32_t queue) noexcept;
  void add_head(std::uint32_t queue) noexcept;
  void add_tail(std::uint32_t queue) noexcept;
  void unlink(std::uint32_t dropped) noexcept;
  void merge(std::uint32_t second, std::uint32_t first) noexcept;

  std::int64_t num_blocks_;
  record* records_ = nullptr;  // [num_blocks_]
  node* nodes_ = nullptr;
  std::uint32_t filled_ = 0;
  std::uint32_t unused_ = 0;
  std::array<list, num_queues> lists_;
  buffer storage_;  // nodes, then records
};

}  // namespace bifolio::inline v0_2::detail

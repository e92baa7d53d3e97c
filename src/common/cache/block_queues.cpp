// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/block_pool.hpp>
#include <bifolio/detail/block_queues.hpp>

namespace bifolio::inline v0_2::detail {

// Two neighbours hold more than 12 ids together, so that no more than one node per 6 ids is needed, and two for the
// ends of each queue that are less filled.
constexpr std::int64_t block_queues::nodes_for(std::int64_t num_blocks) noexcept {
  return num_blocks / 6 + 2 * std::min<std::int64_t>(num_blocks, num_queues) + 1;
}

block_queues::block_queues(std::int64_t num_blocks, memory_resource& memory)
    : num_blocks_(num_blocks),
      storage_(memory, static_cast<std::size_t>(nodes_for(num_blocks)) * sizeof(node) +
                           static_cast<std::size_t>(num_blocks) * sizeof(record)) {
  static_assert(sizeof(record) == 8);
  static_assert(sizeof(node) == 64);
  static_assert(num_levels == num_block_levels && num_queues == num_block_levels + block_pool::max_open_fences);
  static_assert(nodes_for(max_num_blocks) <= not_queued, "a place is 29 bits of node and 3 of level");
  const std::int64_t num_nodes = nodes_for(num_blocks);
  nodes_ = storage_.as<node>();
  records_ = reinterpret_cast<record*>(nodes_ + num_nodes);
  for (std::int64_t i = 0; i < num_nodes; ++i) {
    nodes_[i] = {no_node, i + 1 < num_nodes ? static_cast<std::uint32_t>(i + 1) : no_node, 0, 0, 0, {}};
  }
  for (std::int64_t i = 0; i < num_blocks; ++i) records_[i] = {0, not_queued * num_levels};
}

void block_queues::drop_head(std::uint32_t queue) noexcept {
  unlink(lists_[queue].head);
  const std::uint32_t head = lists_[queue].head;
  if (head == no_node) return;
  for (std::uint32_t i = nodes_[head].begin; i < nodes_[head].end; ++i) prefetch_record(nodes_[head].ids[i]);
  if (nodes_[head].next != no_node) prefetch_to_write(&nodes_[nodes_[head].next]);
}

void block_queues::unlink(std::uint32_t dropped) noexcept {
  node& gone = nodes_[dropped];
  list& from = lists_[gone.list];
  (gone.prev != no_node ? nodes_[gone.prev].next : from.head) = gone.next;
  (gone.next != no_node ? nodes_[gone.next].prev : from.tail) = gone.prev;
  if (from.head == no_node) filled_ &= ~(1U << gone.list);
  gone.next = unused_;
  unused_ = dropped;
}

std::uint32_t block_queues::take_unused() noexcept {
  const std::uint32_t taken = unused_;
  unused_ = nodes_[taken].next;
  if (unused_ != no_node) prefetch_to_write(&nodes_[unused_]);  // needed 13 blocks from now
  return taken;
}

void block_queues::add_head(std::uint32_t queue) noexcept {
  list& to = lists_[queue];
  if (to.head != no_node && nodes_[to.head].end < node::capacity) {
    // The first node may have its gap after its ids instead of before them; an inner node may not.
    node& first = nodes_[to.head];
    std::move_backward(first.ids.begin(), first.ids.begin() + first.end, first.ids.end());
    first.begin = static_cast<std::uint8_t>(node::capacity - first.end);
    first.end = node::capacity;
    return;
  }
  const std::uint32_t added = take_unused();
  nodes_[added].begin = nodes_[added].end = node::capacity;
  nodes_[added].list = static_cast<std::uint8_t>(queue);
  nodes_[added].prev = no_node;
  nodes_[added].next = to.head;
  (to.head != no_node ? nodes_[to.head].prev : to.tail) = added;
  to.head = added;
  filled_ |= 1U << queue;
}

void block_queues::add_tail(std::uint32_t queue) noexcept {
  list& to = lists_[queue];
  const std::uint32_t added = take_unused();
  nodes_[added].begin = nodes_[added].end = 0;
  nodes_[added].list = static_cast<std::uint8_t>(queue);
  nodes_[added].prev = to.tail;
  nodes_[added].next = no_node;
  (to.tail != no_node ? nodes_[to.tail].next : to.head) = added;
  to.tail = added;
  filled_ |= 1U << queue;
}

std::uint32_t block_queues::leave(block_id id) noexcept {
  record& block = of(id);
  const std::uint32_t at = block.place / num_levels;
  block.place |= not_queued * num_levels;
  node& holder = nodes_[at];
  const std::uint32_t queue = holder.list;
  block_id* const found = std::find(holder.ids.begin() + holder.begin, holder.ids.begin() + holder.end, id);
  std::move(found + 1, holder.ids.begin() + holder.end, found);
  --holder.end;
  if (holder.begin == holder.end) {
    const std::uint32_t before = holder.prev;
    const std::uint32_t after = holder.next;
    unlink(at);
    if (before != no_node && after != no_node && nodes_[before].size() + nodes_[after].size() < node::capacity) {
      merge(after, before);
    }
    return queue;
  }
  if (holder.prev != no_node && nodes_[holder.prev].size() + holder.size() < node::capacity) {
    merge(at, holder.prev);
  } else if (holder.next != no_node && nodes_[holder.next].size() + holder.size() < node::capacity) {
    merge(holder.next, at);
  }
  return queue;
}

// Of two neighbours that fit into one node, the one with fewer ids moves: each of them costs a miss on its record.
// `second` follows `first`.
void block_queues::merge(std::uint32_t second, std::uint32_t first) noexcept {
  node& front = nodes_[first];
  node& back = nodes_[second];
  const std::uint32_t num_front = front.size();
  const std::uint32_t num_back = back.size();
  const auto moved_to = [&](block_id id, std::uint32_t at) {
    record& block = of(id);
    block.place = at * num_levels + block.place % num_levels;
  };
  if (num_back <= num_front) {
    std::move(front.ids.begin() + front.begin, front.ids.begin() + front.end, front.ids.begin());
    for (std::uint32_t i = 0; i < num_back; ++i) {
      front.ids[num_front + i] = back.ids[back.begin + i];
      moved_to(front.ids[num_front + i], first);
    }
    front.begin = 0;
    front.end = static_cast<std::uint8_t>(num_front + num_back);
    unlink(second);
  } else {
    std::array<block_id, node::capacity> ids;
    std::copy_n(front.ids.begin() + front.begin, num_front, ids.begin());
    std::copy_n(back.ids.begin() + back.begin, num_back, ids.begin() + num_front);
    for (std::uint32_t i = 0; i < num_front; ++i) moved_to(ids[i], second);
    back.ids = ids;
    back.begin = 0;
    back.end = static_cast<std::uint8_t>(num_front + num_back);
    unlink(first);
  }
}

std::string block_queues::check(std::uint32_t queue, std::int64_t& num_queued) const {
  std::uint32_t before = no_node;
  for (std::uint32_t at = lists_[queue].head; at != no_node; before = at, at = nodes_[at].next) {
    const node& holder = nodes_[at];
    if (holder.prev != before) return "a node of a queue does not point back";
    if (holder.list != queue) return "a node does not know its queue";
    if (holder.begin >= holder.end || holder.end > node::capacity) return "a node of a queue is empty or overfull";
    if (holder.begin != 0 && before != no_node) return "a node that is not its queue's first has a gap at its front";
    if (before != no_node && before != lists_[queue].head && at != lists_[queue].tail &&
        nodes_[before].size() + holder.size() < node::capacity) {
      return "two neighbours in a queue would fit into one node";
    }
    for (std::uint32_t i = holder.begin; i < holder.end; ++i) {
      const std::int32_t id = to_index(holder.ids[i]);
      if (id < 0 || id >= num_blocks_) return "a queue holds " + std::to_string(id) + ", which is no block";
      if (records_[id].num_refs != 0) return "block " + std::to_string(id) + " is queued and referenced";
      if (records_[id].place / num_levels != at) return "block " + std::to_string(id) + " does not know its node";
      if (queue < num_levels && records_[id].place % num_levels != queue) {
        return "block " + std::to_string(id) + " is queued at another level than its own";
      }
      ++num_queued;
    }
    if (num_queued > num_blocks_) return "a queue has a loop";
  }
  if (lists_[queue].tail != before) return "a queue's end is not its last node";
  if (is_empty(queue) != (lists_[queue].head == no_node)) return "the mask of filled queues is wrong";
  return {};
}

}  // namespace bifolio::inline v0_2::detail

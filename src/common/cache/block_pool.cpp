// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/block_pool.hpp>
#include <utility>

#include "common/base/hash.hpp"
#include "common/base/refuse.hpp"
#include "common/base/require.hpp"

namespace bifolio {
namespace {

std::int64_t require_num_blocks(std::int64_t num_blocks) {
  detail::require_between("num_blocks", num_blocks, 1, max_num_blocks);
  return num_blocks;
}

// Records that are asked for ahead of their use; about what the core's miss buffers hold.
constexpr std::size_t prefetch_distance = 32;

// Two neighbours hold more than 12 ids together, so that no more than one node for 6 ids is needed, and two for the
// ends of each queue that are less filled.
constexpr std::int64_t nodes_for(std::int64_t num_blocks, std::int64_t num_lists) {
  return num_blocks / 6 + 2 * std::min(num_blocks, num_lists) + 1;
}

}  // namespace

block_pool::block_pool(std::int64_t num_blocks, memory_resource& memory)
    : num_blocks_(require_num_blocks(num_blocks)),
      storage_(memory, static_cast<std::size_t>(nodes_for(num_blocks, num_lists)) * sizeof(node) +
                           static_cast<std::size_t>(num_blocks) * sizeof(record)) {
  static_assert(sizeof(record) == 8);
  static_assert(sizeof(node) == 64);
  static_assert(nodes_for(max_num_blocks, num_lists) <= not_queued, "a place is 29 bits of node and 3 of level");
  const std::int64_t num_nodes = nodes_for(num_blocks, num_lists);
  nodes_ = storage_.as<node>();
  records_ = reinterpret_cast<record*>(nodes_ + num_nodes);
  for (std::int64_t i = 0; i < num_nodes; ++i) {
    nodes_[i] = {no_node, i + 1 < num_nodes ? static_cast<std::uint32_t>(i + 1) : no_node, 0, 0, 0, {}};
  }
  unused_ = 0;
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    records_[i] = {0, not_queued * num_block_levels};
    push(block_id{static_cast<std::int32_t>(i)}, reuse_order::last);
  }
}

void block_pool::prefetch_records(const node& of) const noexcept {
  prefetch(std::span(of.ids).subspan(of.begin, of.size()));
}

void block_pool::drop_head(std::uint32_t list) noexcept {
  unlink(lists_[list].head);
  const std::uint32_t head = lists_[list].head;
  if (head == no_node) return;
  prefetch_records(nodes_[head]);
  if (nodes_[head].next != no_node) detail::prefetch_to_write(&nodes_[nodes_[head].next]);
}

void block_pool::unlink(std::uint32_t dropped) noexcept {
  node& holder = nodes_[dropped];
  queue& from = lists_[holder.list];
  (holder.prev != no_node ? nodes_[holder.prev].next : from.head) = holder.next;
  (holder.next != no_node ? nodes_[holder.next].prev : from.tail) = holder.prev;
  if (from.head == no_node && holder.list < num_block_levels) filled_levels_ &= ~(1U << holder.list);
  holder.next = unused_;
  unused_ = dropped;
}

std::uint32_t block_pool::take_unused() noexcept {
  const std::uint32_t taken = unused_;
  unused_ = nodes_[taken].next;
  if (unused_ != no_node) detail::prefetch_to_write(&nodes_[unused_]);  // needed 13 blocks from now
  return taken;
}

void block_pool::add_head(std::uint32_t list) noexcept {
  queue& to = lists_[list];
  if (to.head != no_node && nodes_[to.head].end < node::capacity) {
    // The first node may have gaps behind its ids instead of before them; an inner node may not.
    node& first = nodes_[to.head];
    std::move_backward(first.ids.begin(), first.ids.begin() + first.end, first.ids.end());
    first.begin = static_cast<std::uint8_t>(node::capacity - first.end);
    first.end = node::capacity;
    return;
  }
  const std::uint32_t added = take_unused();
  nodes_[added].begin = nodes_[added].end = node::capacity;
  nodes_[added].list = static_cast<std::uint8_t>(list);
  nodes_[added].prev = no_node;
  nodes_[added].next = to.head;
  (to.head != no_node ? nodes_[to.head].prev : to.tail) = added;
  to.head = added;
  if (list < num_block_levels) filled_levels_ |= 1U << list;
}

void block_pool::add_tail(std::uint32_t list) noexcept {
  queue& to = lists_[list];
  const std::uint32_t added = take_unused();
  nodes_[added].begin = nodes_[added].end = 0;
  nodes_[added].list = static_cast<std::uint8_t>(list);
  nodes_[added].prev = to.tail;
  nodes_[added].next = no_node;
  (to.tail != no_node ? nodes_[to.tail].next : to.head) = added;
  to.tail = added;
  if (list < num_block_levels) filled_levels_ |= 1U << list;
}

void block_pool::leave_queue(block_id id) {
  if (!is_block(id)) throw_not_used(id, "touch");
  leave_node(id);
}

// Requires a queued block.
void block_pool::leave_node(block_id id) noexcept {
  record& of = record_of(id);
  const std::uint32_t at = of.place / num_block_levels;
  of.place |= not_queued * num_block_levels;
  node& holder = nodes_[at];
  --(holder.list < num_block_levels ? num_free_ : num_fenced_);
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
    return;
  }
  if (holder.prev != no_node && nodes_[holder.prev].size() + holder.size() < node::capacity) {
    merge(at, holder.prev);
  } else if (holder.next != no_node && nodes_[holder.next].size() + holder.size() < node::capacity) {
    merge(holder.next, at);
  }
}

// Of two neighbours that fit into one, the one with fewer ids moves: each of them costs a miss on its record.
// `second` follows `first`.
void block_pool::merge(std::uint32_t second, std::uint32_t first) noexcept {
  node& front = nodes_[first];
  node& back = nodes_[second];
  const std::uint32_t num_front = front.size();
  const std::uint32_t num_back = back.size();
  const auto moved_to = [&](block_id id, std::uint32_t at) {
    record& block = record_of(id);
    block.place = at * num_block_levels + block.place % num_block_levels;
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

void block_pool::set_level_of_unused(block_id id, block_level level) {
  if (!is_block(id)) throw_not_used(id, "set_level");
  detail::require_between("level", level, 0, num_block_levels - 1);
  record& block = record_of(id);
  if (block.place % num_block_levels == level) return;
  const bool moves = is_free(id);
  if (moves) leave_node(id);
  block.place = block.place / num_block_levels * num_block_levels + level;
  if (!moves) return;
  const std::uint32_t num_fences = std::exchange(num_fences_, 0);  // it waited for no fence, so it waits for none now
  push(id, reuse_order::last);
  num_fences_ = num_fences;
}

fence_id block_pool::open_fence() {
  if (num_fences_ == max_open_fences) {
    detail::refuse(errc::failed_precondition, num_fences_,
                   " fences are open, the most there can be; retire the oldest one first");
  }
  return fence_id{oldest_fence_ + num_fences_++};
}

void block_pool::retire(fence_id fence) {
  if (num_fences_ == 0 || fence != fence_id{oldest_fence_}) {
    detail::refuse(errc::invalid_argument, "fence ", static_cast<std::uint64_t>(fence), " is not the oldest open one",
                   [&](std::string& sentence) {
                     sentence += num_fences_ == 0 ? ": none is open" : ", which is " + std::to_string(oldest_fence_);
                   });
  }
  const std::uint32_t list = fence_list(0);
  const std::uint32_t still_open = num_fences_ - 1;
  ++oldest_fence_;
  num_fences_ = 0;  // pushes below go to the levels
  while (lists_[list].head != no_node) {
    node& first = nodes_[lists_[list].head];
    const block_id id = first.ids[first.begin++];
    --num_fenced_;
    if (first.begin == first.end) drop_head(list);
    push(id, reuse_order::last);
  }
  num_fences_ = still_open;
}

alloc_status block_pool::allocate(std::span<block_id> out) noexcept {
  const auto wanted = static_cast<std::int64_t>(out.size());
  if (wanted > num_free_) return wanted > num_blocks_ ? alloc_status::never : alloc_status::later;
  for (block_id& id : out) {
    id = pop_front();
    record_of(id).num_refs = 1;
  }
  return alloc_status::ok;
}

void block_pool::retain(std::span<const block_id> ids) {
  prefetch(ids.first(std::min(ids.size(), prefetch_distance)));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (is_used(ids[i])) [[likely]] {
      ++record_of(ids[i]).num_refs;
      continue;
    }
    for (std::size_t k = 0; k < i; ++k) --record_of(ids[k]).num_refs;
    throw_not_used(ids[i], "retain");
  }
}

void block_pool::release(std::span<const block_id> ids, reuse_order order) {
  prefetch(ids.first(std::min(ids.size(), prefetch_distance)));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + prefetch_distance < ids.size()) prefetch(ids.subspan(i + prefetch_distance, 1));
    if (is_used(ids[i])) [[likely]] {
      --record_of(ids[i]).num_refs;
      continue;
    }
    for (std::size_t k = 0; k < i; ++k) ++record_of(ids[k]).num_refs;
    throw_not_used(ids[i], "release");
  }
  for (std::size_t i = ids.size(); i-- > 0;) {
    const record& block = record_of(ids[i]);
    // An id that stands in `ids` more than once is queued by its last appearance.
    if (block.num_refs == 0 && block.place / num_block_levels == not_queued) push(ids[i], order);
  }
}

std::uint32_t block_pool::num_refs(block_id id) const {
  if (!is_block(id)) throw_not_used(id, "num_refs");
  return record_of(id).num_refs;
}

std::int64_t block_pool::peek_free(std::span<block_id> out) const noexcept {
  std::size_t count = 0;
  for (std::uint32_t list = 0; list < num_block_levels; ++list) {
    for (std::uint32_t at = lists_[list].head; at != no_node; at = nodes_[at].next) {
      for (std::uint32_t i = nodes_[at].begin; i < nodes_[at].end; ++i) {
        if (count == out.size()) return static_cast<std::int64_t>(count);
        out[count++] = nodes_[at].ids[i];
      }
    }
  }
  return static_cast<std::int64_t>(count);
}

std::string block_pool::check_list(std::uint32_t list, std::int64_t& queued) const {
  std::uint32_t before = no_node;
  for (std::uint32_t at = lists_[list].head; at != no_node; before = at, at = nodes_[at].next) {
    const node& holder = nodes_[at];
    if (holder.prev != before) return "a node of a queue does not point back";
    if (holder.list != list) return "a node does not know its queue";
    if (holder.begin >= holder.end || holder.end > node::capacity) return "a node of a queue is empty or overfull";
    if (holder.begin != 0 && before != no_node) return "a node that is not its queue's first has a gap at its front";
    if (before != no_node && before != lists_[list].head && at != lists_[list].tail &&
        nodes_[before].size() + holder.size() < node::capacity) {
      return "two neighbours in a queue would fit into one node";
    }
    for (std::uint32_t i = holder.begin; i < holder.end; ++i) {
      const std::int32_t id = to_index(holder.ids[i]);
      if (!is_block(holder.ids[i])) return "a queue holds " + std::to_string(id) + ", which is no block";
      if (records_[id].num_refs != 0) return "block " + std::to_string(id) + " is queued and referenced";
      if (records_[id].place / num_block_levels != at) return "block " + std::to_string(id) + " does not know its node";
      if (list < num_block_levels && records_[id].place % num_block_levels != list) {
        return "block " + std::to_string(id) + " is queued at another level than its own";
      }
      ++queued;
    }
    if (queued > num_blocks_) return "a queue has a loop";
  }
  if (lists_[list].tail != before) return "a queue's end is not its last node";
  if (list < num_block_levels && (filled_levels_ >> list & 1) != (lists_[list].head != no_node ? 1 : 0)) {
    return "the mask of filled levels is wrong";
  }
  return {};
}

std::string block_pool::check() const {
  std::int64_t num_free = 0;
  for (std::uint32_t list = 0; list < num_block_levels; ++list) {
    if (std::string problem = check_list(list, num_free); !problem.empty()) return problem;
  }
  if (num_free != num_free_) {
    return "the queues have " + std::to_string(num_free) + " blocks, the counter says " + std::to_string(num_free_);
  }
  std::int64_t num_fenced = 0;
  for (std::uint32_t list = num_block_levels; list < num_lists; ++list) {
    if (std::string problem = check_list(list, num_fenced); !problem.empty()) return problem;
    const std::uint32_t age = (list - fence_list(0) + max_open_fences) % max_open_fences;
    if (age >= num_fences_ && lists_[list].head != no_node) return "blocks wait for a fence that is not open";
  }
  if (num_fenced != num_fenced_) {
    return std::to_string(num_fenced) + " blocks wait for fences, the counter says " + std::to_string(num_fenced_);
  }
  std::int64_t used = 0;
  for (std::int64_t i = 0; i < num_blocks_; ++i) {
    if (records_[i].num_refs == 0) continue;
    if (records_[i].place / num_block_levels != not_queued) {
      return "block " + std::to_string(i) + " is used and has a place in a queue";
    }
    ++used;
  }
  if (used + num_free + num_fenced != num_blocks_) {
    return std::to_string(num_blocks_ - used - num_free - num_fenced) + " blocks are neither free nor referenced";
  }
  return {};
}

std::uint64_t block_pool::digest() const noexcept {
  detail::digest_builder hash;
  for (std::int64_t i = 0; i < num_blocks_; ++i) {
    hash.add(records_[i].num_refs);
    hash.add(records_[i].place % num_block_levels);
  }
  hash.add(num_fences_);
  for (std::uint32_t k = 0; k < num_block_levels + num_fences_; ++k) {
    const std::uint32_t list = k < num_block_levels ? k : fence_list(k - num_block_levels);
    for (std::uint32_t at = lists_[list].head; at != no_node; at = nodes_[at].next) {
      for (std::uint32_t i = nodes_[at].begin; i < nodes_[at].end; ++i) {
        hash.add(static_cast<std::uint64_t>(to_index(nodes_[at].ids[i])));
      }
    }
    hash.add(UINT64_MAX);
  }
  return hash.value();
}

void block_pool::throw_not_used(block_id id, const char* what) const {
  if (!is_block(id)) {
    detail::refuse(errc::invalid_argument, "block ", to_index(id), " given to ", what,
                   " is outside the pool of blocks 0 to ", num_blocks_ - 1);
  }
  detail::refuse(errc::not_found, "block ", to_index(id), " given to ", what,
                 " is free; only blocks in use have references");
}

}  // namespace bifolio

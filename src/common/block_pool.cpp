// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/block_pool.hpp>

#include "common/hash.hpp"

namespace bifolio {
namespace {

std::int64_t require_num_blocks(std::int64_t num_blocks) {
  if (num_blocks < 1 || num_blocks > max_num_blocks) {
    throw error(errc::invalid_argument,
                "num_blocks " + std::to_string(num_blocks) + " is not between 1 and " + std::to_string(max_num_blocks));
  }
  return num_blocks;
}

// Records that are asked for ahead of their use; about what the core's miss buffers hold.
constexpr std::size_t prefetch_distance = 32;

// The whole nodes of a full queue, and a partly filled one at either end.
constexpr std::int64_t nodes_for(std::int64_t num_blocks, std::int64_t capacity) { return num_blocks / capacity + 2; }

}  // namespace

block_pool::block_pool(std::int64_t num_blocks, memory_resource& memory)
    : num_blocks_(require_num_blocks(num_blocks)),
      storage_(memory, static_cast<std::size_t>(nodes_for(num_blocks, node::capacity)) * sizeof(node) +
                           static_cast<std::size_t>(num_blocks) * sizeof(record)) {
  static_assert(sizeof(record) == 8);
  static_assert(sizeof(node) == 64);
  static_assert(max_num_blocks / node::capacity + 2 < (std::int64_t{1} << 28),
                "a place is 28 bits of node and 4 of index");
  const auto num_nodes = static_cast<std::uint32_t>(nodes_for(num_blocks, node::capacity));
  nodes_ = storage_.as<node>();
  records_ = reinterpret_cast<record*>(nodes_ + num_nodes);
  for (std::uint32_t i = 0; i < num_nodes; ++i) {
    nodes_[i] = {no_node, i + 1 < num_nodes ? i + 1 : no_node, 0, 0, {}};
  }
  unused_ = 0;
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    records_[i] = {0, not_queued};
    push(block_id{static_cast<std::int32_t>(i)}, reuse_order::last);
  }
}

void block_pool::prefetch_records(const node& of) const noexcept {
  prefetch(std::span(of.ids).subspan(of.begin, of.end - of.begin));
}

void block_pool::drop_head() noexcept {
  const std::uint32_t dropped = head_;
  head_ = nodes_[dropped].next;
  nodes_[dropped].next = unused_;
  unused_ = dropped;
  if (head_ == no_node) {
    tail_ = no_node;
    return;
  }
  nodes_[head_].prev = no_node;
  prefetch_records(nodes_[head_]);
  if (nodes_[head_].next != no_node) detail::prefetch_to_write(&nodes_[nodes_[head_].next]);
}

std::uint32_t block_pool::take_unused() noexcept {
  const std::uint32_t taken = unused_;
  unused_ = nodes_[taken].next;
  if (unused_ != no_node) detail::prefetch_to_write(&nodes_[unused_]);  // needed 13 blocks from now
  return taken;
}

void block_pool::add_head() noexcept {
  const std::uint32_t added = take_unused();
  nodes_[added].begin = nodes_[added].end = node::capacity;
  nodes_[added].prev = no_node;
  nodes_[added].next = head_;
  (head_ != no_node ? nodes_[head_].prev : tail_) = added;
  head_ = added;
}

void block_pool::add_tail() noexcept {
  const std::uint32_t added = take_unused();
  nodes_[added].begin = nodes_[added].end = 0;
  nodes_[added].prev = tail_;
  nodes_[added].next = no_node;
  (tail_ != no_node ? nodes_[tail_].next : head_) = added;
  tail_ = added;
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
    const record& one = record_of(ids[i]);
    // An id that stands in `ids` more than once is queued by its last appearance.
    if (one.num_refs == 0 && one.place == not_queued) push(ids[i], order);
  }
}

std::uint32_t block_pool::num_refs(block_id id) const {
  if (to_index(id) < 0 || to_index(id) >= num_blocks_) throw_not_used(id, "num_refs");
  return record_of(id).num_refs;
}

std::int64_t block_pool::peek_free(std::span<block_id> out) const noexcept {
  std::size_t count = 0;
  for (std::uint32_t at = head_; at != no_node; at = nodes_[at].next) {
    for (std::uint32_t i = nodes_[at].begin; i < nodes_[at].end; ++i) {
      if (count == out.size()) return static_cast<std::int64_t>(count);
      out[count++] = nodes_[at].ids[i];
    }
  }
  return static_cast<std::int64_t>(count);
}

std::string block_pool::check() const {
  std::int64_t queued = 0;
  std::uint32_t before = no_node;
  for (std::uint32_t at = head_; at != no_node; before = at, at = nodes_[at].next) {
    const node& one = nodes_[at];
    if (one.prev != before) return "a node of the free queue does not point back";
    if (one.begin >= one.end || one.end > node::capacity) return "a node of the free queue is empty or overfull";
    if ((at != head_ && one.begin != 0) || (at != tail_ && one.end != node::capacity)) {
      return "an inner node of the free queue is not full";
    }
    for (std::uint32_t i = one.begin; i < one.end; ++i) {
      const std::int32_t id = to_index(one.ids[i]);
      if (id < 0 || id >= num_blocks_) return "the free queue holds " + std::to_string(id) + ", which is no block";
      if (records_[id].num_refs != 0) return "block " + std::to_string(id) + " is in the free queue and referenced";
      if (records_[id].place != at * 16 + i) return "block " + std::to_string(id) + " does not know its place";
      ++queued;
    }
    if (queued > num_blocks_) return "the free queue has a loop";
  }
  if (tail_ != before) return "the free queue's end is not its last node";
  if (queued != num_free_) {
    return "the free queue has " + std::to_string(queued) + " blocks, the counter says " + std::to_string(num_free_);
  }
  std::int64_t used = 0;
  for (std::int64_t i = 0; i < num_blocks_; ++i) {
    if (records_[i].num_refs == 0) continue;
    if (records_[i].place != not_queued) return "block " + std::to_string(i) + " is used and has a place in the queue";
    ++used;
  }
  if (used + queued != num_blocks_) {
    return std::to_string(num_blocks_ - used - queued) + " blocks are neither free nor referenced";
  }
  return {};
}

std::uint64_t block_pool::digest() const noexcept {
  detail::digest_builder hash;
  for (std::int64_t i = 0; i < num_blocks_; ++i) hash.add(records_[i].num_refs);
  for (std::uint32_t at = head_; at != no_node; at = nodes_[at].next) {
    for (std::uint32_t i = nodes_[at].begin; i < nodes_[at].end; ++i) {
      hash.add(static_cast<std::uint64_t>(to_index(nodes_[at].ids[i])));
    }
  }
  return hash.value();
}

void block_pool::throw_not_used(block_id id, const char* what) const {
  const std::string name = "block " + std::to_string(to_index(id));
  if (to_index(id) < 0 || to_index(id) >= num_blocks_) {
    throw error(errc::invalid_argument,
                name + " given to " + what + " is outside the pool of blocks 0 to " + std::to_string(num_blocks_ - 1));
  }
  throw error(errc::not_found, name + " given to " + what + " is free; only blocks in use have references");
}

}  // namespace bifolio

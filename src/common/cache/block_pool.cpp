// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/block_pool.hpp>

#include "common/base/hash.hpp"
#include "common/base/refuse.hpp"
#include "common/base/require.hpp"

namespace bifolio::inline v0_2 {
namespace {

std::int64_t require_num_blocks(std::int64_t num_blocks) {
  detail::require_between("num_blocks", num_blocks, 1, max_num_blocks);
  return num_blocks;
}

// Records that are prefetched ahead of their use; about what the core's miss buffers hold.
constexpr std::size_t prefetch_distance = 32;

}  // namespace

block_pool::block_pool(std::int64_t num_blocks, memory_resource& memory)
    : num_blocks_(require_num_blocks(num_blocks)), queues_(num_blocks, memory) {
  for (std::int64_t i = 0; i < num_blocks; ++i) push_free(block_id{static_cast<std::int32_t>(i)}, reuse_order::last);
}

void block_pool::leave_queue(block_id id) {
  if (!is_block(id)) throw_not_used(id, "touch");
  --(queues_.leave(id) < num_block_levels ? num_free_ : num_fenced_);
}

void block_pool::set_level_of_unused(block_id id, block_level level) {
  if (!is_block(id)) throw_not_used(id, "set_level");
  detail::require_between("level", level, 0, num_block_levels - 1);
  if (this->level(id) == level) return;
  if (is_free(id)) {
    requeue(id, level, reuse_order::last);
  } else {
    queues_.set_level_fenced(id, level);
  }
}

void block_pool::requeue(block_id id, block_level level, reuse_order order) noexcept {
  queues_.leave(id);
  queues_.set_level_unqueued(id, level);
  --num_free_;
  push_free(id, order);  // it waited for no fence, so it waits for none now
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
  const std::uint32_t queue = fence_queue(0);
  while (!queues_.is_empty(queue)) {
    push_free(queues_.pop_front(queue), reuse_order::last);
    --num_fenced_;
  }
  ++oldest_fence_;
  --num_fences_;
}

alloc_status block_pool::allocate(std::span<block_id> out) noexcept {
  const auto wanted = static_cast<std::int64_t>(out.size());
  if (wanted > num_free_) return wanted > num_blocks_ ? alloc_status::never : alloc_status::later;
  for (block_id& id : out) id = allocate_one();
  return alloc_status::ok;
}

void block_pool::retain(std::span<const block_id> ids) {
  prefetch(ids.first(std::min(ids.size(), prefetch_distance)));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (is_used(ids[i])) [[likely]] {
      ++queues_.of(ids[i]).num_refs;
      continue;
    }
    for (std::size_t k = 0; k < i; ++k) --queues_.of(ids[k]).num_refs;
    throw_not_used(ids[i], "retain");
  }
}

void block_pool::release(std::span<const block_id> ids, reuse_order order) {
  prefetch(ids.first(std::min(ids.size(), prefetch_distance)));
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (i + prefetch_distance < ids.size()) prefetch(ids.subspan(i + prefetch_distance, 1));
    if (is_used(ids[i])) [[likely]] {
      --queues_.of(ids[i]).num_refs;
      continue;
    }
    for (std::size_t k = 0; k < i; ++k) ++queues_.of(ids[k]).num_refs;
    throw_not_used(ids[i], "release");
  }
  for (std::size_t i = ids.size(); i-- > 0;) {
    // An id that is in `ids` more than once is queued by its last appearance.
    if (queues_.of(ids[i]).num_refs == 0 && !queues_.is_queued(ids[i])) push(ids[i], order);
  }
}

std::uint32_t block_pool::num_refs(block_id id) const {
  if (!is_block(id)) throw_not_used(id, "num_refs");
  return queues_.of(id).num_refs;
}

std::int64_t block_pool::peek_free(std::span<block_id> out) const noexcept {
  std::size_t count = 0;
  const auto copy = [&](block_id id) {
    if (count == out.size()) return false;
    out[count++] = id;
    return true;
  };
  for (std::uint32_t queue = 0; queue < num_block_levels; ++queue) {
    if (!queues_.for_each(queue, copy)) break;
  }
  return static_cast<std::int64_t>(count);
}

std::string block_pool::check() const {
  std::int64_t num_free = 0;
  for (std::uint32_t queue = 0; queue < num_block_levels; ++queue) {
    if (std::string problem = queues_.check(queue, num_free); !problem.empty()) return problem;
  }
  if (num_free != num_free_) {
    return "the queues have " + std::to_string(num_free) + " blocks, the counter says " + std::to_string(num_free_);
  }
  std::int64_t num_fenced = 0;
  for (std::uint32_t i = 0; i < max_open_fences; ++i) {
    if (std::string problem = queues_.check(fence_queue(i), num_fenced); !problem.empty()) return problem;
    if (i >= num_fences_ && !queues_.is_empty(fence_queue(i))) return "blocks wait for a fence that is not open";
  }
  if (num_fenced != num_fenced_) {
    return std::to_string(num_fenced) + " blocks wait for fences, the counter says " + std::to_string(num_fenced_);
  }
  std::int64_t used = 0;
  for (std::int64_t i = 0; i < num_blocks_; ++i) {
    const block_id id{static_cast<std::int32_t>(i)};
    if (queues_.of(id).num_refs == 0) continue;
    if (queues_.is_queued(id)) return "block " + std::to_string(i) + " is used and has a place in a queue";
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
    const block_id id{static_cast<std::int32_t>(i)};
    hash.add(queues_.of(id).num_refs);
    hash.add(queues_.level(id));
  }
  hash.add(num_fences_);
  for (std::uint32_t k = 0; k < num_block_levels + num_fences_; ++k) {
    queues_.for_each(k < num_block_levels ? k : fence_queue(k - num_block_levels), [&](block_id id) {
      hash.add(static_cast<std::uint64_t>(to_index(id)));
      return true;
    });
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

}  // namespace bifolio::inline v0_2

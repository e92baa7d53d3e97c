// SPDX-License-Identifier: Apache-2.0
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

}  // namespace

block_pool::block_pool(std::int64_t num_blocks, memory_resource& memory)
    : num_blocks_(require_num_blocks(num_blocks)),
      num_free_(num_blocks),
      storage_(memory, (static_cast<std::size_t>(num_blocks) + 1) * sizeof(record)) {
  static_assert(sizeof(record) == 16);
  records_ = storage_.as<record>();
  const std::uint32_t end = sentinel();
  for (std::uint32_t i = 0; i <= end; ++i) records_[i] = {i == 0 ? end : i - 1, i == end ? 0 : i + 1, 0, 0};
}

alloc_status block_pool::allocate(std::span<block_id> out) noexcept {
  const auto wanted = static_cast<std::int64_t>(out.size());
  if (wanted > num_free_) return wanted > num_blocks_ ? alloc_status::never : alloc_status::later;
  if (wanted == 0) return alloc_status::ok;
  std::uint32_t index = records_[sentinel()].next;
  for (block_id& id : out) {
    record& taken = records_[index];
    id = block_id{static_cast<std::int32_t>(index)};
    index = taken.next;
    prefetch(index);
    taken.prev = not_linked;
    taken.num_refs = 1;
  }
  records_[sentinel()].next = index;
  records_[index].prev = sentinel();
  num_free_ -= wanted;
  return alloc_status::ok;
}

void block_pool::retain(std::span<const block_id> ids) {
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
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (is_used(ids[i])) [[likely]] {
      --record_of(ids[i]).num_refs;
      continue;
    }
    for (std::size_t k = 0; k < i; ++k) ++record_of(ids[k]).num_refs;
    throw_not_used(ids[i], "release");
  }
  for (std::size_t i = ids.size(); i-- > 0;) {
    const record& one = record_of(ids[i]);
    // An id that stands in `ids` more than once is linked by its last appearance.
    if (one.num_refs == 0 && one.prev == not_linked) link(static_cast<std::uint32_t>(to_index(ids[i])), order);
  }
}

std::uint32_t block_pool::num_refs(block_id id) const {
  if (static_cast<std::uint32_t>(id) >= sentinel()) throw_not_used(id, "num_refs");
  return record_of(id).num_refs;
}

std::int64_t block_pool::peek_free(std::span<block_id> out) const noexcept {
  std::int64_t count = 0;
  for (std::uint32_t i = records_[sentinel()].next; i != sentinel() && count < static_cast<std::int64_t>(out.size());
       i = records_[i].next) {
    out[static_cast<std::size_t>(count++)] = block_id{static_cast<std::int32_t>(i)};
  }
  return count;
}

std::string block_pool::check() const {
  std::int64_t linked = 0;
  std::uint32_t before = sentinel();
  for (std::uint32_t i = records_[sentinel()].next; i != sentinel(); i = records_[i].next) {
    if (i > sentinel()) return "the free queue leaves the pool after block " + std::to_string(before);
    if (records_[i].prev != before) return "block " + std::to_string(i) + " does not point back in the free queue";
    if (records_[i].num_refs != 0) return "block " + std::to_string(i) + " is in the free queue and referenced";
    if (++linked > num_blocks_) return "the free queue has a loop";
    before = i;
  }
  if (records_[sentinel()].prev != before) return "the free queue's end is not its last block";
  if (linked != num_free_) {
    return "the free queue has " + std::to_string(linked) + " blocks, the counter says " + std::to_string(num_free_);
  }
  std::int64_t used = 0;
  for (std::uint32_t i = 0; i < sentinel(); ++i) {
    const record& one = records_[i];
    if (one.num_refs != 0 && one.prev != not_linked) return "block " + std::to_string(i) + " is used and linked";
    used += one.num_refs != 0;
  }
  if (used + linked != num_blocks_) {
    return std::to_string(num_blocks_ - used - linked) + " blocks are neither free nor referenced";
  }
  return {};
}

std::uint64_t block_pool::digest() const noexcept {
  detail::digest_builder hash;
  for (std::uint32_t i = 0; i < sentinel(); ++i) hash.add(records_[i].num_refs);
  for (std::uint32_t i = records_[sentinel()].next; i != sentinel(); i = records_[i].next) hash.add(i);
  return hash.value();
}

void block_pool::throw_not_used(block_id id, const char* what) const {
  const std::string name = "block " + std::to_string(to_index(id));
  if (static_cast<std::uint32_t>(id) >= sentinel()) {
    throw error(errc::invalid_argument,
                name + " given to " + what + " is outside the pool of blocks 0 to " + std::to_string(num_blocks_ - 1));
  }
  throw error(errc::not_found, name + " given to " + what + " is free; only blocks in use have references");
}

}  // namespace bifolio

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/block_table.hpp>
#include <cstring>
#include <memory>
#include <type_traits>

namespace bifolio::inline v0_2 {
namespace detail {

void block_chunk_slab::grow(std::int64_t at_least) {
  // Doubling keeps the number of pieces small; the first piece serves a few dozen sequences.
  const std::int64_t count = std::max({at_least, num_chunks_, std::int64_t{64}});
  pieces_.reserve(pieces_.size() + 1);
  buffer piece(*memory_, static_cast<std::size_t>(count) * sizeof(block_chunk));
  auto* chunks = piece.as<block_chunk>();
  pieces_.push_back(std::move(piece));
  for (std::int64_t i = count; i-- > 0;) give_back(&chunks[i]);
  num_chunks_ += count;
}

}  // namespace detail

static_assert(sizeof(block_table) == 128, "a table is to be two cache lines");
static_assert(std::is_trivially_copyable_v<detail::block_chunk>);

void block_table::copy_to(std::int32_t* row, std::int32_t count, std::int32_t null_entry) const noexcept {
  static_assert(sizeof(block_id) == sizeof(std::int32_t));
  std::int32_t i = std::min(first_, count);
  std::fill_n(row, i, null_entry);
  // Pieces of a length known at compile time need no call.
  if (i == 0 && count >= inline_capacity) {
    std::memcpy(row, inline_ids_.data(), sizeof(inline_ids_));
    i = inline_capacity;
  }
  for (; i < std::min(count, inline_capacity); ++i) row[i] = to_index(inline_ids_[static_cast<std::size_t>(i)]);
  while (i < count) {
    const std::int32_t end = std::min(count, chunk_begin(chunk_index(i) + 1));
    const block_id* from = &chunk_of(i)->ids[entry_of(i)];
    if (end - i == detail::block_chunk::capacity) {
      std::memcpy(row + i, from, detail::block_chunk::capacity * sizeof(block_id));
    } else {
      std::memcpy(row + i, from, static_cast<std::size_t>(end - i) * sizeof(block_id));
    }
    i = end;
  }
}

void block_table::grow_directory(std::int32_t at_least) {
  const std::int32_t capacity = std::max({at_least, 2 * directory_capacity_, 4});
  auto grown = std::make_unique<detail::block_chunk*[]>(static_cast<std::size_t>(capacity));
  std::copy_n(directory_, num_chunks(size_), grown.get());
  delete[] directory_;
  directory_ = grown.release();
  directory_capacity_ = capacity;
}

void block_table::drop_directory() noexcept {
  delete[] directory_;
  directory_ = nullptr;
  directory_capacity_ = 0;
}

void block_table::push_back_to_chunk(block_id id, detail::block_chunk_slab& slab) noexcept {
  detail::block_chunk*& chunk = chunk_of(size_);
  if (entry_of(size_) == 0 || chunk == nullptr) {
    chunk = slab.take();
    chunk->ids.fill(invalid_block);
  }
  chunk->ids[entry_of(size_++)] = id;
}

void block_table::release_one(block_id id, reuse_order order, block_pool& pool) noexcept {
  pool.release(id, order);  // a table holds valid references only, so this cannot throw
}

void block_table::unshare(std::int32_t chunk, std::size_t begin, std::size_t end, block_pool& pool,
                          detail::block_chunk_slab& slab) noexcept {
  detail::block_chunk* old = directory_[chunk];
  detail::block_chunk* copy = slab.take();
  copy->ids.fill(invalid_block);
  for (std::size_t k = begin; k < end; ++k) {
    if (old->ids[k] == invalid_block) continue;
    copy->ids[k] = old->ids[k];
    pool.retain(copy->ids[k]);
  }
  --old->num_tables;
  directory_[chunk] = copy;
}

bool block_table::cuts_shared_chunk(std::int32_t i) const noexcept {
  return i >= inline_capacity && i < size_ && i >= first_ && chunk_of(i) != nullptr && chunk_of(i)->num_tables > 1;
}

void block_table::replace(std::int32_t i, block_id id, block_pool& pool, detail::block_chunk_slab& slab) noexcept {
  if (i < inline_capacity) {
    release_one(inline_ids_[static_cast<std::size_t>(i)], reuse_order::last, pool);
    inline_ids_[static_cast<std::size_t>(i)] = id;
    return;
  }
  if (chunk_of(i)->num_tables > 1) unshare(chunk_index(i), 0, detail::block_chunk::capacity, pool, slab);
  block_id& entry = chunk_of(i)->ids[entry_of(i)];
  release_one(entry, reuse_order::last, pool);
  entry = id;
}

void block_table::share(const block_table& other, std::int32_t new_size, block_pool& pool,
                        detail::block_chunk_slab& slab) noexcept {
  size_ = new_size;
  first_ = std::min(other.first_, new_size);
  inline_ids_ = other.inline_ids_;
  pool.prefetch(inline_span(first_, std::min(new_size, inline_capacity)));
  for (std::int32_t i = first_; i < std::min(new_size, inline_capacity); ++i) {
    pool.retain(inline_ids_[static_cast<std::size_t>(i)]);
  }
  if (new_size <= inline_capacity) return;
  const std::int32_t num_full = (new_size - inline_capacity) / detail::block_chunk::capacity;
  for (std::int32_t c = 0; c < num_full; ++c) {
    directory_[c] = other.directory_[c];
    if (directory_[c] != nullptr) ++directory_[c]->num_tables;
  }
  if (num_chunks(new_size) == num_full) return;
  if (other.directory_[num_full] == nullptr) {  // null entries only
    directory_[num_full] = nullptr;
    return;
  }
  detail::block_chunk* tail = slab.take();
  tail->ids.fill(invalid_block);
  const std::int32_t begin = chunk_begin(num_full);
  pool.prefetch(other.directory_[num_full]->ids);
  for (std::int32_t i = std::max(begin, first_); i < new_size; ++i) {
    tail->ids[entry_of(i)] = other.directory_[num_full]->ids[entry_of(i)];
    pool.retain(tail->ids[entry_of(i)]);
  }
  directory_[num_full] = tail;
}

void block_table::truncate(std::int32_t new_size, std::int32_t num_kept_contents, block_pool& pool,
                           detail::block_chunk_slab& slab) noexcept {
  const auto order_of = [&](std::int32_t i) { return i < num_kept_contents ? reuse_order::last : reuse_order::first; };
  while (size_ > new_size && size_ > inline_capacity) {
    const std::int32_t chunk = chunk_index(size_ - 1);
    const std::int32_t begin = std::max(chunk_begin(chunk), new_size);
    detail::block_chunk* held = directory_[chunk];
    if (held != nullptr && held->num_tables > 1) {
      if (begin > chunk_begin(chunk)) {
        unshare(chunk, 0, entry_of(begin), pool, slab);
      } else {
        --held->num_tables;
      }
    } else if (held != nullptr) {
      pool.prefetch(held->ids);
      for (std::int32_t i = size_; i-- > std::max(begin, first_);) {
        release_one(held->ids[entry_of(i)], order_of(i), pool);
        held->ids[entry_of(i)] = invalid_block;
      }
      if (begin == chunk_begin(chunk)) slab.give_back(held);
    }
    size_ = begin;
  }
  if (size_ > new_size) pool.prefetch(inline_span(new_size, size_));
  for (; size_ > new_size; --size_) {
    if (size_ > first_) release_one(inline_ids_[static_cast<std::size_t>(size_ - 1)], order_of(size_ - 1), pool);
  }
  first_ = std::min(first_, size_);
}

void block_table::drop_front(std::int32_t new_first, block_pool& pool, detail::block_chunk_slab& slab,
                             reuse_order order) noexcept {
  for (; first_ < std::min(new_first, inline_capacity); ++first_) {
    release_one(inline_ids_[static_cast<std::size_t>(first_)], order, pool);
  }
  while (first_ < new_first) {
    const std::int32_t chunk = chunk_index(first_);
    const std::int32_t end = std::min(chunk_begin(chunk + 1), new_first);
    const bool whole = end == chunk_begin(chunk + 1);
    detail::block_chunk* held = directory_[chunk];
    if (held->num_tables > 1) {
      if (whole) {
        --held->num_tables;
        directory_[chunk] = nullptr;
      } else {
        unshare(chunk, entry_of(end), detail::block_chunk::capacity, pool, slab);
      }
    } else {
      for (; first_ < end; ++first_) {
        release_one(held->ids[entry_of(first_)], order, pool);
        held->ids[entry_of(first_)] = invalid_block;
      }
      if (whole) {
        slab.give_back(held);
        directory_[chunk] = nullptr;
      }
    }
    first_ = end;
  }
}

void block_table::clear(std::int32_t num_kept_contents, block_pool& pool, detail::block_chunk_slab& slab) noexcept {
  truncate(0, num_kept_contents, pool, slab);
}

}  // namespace bifolio::inline v0_2

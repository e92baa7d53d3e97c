// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Which physical block holds a sequence's logical block i, for i in [0, size).
///
/// The first 27 ids are in the table itself, the others in chunks of 64 from a slab. Full chunks are reference-counted
/// and shared between tables. So a fork of a long sequence copies pointers and retains at most 27 + 63 blocks, and the
/// release of a shared prefix is one decrement per chunk. A chunk that several tables share is full and never written;
/// a table that needs another entry in it copies it first. A chunk holds one pool reference to each of its blocks, for
/// all of its tables together.
///
/// Blocks left of a sliding window are given back while the table keeps counting from 0: entries [0, first) are null.

#include <array>
#include <bifolio/block_pool.hpp>
#include <bifolio/detail/block_chunk.hpp>
#include <bifolio/export.hpp>
#include <bifolio/types.hpp>
#include <cstddef>
#include <cstdint>
#include <span>

namespace bifolio::inline v0_2 {

/// Plain data of two cache lines; functions that change it take the pool and the slab as arguments. The owner calls
/// `clear` and `drop_directory` before it destroys the table. Functions marked noexcept need what `reserve` and the
/// slab's `reserve` provide; each says how many chunks it may take.
/// Thread-safety: one thread at a time.
class BIFOLIO_API block_table {
 public:
  static constexpr std::int32_t inline_capacity = 27;

  [[nodiscard]] std::int32_t size() const noexcept { return size_; }
  /// Entries below are null: given back by `drop_front`.
  [[nodiscard]] std::int32_t first() const noexcept { return first_; }
  /// `invalid_block` for i < first(). Requires 0 ≤ i < size().
  [[nodiscard]] block_id operator[](std::int32_t i) const noexcept {
    if (i < first_) return invalid_block;
    if (i < inline_capacity) return inline_ids_[static_cast<std::size_t>(i)];
    return chunk_of(i)->ids[entry_of(i)];
  }
  /// Whether another table uses the block at i too. Requires first() ≤ i < size().
  [[nodiscard]] bool is_shared(std::int32_t i, const block_pool& pool) const noexcept {
    return pool.is_shared((*this)[i]) || (i >= inline_capacity && chunk_of(i)->num_tables > 1);
  }
  /// Writes the first `count` ≤ size() entries to `row`, `null_entry` for those below first().
  void copy_to(std::int32_t* row, std::int32_t count, std::int32_t null_entry) const noexcept;

  /// The same for entries [begin, count) alone, `row` being that of entry 0. For few of them.
  void copy_to(std::int32_t* row, std::int32_t begin, std::int32_t count, std::int32_t null_entry) const noexcept {
    for (std::int32_t i = begin; i < count; ++i) {
      const block_id id = (*this)[i];
      row[i] = id == invalid_block ? null_entry : to_index(id);
    }
  }

  /// Chunks that a table grown from `size` to `new_size` entries takes from the slab.
  [[nodiscard]] static std::int64_t chunks_to_grow(std::int32_t size, std::int32_t new_size) noexcept {
    return num_chunks(new_size) - num_chunks(size);
  }
  /// Room for pointers to the chunks of `new_size` entries. Throws std::bad_alloc, having changed nothing.
  void reserve(std::int32_t new_size) {
    if (num_chunks(new_size) > directory_capacity_) [[unlikely]]
      grow_directory(num_chunks(new_size));
  }

  /// Appends a block and takes over the caller's reference to it. Takes ≤ 1 chunk.
  void push_back(block_id id, detail::block_chunk_slab& slab) noexcept {
    if (size_ < inline_capacity) {
      inline_ids_[static_cast<std::size_t>(size_++)] = id;
    } else {
      push_back_to_chunk(id, slab);
    }
  }
  /// Appends an entry that is null from the start, as if given back. Requires size() == first(). Takes no chunk.
  void push_null() noexcept {
    if (size_ >= inline_capacity && entry_of(size_) == 0) chunk_of(size_) = nullptr;
    first_ = ++size_;
  }
  /// Puts `id` (with the caller's reference) in the place of the block at i, whose reference is released.
  /// Takes 1 chunk when the block's chunk is shared. Requires first() ≤ i < size().
  void replace(std::int32_t i, block_id id, block_pool& pool, detail::block_chunk_slab& slab) noexcept;
  /// Whether replace(i), truncate(i) or drop_front(i) must copy a chunk that is shared.
  [[nodiscard]] bool cuts_shared_chunk(std::int32_t i) const noexcept;

  /// Makes this empty table one of the first `new_size` entries of `other`, sharing its full chunks. Takes ≤ 1 chunk.
  void share(const block_table& other, std::int32_t new_size, block_pool& pool,
             detail::block_chunk_slab& slab) noexcept;

  /// Releases entries [new_size, size), the last first: entries below `num_kept_contents` to the back of the eviction
  /// order, the others (partly filled or empty) to the front. Takes 1 chunk when new_size cuts a shared chunk.
  void truncate(std::int32_t new_size, std::int32_t num_kept_contents, block_pool& pool,
                detail::block_chunk_slab& slab) noexcept;
  /// Gives back entries [first, new_first), which become null. Takes 1 chunk when new_first cuts a shared chunk.
  void drop_front(std::int32_t new_first, block_pool& pool, detail::block_chunk_slab& slab,
                  reuse_order order = reuse_order::first) noexcept;
  /// Releases everything, as truncate(0, …); keeps the directory for the next sequence of this record.
  void clear(std::int32_t num_kept_contents, block_pool& pool, detail::block_chunk_slab& slab) noexcept;
  void drop_directory() noexcept;

  /// Whether all entries of a partly filled last chunk are null, so that `for_each` does not visit that chunk.
  [[nodiscard]] bool has_empty_tail_chunk() const noexcept {
    return size_ > inline_capacity && first_ == size_ && entry_of(size_) != 0 && chunk_of(size_) != nullptr;
  }
  /// Calls visit(id, chunk) for every block that is not null; chunk is null for inline entries.
  template <class Visit>
  void for_each(Visit visit) const {
    for (std::int32_t i = first_; i < size_; ++i) visit((*this)[i], i < inline_capacity ? nullptr : chunk_of(i));
  }

 private:
  [[nodiscard]] static std::int32_t num_chunks(std::int32_t size) noexcept {
    return size <= inline_capacity
               ? 0
               : (size - inline_capacity + detail::block_chunk::capacity - 1) / detail::block_chunk::capacity;
  }
  [[nodiscard]] static std::int32_t chunk_begin(std::int32_t chunk) noexcept {
    return inline_capacity + chunk * detail::block_chunk::capacity;
  }
  [[nodiscard]] static std::int32_t chunk_index(std::int32_t i) noexcept {
    return (i - inline_capacity) / detail::block_chunk::capacity;
  }
  [[nodiscard]] static std::size_t entry_of(std::int32_t i) noexcept {
    return static_cast<std::size_t>(i - inline_capacity) % detail::block_chunk::capacity;
  }
  [[nodiscard]] detail::block_chunk*& chunk_of(std::int32_t i) const noexcept { return directory_[chunk_index(i)]; }
  /// Entries [begin, end) of the inline ones; empty when begin ≥ end.
  [[nodiscard]] std::span<const block_id> inline_span(std::int32_t begin, std::int32_t end) const noexcept {
    if (begin >= end) return {};
    return std::span(inline_ids_).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
  }
  void push_back_to_chunk(block_id id, detail::block_chunk_slab& slab) noexcept;
  void grow_directory(std::int32_t at_least);
  static void release_one(block_id id, reuse_order order, block_pool& pool) noexcept;
  /// Replaces a shared chunk by a copy of its entries [begin, end), each retained; the others become null.
  void unshare(std::int32_t chunk, std::size_t begin, std::size_t end, block_pool& pool,
               detail::block_chunk_slab& slab) noexcept;

  alignas(128) std::int32_t size_ = 0;
  std::int32_t first_ = 0;
  detail::block_chunk** directory_ =
      nullptr;  // [directory_capacity_], owned; null for chunks that were given back whole
  std::int32_t directory_capacity_ = 0;
  std::array<block_id, inline_capacity> inline_ids_{};
};

}  // namespace bifolio::inline v0_2

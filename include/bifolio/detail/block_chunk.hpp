// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The chunks that block tables share; private to block_table.hpp.

#include <array>
#include <bifolio/buffer.hpp>
#include <bifolio/export.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <vector>

namespace bifolio::inline v0_2::detail {

/// 64 consecutive entries of one or more tables. Unused and given-back entries are `invalid_block`.
struct block_chunk {
  static constexpr std::int32_t capacity = 64;
  std::uint32_t num_tables;  ///< tables that point here; 0 in the slab's free list
  block_chunk* next_free;
  std::array<block_id, capacity> ids;
};

/// The chunks of all tables: a free list over pieces that are never given back before the slab itself is.
class BIFOLIO_API block_chunk_slab {
 public:
  explicit block_chunk_slab(memory_resource& memory) noexcept : memory_(&memory) {}
  block_chunk_slab(const block_chunk_slab&) = delete;
  block_chunk_slab& operator=(const block_chunk_slab&) = delete;

  /// The next `num_chunks` takes succeed. Throws `error` (out_of_memory) or std::bad_alloc, having changed nothing.
  void reserve(std::int64_t num_chunks) {
    if (num_chunks > num_free_) [[unlikely]]
      grow(num_chunks - num_free_);
  }
  /// A chunk with one table and entries of any value. Requires one reserved.
  [[nodiscard]] block_chunk* take() noexcept {
    block_chunk* taken = free_;
    free_ = taken->next_free;
    --num_free_;
    taken->num_tables = 1;
    return taken;
  }
  void give_back(block_chunk* chunk) noexcept {
    chunk->num_tables = 0;
    chunk->next_free = free_;
    free_ = chunk;
    ++num_free_;
  }
  [[nodiscard]] std::int64_t num_free() const noexcept { return num_free_; }
  [[nodiscard]] std::int64_t num_chunks() const noexcept { return num_chunks_; }

 private:
  void grow(std::int64_t at_least);

  memory_resource* memory_;
  std::vector<buffer> pieces_;
  block_chunk* free_ = nullptr;
  std::int64_t num_free_ = 0;
  std::int64_t num_chunks_ = 0;
};

}  // namespace bifolio::inline v0_2::detail

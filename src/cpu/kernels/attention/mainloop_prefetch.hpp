// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What mainloop.hpp prefetches: lists of the memory that later iterations read.

#include "cpu/kernels/attention/mainloop.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

template <class Key, class Self>
inline void mainloop<Key, Self>::list_ranges(range_list& list, const kv_tile_offsets& tile, int head) const noexcept {
  const bool k_runs = has_runs(args_.k_strides, args_.qk_head_dim);
  const bool v_runs = has_runs(args_.v_strides, args_.v_head_dim);
  const int k_bytes = args_.is_coded ? static_cast<int>(size_of(args_.k_code.type)) : static_cast<int>(sizeof(Key));
  const int v_bytes = args_.is_coded ? static_cast<int>(size_of(args_.v_code.type)) : static_cast<int>(sizeof(Key));
  bool whole = k_runs && args_.k_strides.token == args_.qk_head_dim;
  whole = whole && (v_in_k_ || (v_runs && args_.v_strides.token == args_.v_head_dim));
  for (int c = 0; c < tile_vectors; ++c) whole = whole && tile.uniform[c];
  list.count = 0;
  // All ranges of a list are of one length. Where rows of K and V differ, the ends of the longer ones are left to the
  // hardware's prefetcher.
  const int k_row = k_bytes * args_.qk_head_dim;
  const int v_row = v_bytes * args_.v_head_dim;
  const int row = v_in_k_ || k_row < v_row ? k_row : v_row;
  list.bytes = row * (whole ? lanes : 1);
  if (k_runs) add_ranges(list, args_.k, k_bytes, args_.k_strides.head, head, tile, tile.k, whole);
  if (v_runs && !v_in_k_) add_ranges(list, args_.v, v_bytes, args_.v_strides.head, head, tile, tile.v, whole);
  if (k_runs || v_runs || args_.block_size > tile_keys) return;
  // What a head has in a block is one range (x_split).
  list.bytes = row * args_.block_size;
  add_blocks(list, args_.k, k_bytes, args_.k_strides, head, tile, tile.k);
  if (!v_in_k_) add_blocks(list, args_.v, v_bytes, args_.v_strides, head, tile, tile.v);
}

template <class Key, class Self>
inline void mainloop<Key, Self>::add_tokens(range_list& list, const kv_tile_offsets& tile, int part, int num_parts,
                                            int first_head, int num_heads) const noexcept {
  const int k_bytes = args_.is_coded ? static_cast<int>(size_of(args_.k_code.type)) : static_cast<int>(sizeof(Key));
  const int v_bytes = args_.is_coded ? static_cast<int>(size_of(args_.v_code.type)) : static_cast<int>(sizeof(Key));
  const int k_row = k_bytes * args_.qk_head_dim;
  const int v_row = v_bytes * args_.v_head_dim;
  list.bytes = num_heads * (k_row < v_row ? k_row : v_row);
  const int num_keys = tile.end - tile.begin;
  const int begin = tile.begin + num_keys * part / num_parts;
  const int end = tile.begin + num_keys * (part + 1) / num_parts;
  const auto* const k = static_cast<const char*>(args_.k) + first_head * args_.k_strides.head * k_bytes;
  const auto* const v = static_cast<const char*>(args_.v) + first_head * args_.v_strides.head * v_bytes;
  for (int key = begin; key < end; ++key) list.ranges[list.count++] = k + tile.k[key] * k_bytes;
  for (int key = begin; key < end; ++key) list.ranges[list.count++] = v + tile.v[key] * v_bytes;
}

template <class Key, class Self>
inline void mainloop<Key, Self>::add_blocks(range_list& list, const void* plane, int element, const kv_strides& strides,
                                            int head, const kv_tile_offsets& tile,
                                            const std::int64_t* offsets) const noexcept {
  const std::int64_t first = (item_.kv_head_begin + head) * strides.head;
  for (int key = tile.begin; key < tile.end;) {
    const auto token = static_cast<int>((tile.first + key) % args_.block_size);
    list.ranges[list.count++] =
        static_cast<const char*>(plane) + (first + offsets[key] - token * strides.token) * element;
    key += args_.block_size - token;
  }
}

template <class Key, class Self>
inline void mainloop<Key, Self>::add_ranges(range_list& list, const void* plane, int element, std::int64_t head_stride,
                                            int head, const kv_tile_offsets& tile, const std::int64_t* offsets,
                                            bool whole) const noexcept {
  const std::int64_t first = (item_.kv_head_begin + head) * head_stride;
  for (int key = tile.begin; key < tile.end; key += whole ? lanes : 1) {
    list.ranges[list.count++] = static_cast<const char*>(plane) + (first + offsets[key]) * element;
  }
}

template <class Key, class Self>
inline bool mainloop<Key, Self>::list_next_item(range_list& list, int part) const noexcept {
  attention_item next;
  if (item_.peek_next == nullptr || !item_.peek_next(item_.peek_context, next)) return false;
  const std::int64_t splits_first = static_cast<std::int64_t>(next.split_begin) * split_keys;
  const std::int64_t splits_end = static_cast<std::int64_t>(next.split_end) * split_keys;
  const visible_range visible = visible_to(next);
  const std::int64_t begin = visible.begin > splits_first ? visible.begin : splits_first;
  const std::int64_t end = visible.end < splits_end ? visible.end : splits_end;
  if (begin >= end) return false;
  kv_tile_offsets tile;
  locate_tile(tile, begin / tile_keys * tile_keys, begin, end, next.block_table);
  if (whole_tokens_) {
    list.count = 0;
    add_tokens(list, tile, part, num_heads_, next.kv_head_begin, next.kv_head_end - next.kv_head_begin);
  } else {
    list_ranges(list, tile, next.kv_head_begin - item_.kv_head_begin);
  }
  return true;
}

template <class Key, class Self>
inline void mainloop<Key, Self>::prefetch_first_tile(std::int64_t num_tiles) noexcept {
  range_list& list = lists_[num_heads_ % 2];
  list.count = 0;
  add_tokens(list, tiles_[0], 0, 1, item_.kv_head_begin, num_heads_);
  if (num_tiles > 1) add_tokens(list, tiles_[1], 0, num_heads_, item_.kv_head_begin, num_heads_);
  prefetcher_.push(list.ranges, list.count, list.bytes);
}

template <class Key, class Self>
inline void mainloop<Key, Self>::prefetch(std::int64_t iteration, std::int64_t num_iterations) noexcept {
  range_list& list = lists_[iteration % 2];
  const std::int64_t beyond = iteration - num_iterations;
  if (beyond >= 0) {
    if (beyond >= (whole_tokens_ ? num_heads_ : 1) || !list_next_item(list, static_cast<int>(beyond))) {
      return prefetcher_.push_end();
    }
  } else if (whole_tokens_) {
    list.count = 0;
    add_tokens(list, tiles_[iteration / num_heads_ % 3], static_cast<int>(iteration % num_heads_), num_heads_,
               item_.kv_head_begin, num_heads_);
  } else {
    list_ranges(list, tiles_[iteration / num_heads_ % 3], static_cast<int>(iteration % num_heads_));
  }
  prefetcher_.push(list.ranges, list.count, list.bytes);
  if (iteration < num_iterations && (k_tails_ || v_tails_)) {
    const int kv_head = static_cast<int>(item_.kv_head_begin + iteration % num_heads_);
    const kv_tile_offsets& tile = tiles_[iteration / num_heads_ % 3];
    if (k_tails_) prefetch_tails(args_.k, kv_head * args_.k_code.tail.head, tile.k_tail, tile);
    if (v_tails_) prefetch_tails(args_.v, kv_head * args_.v_code.tail.head, tile.v_tail, tile);
  }
}

template <class Key, class Self>
inline void mainloop<Key, Self>::prefetch_tails(const void* base, std::int64_t head_offset, const std::int64_t* tails,
                                                const kv_tile_offsets& tile) noexcept {
  const auto first = reinterpret_cast<std::uintptr_t>(base) + static_cast<std::uintptr_t>(head_offset);
  std::uintptr_t last = 0;
  for (int key = tile.begin; key < tile.end; ++key) {
    std::uintptr_t address = first + static_cast<std::uintptr_t>(tails[key]);
    if (key % lanes == 0 && tile.uniform[key / lanes] && tails[key + lanes - 1] - tails[key] < 4 * cache_line_bytes) {
      // Those of one block side by side: line by line.
      key += lanes - 1;
      const std::uintptr_t end = first + static_cast<std::uintptr_t>(tails[key]);
      for (; address < end; address += cache_line_bytes) prefetch_line{}(address);
      address = end;
    }
    if (address / cache_line_bytes == last) continue;
    last = address / cache_line_bytes;
    prefetch_line{}(address);
  }
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

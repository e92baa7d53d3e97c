// SPDX-License-Identifier: Apache-2.0
#pragma once

/// How mainloop.hpp reads the K and V of a tile: in place, or copied and widened where their rows are not.

#include "cpu/kernels/attention/mainloop.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

template <class Key, class Self>
inline void mainloop<Key, Self>::stage_key(const kv_tile_offsets& tile, int head, int key, Key* to) const noexcept {
  const int kv_head = item_.kv_head_begin + head;
  const std::int64_t offset = tile.k[key] + kv_head * args_.k_strides.head;
  if constexpr (__is_same(Key, float)) {
    if (args_.is_coded) {
      return decode_row(args_.k_code, args_.k, offset, tile.k_tail[key] + kv_head * args_.k_code.tail.head,
                        args_.k_strides, kv_head, args_.qk_head_dim, to);
    }
  }
  stage_row(static_cast<const Key*>(args_.k) + offset, args_.k_strides, args_.qk_head_dim, to);
}

template <class Key, class Self>
inline void mainloop<Key, Self>::widen_keys(const kv_tile_offsets& tile, int head, int begin, int end, Key* to,
                                            std::int64_t stride) noexcept {
  if constexpr (widens_codes) {
    const int kv_head = item_.kv_head_begin + head;
    widen_rows(args_.k_code.type, args_.k, kv_head * args_.k_strides.head, args_.k_strides, args_.qk_head_dim, tile.k,
               begin, end, to, stride, prefetcher_);
  }
}

template <class Key, class Self>
inline void mainloop<Key, Self>::stage_row(const Key* from, const kv_strides& strides, int head_dim, Key* to) noexcept {
  if (strides.dim == 1 && strides.chunk == piece_dims && head_dim % piece_dims == 0) {
    for (int d = 0; d < head_dim; d += piece_dims, from += strides.chunk_stride) __builtin_memcpy(to + d, from, 16);
    return;
  }
  for (int d = 0; d < head_dim;) {
    const int run = head_dim - d < strides.chunk ? head_dim - d : strides.chunk;
    for (int i = 0; i < run; ++i) to[d + i] = from[i * strides.dim];
    from += strides.chunk_stride;
    d += run;
  }
}

template <class Key, class Self>
inline void mainloop<Key, Self>::stage_columns(const Key* from, Key* to) noexcept {
  const std::int64_t apart = args_.v_strides.dim;
  const int head_dim = args_.v_head_dim;
  constexpr int step = lanes * 4 / static_cast<int>(sizeof(Key));
  const Key* const zeros = static_cast<const Key*>(scratch_.zero_row);
  prefetch_poller poller(prefetcher_);
  const auto stage = [&]<bool IsWhole>(int d) __attribute__((always_inline)) {
    const auto row = [&](int i) __attribute__((always_inline)) {
      return IsWhole || d + i < head_dim ? from + (d + i) * apart : zeros;
    };
    const auto store_key = [&](int key, vf dims) __attribute__((always_inline)) {
      store(reinterpret_cast<float*>(to + std::int64_t{key} * padded_ + d), dims);
    };
    if constexpr (sizeof(Key) == 4) {
      transpose(
          [&](int i) __attribute__((always_inline)) { return load_bits(row(i)); }, store_key);
    } else if constexpr (transposes_half_rows) {
      transpose_words(row, store_key);
    } else {
      transpose(
          [&](int i) __attribute__((always_inline)) { return join_elements(row(2 * i), row(2 * i + 1)); }, store_key);
    }
    poller.poll(column_polls);
  };
  int d = 0;
  for (; d + step <= head_dim; d += step) stage.template operator()<true>(d);
  if (d < head_dim) stage.template operator()<false>(d);
}

template <class Key, class Self>
inline void mainloop<Key, Self>::stage_value(const kv_tile_offsets& tile, int head, int key, Key* to) const noexcept {
  const int kv_head = item_.kv_head_begin + head;
  const std::int64_t offset = tile.v[key] + kv_head * args_.v_strides.head;
  if constexpr (__is_same(Key, float)) {
    if (args_.is_coded) {
      return decode_row(args_.v_code, args_.v, offset, tile.v_tail[key] + kv_head * args_.v_code.tail.head,
                        args_.v_strides, kv_head, args_.v_head_dim, to);
    }
  }
  stage_row(static_cast<const Key*>(args_.v) + offset, args_.v_strides, args_.v_head_dim, to);
}

template <class Key, class Self>
inline void mainloop<Key, Self>::find_values(const kv_tile_offsets& tile, int head, const Key** rows) noexcept {
  const std::int64_t head_offset = (item_.kv_head_begin + head) * args_.v_strides.head;
  if (v_contiguous_) {
    const Key* const v = static_cast<const Key*>(args_.v) + head_offset;
    for (int key = tile.begin; key < tile.end; ++key) rows[key] = v + tile.v[key];
    return;
  }
  auto* const staging = static_cast<Key*>(scratch_.staging);
  if constexpr (widens_codes) {
    if (v_widened_) {
      widen_rows(args_.v_code.type, args_.v, head_offset, args_.v_strides, args_.v_head_dim, tile.v, tile.begin,
                 tile.end, staging + std::int64_t{tile.begin} * padded_, padded_, prefetcher_);
      for (int key = tile.begin; key < tile.end; ++key) rows[key] = staging + std::int64_t{key} * padded_;
      return;
    }
  }
  for (int key = tile.begin; key < tile.end; ++key) {
    Key* const row = staging + std::int64_t{key} * padded_;
    rows[key] = row;
    if (!v_columns_ || !tile.uniform[key / lanes]) {
      stage_value(tile, head, key, row);
    } else if (key % lanes == 0) {
      stage_columns(static_cast<const Key*>(args_.v) + head_offset + tile.v[key], row);
    }
  }
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

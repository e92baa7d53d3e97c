// SPDX-License-Identifier: Apache-2.0
#pragma once

/// How vectors.hpp packs queries and transposes, widens or pairs the K and V of a tile.

#include "cpu/kernels/attention/vectors.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

template <class Key, vector_sums Sums>
inline void vector_mainloop<Key, Sums>::pack_queries() noexcept {
  float* row_values = scratch_.values;
  for (int head = 0; head < num_heads_; ++head) {
    float* queries = scratch_.queries + static_cast<std::int64_t>(head) * head_rows_ * query_values_;
    for (int g = 0; g < num_groups_; ++g) {
      const int begin = group_begin(g);
      const int rows = group_begin(g + 1) - begin;
      float* packed = queries + static_cast<std::int64_t>(begin) * query_values_;
      for (int i = 0; i < rows; ++i) {
        const std::int64_t offset = query_offset(head, begin + i);
        if constexpr (scores_by_fours) {
          widen_any(args_.q_type, args_.q, offset, args_.qk_head_dim, 1.0f, row_values);
          round_query(row_values, args_.qk_head_dim);
        } else if constexpr (scores_by_dots) {
          if (k_zeros_) note_query_sum(offset, head, begin + i, 1.0f);
          pair_row(static_cast<const bfloat16*>(args_.q) + offset, args_.qk_head_dim, row_values);
        } else {
          if (k_zeros_) note_query_sum(offset, head, begin + i, args_.scale);
          widen_any(args_.q_type, args_.q, offset, args_.qk_head_dim, args_.scale * k_scale(head), row_values);
          if (query_values_ > args_.qk_head_dim) row_values[args_.qk_head_dim] = 0;
        }
        for (int d = 0; d < query_values_; ++d) packed[static_cast<std::int64_t>(d) * rows + i] = row_values[d];
      }
    }
  }
}

template <class Key, vector_sums Sums>
inline void vector_mainloop<Key, Sums>::note_query_sum(std::int64_t offset, int head, int row,
                                                       float factor) const noexcept {
  float* const values = scratch_.values;
  widen_any(args_.q_type, args_.q, offset, args_.qk_head_dim, factor, values);
  float sum = 0;
  for (int d = 0; d < args_.qk_head_dim; ++d) sum += values[d];
  scratch_.query_sums[static_cast<std::int64_t>(head) * head_rows_ + row] = sum;
}

template <class Key, vector_sums Sums>
template <class Code>
inline void vector_mainloop<Key, Sums>::pack_codes(const kv_tile_offsets& tile, int head, int dim, int dims) noexcept {
  const code_widener<Code> widener;
  const Code* const k = static_cast<const Code*>(args_.k) + (item_.kv_head_begin + head) * args_.k_strides.head + dim;
  const Code* const zeros = static_cast<const Code*>(scratch_.zero_row);
  for (int column = 0; column < tile_keys; column += lanes) {
    float* const keys = scratch_.keys + column;
    if (tile.uniform[column / lanes]) {
      const uniform_rows<Code> rows(k + tile.k[column], args_.k_strides.token);
      if (k_in_codes_) {
        store_code_columns(rows, dims, keys, prefetcher_);
      } else {
        transpose_codes(widener, rows, dims, keys, prefetcher_);
      }
      continue;
    }
    scattered_rows<Code> rows;
    for (int i = 0; i < lanes; ++i) {
      const int key = column + i;
      rows.row[i] = key < tile.begin || key >= tile.end ? zeros : k + tile.k[key];
    }
    if (k_in_codes_) {
      store_code_columns(rows, dims, keys, prefetcher_);
    } else {
      transpose_codes(widener, rows, dims, keys, prefetcher_);
    }
  }
}

template <class Key, vector_sums Sums>
inline void vector_mainloop<Key, Sums>::pack_fours(const kv_tile_offsets& tile, int head, int dim, int dims) noexcept {
  const auto* const k = static_cast<const std::int8_t*>(args_.k) + (item_.kv_head_begin + head) * args_.k_strides.head;
  const auto* const zeros = static_cast<const std::int8_t*>(scratch_.zero_row);
  auto* const staging = static_cast<std::int8_t*>(scratch_.staging);
  const bool in_place = base::has_runs(args_.k_strides, args_.qk_head_dim) && args_.qk_head_dim % 4 == 0;
  for (int column = 0; column < tile_keys; column += lanes) {
    float* const keys = scratch_.keys + column;
    if (in_place && tile.uniform[column / lanes]) {
      const uniform_rows<std::int8_t> rows(k + dim + tile.k[column], args_.k_strides.token);
      transpose_fours(rows, dims, keys, prefetcher_);
      continue;
    }
    scattered_rows<std::int8_t> rows;
    for (int i = 0; i < lanes; ++i) {
      const int key = column + i;
      if (key < tile.begin || key >= tile.end) {
        rows.row[i] = zeros;
      } else if (in_place) {
        rows.row[i] = k + tile.k[key] + dim;
      } else {
        std::int8_t* const row = staging + std::int64_t{i} * qk_padded_;
        gather_elements(k + tile.k[key], args_.k_strides, dim, dims, row);
        rows.row[i] = row;
      }
    }
    transpose_fours(rows, dims, keys, prefetcher_);
  }
}

template <class Key, vector_sums Sums>
inline void vector_mainloop<Key, Sums>::pack_keys(const kv_tile_offsets& tile, int head, int dim, int dims) noexcept {
  if constexpr (scores_by_fours) return pack_fours(tile, head, dim, dims);
  if constexpr (widens_codes && may_keep_pairs) {
    if (k_transposed_) {
      return visit_dtype(args_.k_code.type, [&](auto traits) {
        using code = typename decltype(traits)::storage;
        if constexpr (sizeof(code) == 1 && widens_quads<code>) pack_codes<code>(tile, head, dim, dims);
      });
    }
  }
  const Key* k = static_cast<const Key*>(args_.k);
  if (k_contiguous_ || k_pieces_) k += (item_.kv_head_begin + head) * args_.k_strides.head;
  if (k_contiguous_) k += dim;
  if (k_pieces_) k += dim / piece_dims * args_.k_strides.chunk_stride;
  auto* staging = static_cast<Key*>(scratch_.staging);
  const Key* zeros = static_cast<const Key*>(scratch_.zero_row);
  for (int column = 0; column < tile_keys; column += lanes) {
    float* keys = scratch_.keys + column;
    if (k_pieces_ && tile.uniform[column / lanes]) {
      transpose_pieces(k + tile.k[column], dims, keys);
      continue;
    }
    if (k_contiguous_ && tile.uniform[column / lanes]) {
      const uniform_rows<Key> rows(k + tile.k[column], args_.k_strides.token);
      transpose_rows(rows, dims, keys);
      continue;
    }
    if constexpr (widens_codes) {
      if (k_widened_ && column >= tile.begin && column + lanes <= tile.end) {
        widen_keys(tile, head, column, column + lanes, staging, qk_padded_);
        transpose_rows(uniform_rows<Key>(staging, qk_padded_), dims, keys);
        continue;
      }
    }
    scattered_rows<Key> rows;
    for (int i = 0; i < lanes; ++i) {
      const int key = column + i;
      if (key < tile.begin || key >= tile.end) {
        rows.row[i] = zeros;
      } else if (k_contiguous_) {
        rows.row[i] = k + tile.k[key];
      } else {
        Key* row = staging + static_cast<std::int64_t>(i) * qk_padded_;
        if (k_widened_) {
          widen_keys(tile, head, key, key + 1, row, qk_padded_);
        } else {
          stage_key(tile, head, key, row);
        }
        rows.row[i] = row + dim;
      }
    }
    transpose_rows(rows, dims, keys);
  }
}

template <class Key, vector_sums Sums>
template <class Rows>
BIFOLIO_INLINE void vector_mainloop<Key, Sums>::transpose_rows(const Rows& rows, int dims, float* keys) noexcept {
  if constexpr (!scores_by_dots) {
    if (!pairs_) return transpose_keys<Key, true>(rows, dims, keys, prefetcher_);
  }
  if constexpr (may_keep_pairs) transpose_keys<Key, false>(rows, dims, keys, prefetcher_);
}

template <class Key, vector_sums Sums>
BIFOLIO_INLINE void vector_mainloop<Key, Sums>::transpose_pieces(const Key* from, int dims, float* keys) noexcept {
  const std::int64_t apart = args_.k_strides.chunk_stride;
  if constexpr (!scores_by_dots) {
    if (!pairs_) return cpu::BIFOLIO_ISA::transpose_pieces<Key, true>(from, apart, dims, keys, prefetcher_);
  }
  if constexpr (may_keep_pairs) {
    cpu::BIFOLIO_ISA::transpose_pieces<Key, false>(from, apart, dims, keys, prefetcher_);
  }
}

template <class Key, vector_sums Sums>
inline void vector_mainloop<Key, Sums>::widen_values(const kv_tile_offsets& tile, const Key* const* rows) noexcept {
  const int whole = args_.v_head_dim / (2 * lanes) * (2 * lanes);
  for (int key = tile.begin; key < tile.end; ++key) {
    const Key* row = rows[key];
    float* to = scratch_.values + static_cast<std::int64_t>(key) * padded_;
    vf a;
    vf b;
    for (int d = 0; d < dims_; d += 2 * lanes) {
      if (d < whole) {
        load_pair(row + d, a, b);
      } else {
        load_first_of_pair(row + d, args_.v_head_dim - d, a, b);
      }
      store(to + d, a);
      store(to + d + lanes, b);
    }
  }
}

template <class Key, vector_sums Sums>
inline void vector_mainloop<Key, Sums>::pair_values(int begin, int end, const Key* const* value_rows_of) noexcept {
  const int whole = args_.v_head_dim / (2 * lanes) * (2 * lanes);
  for (int pair = begin / 2; 2 * pair < end; ++pair) {
    const Key* rows[2];
    for (int i = 0; i < 2; ++i) {
      const int key = 2 * pair + i;
      rows[i] = key < begin || key >= end ? static_cast<const Key*>(scratch_.zero_row) : value_rows_of[key];
    }
    float* to = scratch_.values + static_cast<std::int64_t>(pair) * padded_;
    vf a;
    vf b;
    for (int d = 0; d < dims_; d += 2 * lanes) {
      if (d < whole) {
        pair_rows(load_bits(rows[0] + d), load_bits(rows[1] + d), a, b);
      } else {
        const int num_bytes = 2 * (args_.v_head_dim - d);
        pair_rows(load_first(rows[0] + d, num_bytes), load_first(rows[1] + d, num_bytes), a, b);
      }
      store(to + d, a);
      store(to + d + lanes, b);
    }
  }
}

template <class Key, vector_sums Sums>
inline void vector_mainloop<Key, Sums>::pair_columns(const kv_tile_offsets& tile, int head) noexcept {
  const Key* const v = static_cast<const Key*>(args_.v) + (item_.kv_head_begin + head) * args_.v_strides.head;
  auto* const staging = static_cast<Key*>(scratch_.staging);
  for (int column = 0; column < tile_keys; column += lanes) {
    if (tile.uniform[column / lanes]) {
      pair_uniform_columns(v + tile.v[column], scratch_.values + std::int64_t{column / 2} * padded_);
      continue;
    }
    const int begin = column > tile.begin ? column : tile.begin;
    const int end = column + lanes < tile.end ? column + lanes : tile.end;
    const Key* rows[tile_keys];
    for (int key = begin; key < end; ++key) {
      Key* const row = staging + std::int64_t{key} * padded_;
      stage_value(tile, head, key, row);
      rows[key] = row;
    }
    pair_values(begin, end, rows);
  }
}

template <class Key, vector_sums Sums>
inline void vector_mainloop<Key, Sums>::pair_uniform_columns(const Key* from, float* to) noexcept {
  const std::int64_t apart = args_.v_strides.dim;
  const int head_dim = args_.v_head_dim;
  const Key* const zeros = static_cast<const Key*>(scratch_.zero_row);
  prefetch_poller poller(prefetcher_);
  const auto pair = [&]<bool IsWhole>(int d, int half) __attribute__((always_inline)) {
    transpose_half_rows(
        [&](int lane) __attribute__((always_inline)) {
          const int dim = d + paired_dim(half, lane);
          return IsWhole || dim < head_dim ? from + dim * apart : zeros;
        },
        [&](int key_pair, vf dims)
            __attribute__((always_inline)) { store(to + std::int64_t{key_pair} * padded_ + d + half * lanes, dims); });
    poller.poll(column_polls / 2);
  };
  int d = 0;
  for (; d + 2 * lanes <= head_dim; d += 2 * lanes) {
    pair.template operator()<true>(d, 0);
    pair.template operator()<true>(d, 1);
  }
  if (d == head_dim) return;
  pair.template operator()<false>(d, 0);
  pair.template operator()<false>(d, 1);
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Micro-kernels of attention on vector registers: MR rows × NR vectors of accumulators, one accumulator per result,
/// summed in one order. (MR, NR and, for the dims packed at a time, KC are the terms of BLIS.)

#include <cstddef>

#include "cpu/kernels/attention/kernels.hpp"
#include "cpu/kernels/attention/prefetch_queue.hpp"
#include "cpu/kernels/simd/simd.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

/// MR × NR: up to 6 × 4 accumulators in 32 registers, 6 × 2 in 16. With 32 registers, seven or eight rows are one group
/// of NR 2 rather than two groups of NR 4, so that K and V are read and widened once.
inline constexpr int mr = 6;
inline constexpr int max_mr = num_vector_registers == 32 ? 8 : mr;
inline constexpr int wide_nr = num_vector_registers == 32 ? 4 : 2;
[[nodiscard]] constexpr int nr_of(int rows) noexcept { return rows > mr ? 2 : wide_nr; }
inline constexpr int tile_vectors = tile_keys / lanes;

// How a column of transposed keys is stored in scratch and multiplied: `dims` dims in 32 bits per key, in `parts` steps
// of one query value per row each. The first two have the same chains of multiply-adds.

/// One dim, widened.
struct wide_column {
  static constexpr int dims = 1;
  static constexpr int parts = 1;
  template <int Part>
  static BIFOLIO_INLINE vf load_part(const float* keys) noexcept {
    return load(keys);
  }
  static BIFOLIO_INLINE vf multiply_add(vf query, vf key, vf acc) noexcept { return fma(query, key, acc); }
};

/// Two dims of 16 bits, widened by the loads.
template <class Key>
struct pair_column {
  static constexpr int dims = 2;
  static constexpr int parts = 2;
  template <int Part>
  static BIFOLIO_INLINE vf load_part(const float* keys) noexcept {
    return load_half<Key, Part>(keys);
  }
  static BIFOLIO_INLINE vf multiply_add(vf query, vf key, vf acc) noexcept { return fma(query, key, acc); }
};

/// Two dims of bfloat16, multiplied with a pair of query elements.
struct dot_column {
  static constexpr int dims = 2;
  static constexpr int parts = 1;
  template <int Part>
  static BIFOLIO_INLINE vf load_part(const float* keys) noexcept {
    return load(keys);
  }
  static BIFOLIO_INLINE vf multiply_add(vf query, vf key, vf acc) noexcept { return pair_dot(query, key, acc); }
};

/// Four dims of 8-bit integers, multiplied with four query elements; sums are int32 in the place of floats.
struct quad_column {
  static constexpr int dims = 4;
  static constexpr int parts = 1;
  template <int Part>
  static BIFOLIO_INLINE vf load_part(const float* keys) noexcept {
    return load(keys);
  }
  static BIFOLIO_INLINE vf multiply_add(vf query, vf key, vf acc) noexcept { return quad_dot(query, key, acc); }
};

/// scores[r][key] += Σ_d queries[d][r] · keys[d][key], d ascending, starting from 0 unless `add`. queries
/// [num_columns · parts][Rows], keys [num_columns][tile_keys], scores [Rows][tile_keys].
template <class Column, int Rows>
BIFOLIO_INLINE void score_rows(const float* queries, const float* keys, int num_columns, bool add, float* scores,
                               prefetcher& prefetch) noexcept {
  constexpr int vectors = nr_of(Rows);
  prefetch_poller poller(prefetch);
  for (int column = 0; column < tile_keys; column += vectors * lanes) {
    vf acc[std::size_t{Rows}][std::size_t{vectors}];
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < vectors; ++c) {
        acc[r][c] = add ? load(scores + r * tile_keys + column + c * lanes) : vf(0.0f);
      }
    }
    const float* q = queries;
    const float* k = keys + column;
    const auto part = [&]<int Part>() __attribute__((always_inline)) {
      vf b[std::size_t{vectors}];
#pragma GCC unroll 4
      for (int c = 0; c < vectors; ++c) b[c] = Column::template load_part<Part>(k + c * lanes);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const vf a = broadcast(q[Part * Rows + r]);
#pragma GCC unroll 4
        for (int c = 0; c < vectors; ++c) acc[r][c] = Column::multiply_add(a, b[c], acc[r][c]);
      }
      poller.poll(Column::dims / Column::parts);
    };
    for (int i = 0; i < num_columns; ++i) {
      part.template operator()<0>();
      if constexpr (Column::parts == 2) part.template operator()<1>();
      q += Column::parts * Rows;
      k += tile_keys;
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < vectors; ++c) store(scores + r * tile_keys + column + c * lanes, acc[r][c]);
    }
  }
}

/// Calls `pass.operator()<Vectors, IsWhole>(dim)` for dims [0, num_dims) of rows of V, of NR vectors; only the last
/// pair of vectors of the last pass may have fewer dims than lanes.
template <int Nr, class Pass>
BIFOLIO_INLINE void over_dims(int num_dims, const Pass& pass) noexcept {
  constexpr int vectors = Nr;
  int dim = 0;
  for (; dim + vectors * lanes <= num_dims; dim += vectors * lanes) pass.template operator()<vectors, true>(dim);
  if (dim == num_dims) return;
  if constexpr (vectors > 2) {
    if (num_dims - dim == 2 * lanes) return pass.template operator()<2, true>(dim);
    if (num_dims - dim > 2 * lanes) return pass.template operator()<vectors, false>(dim);
  }
  pass.template operator()<2, false>(dim);
}

/// acc[r][dims] += Σ_key p[r][key] · values[key][dims], key ascending in [begin, end). p [Rows][tile_keys]; values: one
/// pointer per key; acc [Rows] rows of `acc_stride` floats in value order, which have room for whole pairs of vectors.
template <int Rows, class Value>
BIFOLIO_INLINE void accumulate_rows(const float* p, const Value* const* values, int begin, int end, int num_dims,
                                    float* acc_rows, std::int64_t acc_stride, prefetcher& prefetch) noexcept {
  prefetch_poller poller(prefetch);
  const auto pass = [&]<int Vectors, bool IsWhole>(int dim) __attribute__((always_inline)) {
    vf acc[std::size_t{Rows}][std::size_t{Vectors}];
    float* first = acc_rows + dim;
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) acc[r][c] = load(first + r * acc_stride + c * lanes);
    }
    for (int key = begin; key < end; ++key) {
      const Value* row = values[key] + dim;
      poller.poll();
      vf b[std::size_t{Vectors}];
#pragma GCC unroll 2
      for (int c = 0; c < Vectors; c += 2) {
        if (IsWhole || c + 2 < Vectors) {
          load_pair(row + c * lanes, b[c], b[c + 1]);
        } else {
          load_first_of_pair(row + c * lanes, num_dims - dim - c * lanes, b[c], b[c + 1]);
        }
      }
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        const vf a = broadcast(p[r * tile_keys + key]);
#pragma GCC unroll 4
        for (int c = 0; c < Vectors; ++c) acc[r][c] = fma(a, b[c], acc[r][c]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) store(first + r * acc_stride + c * lanes, acc[r][c]);
    }
  };
  over_dims<nr_of(Rows)>(num_dims, pass);
}

/// V rows in place, as `accumulate_pairs` reads them: one pointer per key.
struct value_rows {
  const bfloat16* const* row;
  static constexpr int nr_of(int rows) noexcept { return BIFOLIO_ISA::nr_of(rows); }
  BIFOLIO_INLINE void load_pairs(int pair, int dim, vf& a, vf& b) const noexcept {
    pair_rows(load_bits(row[2 * pair] + dim), load_bits(row[2 * pair + 1] + dim), a, b);
  }
  BIFOLIO_INLINE void load_first_pairs(int pair, int dim, int count, vf& a, vf& b) const noexcept {
    pair_rows(load_first(row[2 * pair] + dim, 2 * count), load_first(row[2 * pair + 1] + dim, 2 * count), a, b);
  }
};

/// V rows that were paired in scratch: [pairs of keys][stride], two vectors for 2·lanes dims.
struct value_pairs {
  const float* pairs;
  std::int64_t stride;
  static constexpr int nr_of(int rows) noexcept { return BIFOLIO_ISA::nr_of(rows); }
  BIFOLIO_INLINE void load_pairs(int pair, int dim, vf& a, vf& b) const noexcept {
    a = load(pairs + pair * stride + dim);
    b = load(pairs + pair * stride + dim + lanes);
  }
  BIFOLIO_INLINE void load_first_pairs(int pair, int dim, int, vf& a, vf& b) const noexcept {
    load_pairs(pair, dim, a, b);
  }
};

/// Like `accumulate_rows`, two bfloat16 keys at a time: pairs [begin, end) of keys, p [Rows][tile_keys] of which the
/// first half of a row holds pairs. With `keep` only the keys of a pair whose 16 bits are set are taken.
template <int Rows, class Values>
BIFOLIO_INLINE void accumulate_pairs(const float* p, const Values& values, int begin, int end, std::uint32_t keep,
                                     int num_dims, float* acc_rows, std::int64_t acc_stride,
                                     prefetcher& prefetch) noexcept {
  prefetch_poller poller(prefetch);
  const auto pass = [&]<int Vectors, bool IsWhole>(int dim) __attribute__((always_inline)) {
    vf acc[std::size_t{Rows}][std::size_t{Vectors}];
    float* first = acc_rows + dim;
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) acc[r][c] = load(first + r * acc_stride + c * lanes);
    }
    for (int pair = begin; pair < end; ++pair) {
      vf b[std::size_t{Vectors}];
#pragma GCC unroll 2
      for (int c = 0; c < Vectors; c += 2) {
        if (IsWhole || c + 2 < Vectors) {
          values.load_pairs(pair, dim + c * lanes, b[c], b[c + 1]);
        } else {
          values.load_first_pairs(pair, dim + c * lanes, num_dims - dim - c * lanes, b[c], b[c + 1]);
        }
      }
      poller.poll(2);
      if constexpr (Rows == 1) {
#pragma GCC unroll 4
        for (int c = 0; c < Vectors; ++c) b[c] = keep_bits(b[c], keep);
      }
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) {
        vf a = broadcast(p[r * tile_keys + pair]);
        if constexpr (Rows == 1) a = keep_bits(a, keep);
#pragma GCC unroll 4
        for (int c = 0; c < Vectors; ++c) acc[r][c] = pair_dot(a, b[c], acc[r][c]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) store(first + r * acc_stride + c * lanes, acc[r][c]);
    }
  };
  over_dims<Values::nr_of(Rows)>(num_dims, pass);
}

/// Calls `body.operator()<Rows>()` for the number of rows, 1 … max_mr.
template <class Body>
BIFOLIO_INLINE void with_rows(int rows, const Body& body) noexcept {
  switch (rows) {
    case 1:
      return body.template operator()<1>();
    case 2:
      return body.template operator()<2>();
    case 3:
      return body.template operator()<3>();
    case 4:
      return body.template operator()<4>();
    case 5:
      return body.template operator()<5>();
    case 6:
      return body.template operator()<6>();
    case 7:
      if constexpr (max_mr >= 7) body.template operator()<7>();
      return;
    default:
      if constexpr (max_mr >= 8) body.template operator()<8>();
  }
}

/// `lanes` rows of K, each at its own address.
template <class Key>
struct scattered_rows {
  const Key* row[lanes];
  [[nodiscard]] BIFOLIO_INLINE const Key* at(int i, int dim) const noexcept { return row[i] + dim; }
};

/// `lanes` rows of K with a uniform stride: four bases and three offsets instead of sixteen pointers, which would not
/// fit into registers (390 → 250 ns for 64 keys × 128 dims of bf16).
template <class Key>
struct uniform_rows {
  const char* base[(lanes + 3) / 4];
  std::int64_t offset[4];  // in bytes
  BIFOLIO_INLINE uniform_rows(const Key* first, std::int64_t stride) noexcept {
    const auto bytes = stride * static_cast<std::int64_t>(sizeof(Key));
    for (int i = 0; i < (lanes + 3) / 4; ++i) base[i] = reinterpret_cast<const char*>(first) + 4 * i * bytes;
    for (int i = 0; i < 4; ++i) offset[i] = i * bytes;
  }
  [[nodiscard]] BIFOLIO_INLINE const Key* at(int i, int dim) const noexcept {
    return reinterpret_cast<const Key*>(base[i / 4] + offset[i % 4]) + dim;
  }
};

/// Stores a column of transposed keys, dims `dim` … of `lanes` keys, as `transpose_keys` says.
template <class Key, bool Wide>
BIFOLIO_INLINE void store_key_column(float* keys, int dim, vf column, bool has_odd) noexcept {
  if constexpr (sizeof(Key) == 4) {
    store(keys + dim * tile_keys, column);
  } else if constexpr (!Wide) {
    store_pairs<Key>(keys + dim / 2 * tile_keys, column);
  } else {
    vf even;
    vf odd;
    split_pair<Key>(column, even, odd);
    store(keys + dim * tile_keys, even);
    if (has_odd) store(keys + (dim + 1) * tile_keys, odd);
  }
}

/// keys[column][lane] = rows[lane][column] for `lanes` keys and dims [0, head_dim); keys [columns][tile_keys]. Pairs of
/// 16-bit elements are transposed as 32-bit lanes and, if `Wide`, widened to two columns afterwards. A pair whose
/// second dim is missing gets 0 for it.
template <class Key, bool Wide, class Rows>
BIFOLIO_INLINE void transpose_keys(const Rows& rows, int head_dim, float* keys, prefetcher& prefetch) noexcept {
  constexpr int step = lanes * 4 / static_cast<int>(sizeof(Key));
  prefetch_poller poller(prefetch);
  const auto store_column = [&](int dim, vf column, bool has_odd) __attribute__((always_inline)) {
    store_key_column<Key, Wide>(keys, dim, column, has_odd);
    poller.poll();
  };
  constexpr int dims_of_column = 4 / static_cast<int>(sizeof(Key));
  int dim = 0;
  for (; dim + step <= head_dim; dim += step) {
    transpose(
        [&](int i) __attribute__((always_inline)) { return load_bits(rows.at(i, dim)); },
        [&](int j, vf column) __attribute__((always_inline)) { store_column(dim + j * dims_of_column, column, true); });
  }
  if (dim == head_dim) return;
  const int num_bytes = (head_dim - dim) * static_cast<int>(sizeof(Key));
  transpose(
      [&](int i) __attribute__((always_inline)) { return load_first(rows.at(i, dim), num_bytes); },
      [&](int j, vf column) __attribute__((always_inline)) {
        const int at = dim + j * dims_of_column;
        if (at < head_dim) store_column(at, column, at + 1 < head_dim);
      });
}

/// The same from pieces of 16 bytes of each key, those of `lanes` keys side by side (x_split's K): dims
/// [dim, dim + dims), both multiples of a piece.
template <class Key, bool Wide>
BIFOLIO_INLINE void transpose_pieces(const Key* from, std::int64_t chunk_stride, int dims, float* keys,
                                     prefetcher& prefetch) noexcept {
  constexpr int dims_of_column = 4 / static_cast<int>(sizeof(Key));
  constexpr int piece_dims = 4 * dims_of_column;
  prefetch_poller poller(prefetch);
  for (int dim = 0; dim < dims; dim += piece_dims, from += chunk_stride) {
    transpose_quads(
        [&](int i) __attribute__((always_inline)) { return load_bits(from + i * (lanes * dims_of_column)); },
        [&](int j, vf column) __attribute__((always_inline)) {
          store_key_column<Key, Wide>(keys, dim + j * dims_of_column, column, true);
        });
    poller.poll(4);
  }
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

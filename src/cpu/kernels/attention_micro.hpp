// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Register kernels of attention: Rows × vectors of accumulators, one accumulator per result, summed in one order.

#include <cstddef>

#include "cpu/kernels/attention_kernels.hpp"
#include "cpu/kernels/simd.hpp"

namespace bifolio::cpu::BIFOLIO_ISA {
namespace {

/// Rows that share the registers of one kernel.
inline constexpr int max_group_rows = 6;
/// Vectors beside each other in one kernel: 6 × 4 accumulators of 32 registers, 6 × 2 of 16.
inline constexpr int kernel_vectors = num_vector_registers == 32 ? 4 : 2;
inline constexpr int tile_vectors = tile_keys / lanes;
inline constexpr int cache_line_bytes = 64;

/// Cache lines that will be needed next, handed to L2 one at a time between other work: a burst overruns the core's
/// queue of outstanding misses. The rows are walked in `ways` parts side by side, so that several DRAM pages and page
/// walks are under way at once (4 KiB runs in random places: 22 GB/s a core instead of 15).
class line_stream {
 public:
  /// `rows` must outlive the stream. Once all lines were asked for, steps do nothing.
  BIFOLIO_INLINE void start(const char* const* rows, int num_rows, int ways, int row_bytes,
                            int lines_per_step) noexcept {
    rows_ = rows;
    part_ = num_rows / ways;
    rows_end_ = rows + part_;
    whole_ = part_ * ways;
    way_ = 0;
    byte_ = 0;
    row_bytes_ = row_bytes;
    lines_per_step_ = lines_per_step;
  }
  BIFOLIO_INLINE void step() noexcept {
    for (int i = 0; i < lines_per_step_ && rows_ != rows_end_; ++i) {
      prefetch_l2(rows_[way_] + byte_);
      way_ += part_;
      if (way_ != whole_) continue;
      way_ = 0;
      byte_ += cache_line_bytes;
      if (byte_ < row_bytes_) continue;
      byte_ = 0;
      ++rows_;
    }
  }

 private:
  const char* const* rows_ = nullptr;
  const char* const* rows_end_ = nullptr;
  int part_ = 0;   // rows of one way
  int whole_ = 0;  // rows of all ways
  int way_ = 0;    // the next line is in row rows_[way_]
  int byte_ = 0;
  int row_bytes_ = 0;
  int lines_per_step_ = 0;
};

/// scores[r][key] = Σ_d queries[d][r] · keys[d][key], d ascending. queries [head_dim][Rows], keys
/// [head_dim][tile_keys], scores [Rows][tile_keys].
template <int Rows>
BIFOLIO_INLINE void score_rows(const float* queries, const float* keys, int head_dim, float* scores,
                               line_stream& stream) noexcept {
  line_stream ahead = stream;  // in registers
  for (int column = 0; column < tile_keys; column += kernel_vectors * lanes) {
    vf acc[std::size_t{Rows}][std::size_t{kernel_vectors}];
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kernel_vectors; ++c) acc[r][c] = vf(0.0f);
    }
    const float* q = queries;
    const float* k = keys + column;
    for (int d = 0; d < head_dim; ++d) {
      vf b[kernel_vectors];
#pragma GCC unroll 4
      for (int c = 0; c < kernel_vectors; ++c) b[c] = load(k + c * lanes);
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) {
        const vf a = broadcast(q[r]);
#pragma GCC unroll 4
        for (int c = 0; c < kernel_vectors; ++c) acc[r][c] = fma(a, b[c], acc[r][c]);
      }
      ahead.step();
      q += Rows;
      k += tile_keys;
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kernel_vectors; ++c) store(scores + r * tile_keys + column + c * lanes, acc[r][c]);
    }
  }
  stream = ahead;
}

/// acc[r][dims] += Σ_key p[r][key] · values[key][dims], key ascending in [begin, end). p [Rows][tile_keys]; values: one
/// pointer per key; acc [Rows] rows of `acc_stride` floats in value order; dims: `num_dims`, whole pairs of vectors.
template <int Rows, class Value>
BIFOLIO_INLINE void accumulate_rows(const float* p, const Value* const* values, int begin, int end, int num_dims,
                                    float* acc_rows, std::int64_t acc_stride, line_stream& stream) noexcept {
  line_stream ahead = stream;  // in registers
  const auto pass = [&]<int Vectors>(int dim) __attribute__((always_inline)) {
    vf acc[std::size_t{Rows}][std::size_t{Vectors}];
    float* first = acc_rows + dim;
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) acc[r][c] = load(first + r * acc_stride + c * lanes);
    }
    for (int key = begin; key < end; ++key) {
      const Value* row = values[key] + dim;
      ahead.step();
      vf b[std::size_t{Vectors}];
#pragma GCC unroll 2
      for (int c = 0; c < Vectors; c += 2) load_pair(row + c * lanes, b[c], b[c + 1]);
#pragma GCC unroll 6
      for (int r = 0; r < Rows; ++r) {
        const vf a = broadcast(p[r * tile_keys + key]);
#pragma GCC unroll 4
        for (int c = 0; c < Vectors; ++c) acc[r][c] = fma(a, b[c], acc[r][c]);
      }
    }
#pragma GCC unroll 6
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < Vectors; ++c) store(first + r * acc_stride + c * lanes, acc[r][c]);
    }
  };
  int dim = 0;
  for (; dim + kernel_vectors * lanes <= num_dims; dim += kernel_vectors * lanes) {
    pass.template operator()<kernel_vectors>(dim);
  }
  if constexpr (kernel_vectors > 2) {
    if (dim < num_dims) pass.template operator()<2>(dim);
  }
  stream = ahead;
}

/// Calls `body.operator()<Rows>()` for the number of rows, 1 … 6.
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
    default:
      return body.template operator()<6>();
  }
}

/// keys[dim][lane] = rows[lane][dim] for `lanes` keys and dims [0, head_dim); keys [head_dim][tile_keys].
BIFOLIO_INLINE void transpose_keys(const float* const* rows, int head_dim, float* keys, line_stream& stream) noexcept {
  line_stream ahead = stream;  // in registers
  int dim = 0;
  for (; dim + lanes <= head_dim; dim += lanes) {
    transpose(
        [&](int i) __attribute__((always_inline)) { return load(rows[i] + dim); },
        [&](int j, vf column) __attribute__((always_inline)) {
          store(keys + (dim + j) * tile_keys, column);
          ahead.step();
        });
  }
  for (; dim < head_dim; ++dim) {
    for (int i = 0; i < lanes; ++i) keys[dim * tile_keys + i] = rows[i][dim];
  }
  stream = ahead;
}

/// The same for 16-bit elements: pairs of dims are transposed as 32-bit lanes and widened afterwards.
template <class Key>
BIFOLIO_INLINE void transpose_keys(const Key* const* rows, int head_dim, float* keys, line_stream& stream) noexcept {
  line_stream ahead = stream;  // in registers
  int dim = 0;
  for (; dim + 2 * lanes <= head_dim; dim += 2 * lanes) {
    transpose(
        [&](int i) __attribute__((always_inline)) { return load_bits(rows[i] + dim); },
        [&](int j, vf column) __attribute__((always_inline)) {
          vf even;
          vf odd;
          split_pair<Key>(column, even, odd);
          store(keys + (dim + 2 * j) * tile_keys, even);
          store(keys + (dim + 2 * j + 1) * tile_keys, odd);
          ahead.step();
        });
  }
  for (; dim < head_dim; ++dim) {
    for (int i = 0; i < lanes; ++i) keys[dim * tile_keys + i] = widen(rows[i][dim]);
  }
  stream = ahead;
}

}  // namespace
}  // namespace bifolio::cpu::BIFOLIO_ISA

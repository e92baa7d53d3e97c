// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Micro-kernels of `dots` over 8-bit codes that are widened in registers, for the rows of one row group: nothing of K
/// or V is written to scratch but K's codes, transposed. Their sums are those of micro.hpp over widened rows, bit for
/// bit; with more row groups, each of which would widen again, rows are widened once.

#include "cpu/kernels/attention/codes.hpp"
#include "cpu/kernels/attention/micro.hpp"
#include "cpu/kernels/simd/code_widen.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

/// Tables and widened vectors take registers: NR is 4 up to four rows.
[[nodiscard]] constexpr int code_nr_of(int rows) noexcept { return rows > 4 ? 2 : wide_nr; }

/// Polls for a column of `lanes` keys.
inline constexpr int code_score_polls = 2;

/// As score_rows of `dot_column`. keys: [columns of four dims][tile_keys], `num_columns` of them as
/// `transpose_code_columns` makes them.
template <class Code, int Rows>
BIFOLIO_INLINE void score_codes(const float* queries, const float* keys, int num_columns, bool add, float* scores,
                                prefetcher& prefetch) noexcept {
  constexpr int vectors = code_nr_of(Rows);
  const code_widener<Code> widener;
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
    for (int i = 0; i < num_columns; ++i) {
      vf b[2][std::size_t{vectors}];
#pragma GCC unroll 4
      for (int c = 0; c < vectors; ++c) widen_quads(widener, load(k + c * lanes), b[0][c], b[1][c]);
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
          const vf a = broadcast(q[half * Rows + r]);
#pragma GCC unroll 4
          for (int c = 0; c < vectors; ++c) acc[r][c] = pair_dot(a, b[half][c], acc[r][c]);
        }
      }
      poller.poll(code_score_polls * vectors);
      q += 2 * Rows;
      k += tile_keys;
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < vectors; ++c) store(scores + r * tile_keys + column + c * lanes, acc[r][c]);
    }
  }
}

/// V rows of codes in place, as `accumulate_pairs` reads them.
template <class Code>
struct value_codes {
  const Code* const* row;
  code_widener<Code> widener;
  static constexpr int nr_of(int rows) noexcept { return code_nr_of(rows); }
  BIFOLIO_INLINE void load_pairs(int pair, int dim, vf& a, vf& b) const noexcept {
    widen_pairs<Code, true>(widener, row[2 * pair] + dim, row[2 * pair + 1] + dim, 2 * lanes, a, b);
  }
  BIFOLIO_INLINE void load_first_pairs(int pair, int dim, int count, vf& a, vf& b) const noexcept {
    widen_pairs<Code, false>(widener, row[2 * pair] + dim, row[2 * pair + 1] + dim, count, a, b);
  }
};

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

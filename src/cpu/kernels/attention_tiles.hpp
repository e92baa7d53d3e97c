// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention's products on the tile registers of Intel AMX: tiles of 16 rows of 64 bytes, and
/// C[16][16] += A[16][32] · B[32][16] of bfloat16 into float32 (Intel SDM, TDPBF16PS: B in pairs of rows; exact
/// products, subnormals count as 0; an element's chain of sums depends on its row of A and its column of B alone).
///
/// One unit (64 keys of one KV head) for 16 rows of queries:
///   scores, transposed: C[key][row] = Σ_dim K[key][dim] · Q[row][dim], so that K goes in as it lies in the cache;
///   outputs: C[row][dim] = Σ_key P[row][key] · V[key][dim], V in pairs of keys.
///
/// When it pays and what was tried: docs/kernels/attention_cpu.md.

#include "cpu/kernels/attention_kernels.hpp"
#include "cpu/kernels/attention_micro.hpp"
#include "cpu/kernels/simd.hpp"

namespace bifolio::cpu::BIFOLIO_ISA {
namespace {

inline constexpr int tile_rows = 16;
inline constexpr int tile_bytes = 64;  // of a row
/// Dims, or keys, that one product sums over.
inline constexpr int tile_depth = 32;

/// 16 keys: where the first lies, and bytes from one to the next.
struct key_rows {
  const char* first;
  std::int64_t stride;
};

#if BIFOLIO_ISA_AMX

inline constexpr bool has_tiles = true;

/// Holds the tile registers of this thread, all of them whole. Given back because a thread with tiles costs more to
/// switch.
class tile_scope {
 public:
  BIFOLIO_INLINE tile_scope() noexcept {
    struct alignas(64) configuration {  // Intel SDM, LDTILECFG
      std::uint8_t palette = 1;
      std::uint8_t start_row = 0;
      std::uint8_t reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16};
    };
    const configuration whole;
    __asm__ volatile("" : : "r"(&whole) : "memory");
    _tile_loadconfig(&whole);
  }
  BIFOLIO_INLINE ~tile_scope() { _tile_release(); }
  tile_scope(const tile_scope&) = delete;
  tile_scope& operator=(const tile_scope&) = delete;
};

/// The intrinsics of GCC do not say that they read memory.
BIFOLIO_INLINE void finish_stores() noexcept { __asm__ volatile("" : : : "memory"); }

/// scores[key][row], keys of four tiles. queries [steps][16 pairs of dims][16 rows].
BIFOLIO_INLINE void score_tiles(const float* queries, const key_rows (&keys)[tile_keys / tile_rows], int steps,
                                float* scores, line_stream& stream) noexcept {
  static_assert(tile_keys == 4 * tile_rows);
  finish_stores();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int step = 0; step < steps; ++step) {
    const std::int64_t at = std::int64_t{step} * tile_bytes;
    _tile_loadd(4, queries + step * (tile_rows * tile_rows), tile_bytes);
    _tile_loadd(5, keys[0].first + at, keys[0].stride);
    _tile_dpbf16ps(0, 5, 4);
    stream.batches(2);
    _tile_loadd(6, keys[1].first + at, keys[1].stride);
    _tile_dpbf16ps(1, 6, 4);
    stream.batches(2);
    _tile_loadd(5, keys[2].first + at, keys[2].stride);
    _tile_dpbf16ps(2, 5, 4);
    stream.batches(2);
    _tile_loadd(6, keys[3].first + at, keys[3].stride);
    _tile_dpbf16ps(3, 6, 4);
    stream.batches(2);
  }
  constexpr int tile = tile_rows * tile_rows;
  _tile_stored(0, scores, tile_bytes);
  _tile_stored(1, scores + tile, tile_bytes);
  _tile_stored(2, scores + 2 * tile, tile_bytes);
  _tile_stored(3, scores + 3 * tile, tile_bytes);
}

/// out[row][dims] = Σ_key p · values. p [16][tile_keys floats], of which the first half holds pairs of keys; values
/// [pairs of keys][stride]; keys [first, last) · 32; dims: whole pairs of tiles; out [16][stride].
BIFOLIO_INLINE void output_tiles(const float* p, const float* values, std::int64_t stride, int first, int last,
                                 int dims, float* out, line_stream& stream) noexcept {
  constexpr std::int64_t p_stride = tile_keys * 4;
  const std::int64_t row_bytes = stride * 4;
  finish_stores();
  int dim = 0;
  for (; dim + 4 * tile_rows <= dims; dim += 4 * tile_rows) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = first; step < last; ++step) {
      const float* v = values + step * tile_rows * stride + dim;
      _tile_loadd(4, p + step * tile_rows, p_stride);
      _tile_loadd(5, v, row_bytes);
      _tile_dpbf16ps(0, 4, 5);
      stream.batches(2);
      _tile_loadd(6, v + tile_rows, row_bytes);
      _tile_dpbf16ps(1, 4, 6);
      stream.batches(2);
      _tile_loadd(5, v + 2 * tile_rows, row_bytes);
      _tile_dpbf16ps(2, 4, 5);
      stream.batches(2);
      _tile_loadd(6, v + 3 * tile_rows, row_bytes);
      _tile_dpbf16ps(3, 4, 6);
      stream.batches(2);
    }
    _tile_stored(0, out + dim, row_bytes);
    _tile_stored(1, out + dim + tile_rows, row_bytes);
    _tile_stored(2, out + dim + 2 * tile_rows, row_bytes);
    _tile_stored(3, out + dim + 3 * tile_rows, row_bytes);
  }
  if (dim >= dims) return;
  _tile_zero(0);
  _tile_zero(1);
  for (int step = first; step < last; ++step) {
    const float* v = values + step * tile_rows * stride + dim;
    _tile_loadd(4, p + step * tile_rows, p_stride);
    _tile_loadd(5, v, row_bytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, v + tile_rows, row_bytes);
    _tile_dpbf16ps(1, 4, 6);
  }
  _tile_stored(0, out + dim, row_bytes);
  _tile_stored(1, out + dim + tile_rows, row_bytes);
}

/// 32 elements, those from `count` on 0.
BIFOLIO_INLINE vf load_elements(const bfloat16* from, int count) noexcept {
  if (count >= tile_depth) return load_bits(from);
  return vf(_mm512_castsi512_ps(_mm512_maskz_loadu_epi16((1u << count) - 1u, from)));
}

/// Whether `count` elements hold neither infinity nor NaN.
BIFOLIO_INLINE bool all_finite(const bfloat16* row, int count) noexcept {
  bool finite = true;
  for (int i = 0; i < count; ++i) finite = finite && (row[i].bits & 0x7f80u) != 0x7f80u;
  return finite;
}

#else

inline constexpr bool has_tiles = false;
struct tile_scope {
  tile_scope() noexcept {}
};
// Never called:
BIFOLIO_INLINE void score_tiles(const float*, const key_rows (&)[tile_keys / tile_rows], int, float*,
                                line_stream&) noexcept {}
BIFOLIO_INLINE void output_tiles(const float*, const float*, std::int64_t, int, int, int, float*,
                                 line_stream&) noexcept {}
BIFOLIO_INLINE vf load_elements(const void*, int) noexcept { return vf(0.0f); }
BIFOLIO_INLINE bool all_finite(const void*, int) noexcept { return true; }

#endif

}  // namespace
}  // namespace bifolio::cpu::BIFOLIO_ISA

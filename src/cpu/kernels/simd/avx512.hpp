// SPDX-License-Identifier: Apache-2.0
#pragma once

// AVX-512 F/BW/DQ/VL part of simd.hpp, and AVX512-BF16's dot product where it is compiled in.

#include <immintrin.h>

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

static_assert(lanes == 16);
inline constexpr int num_vector_registers = 32;

BIFOLIO_INLINE __m512 raw(vf v) noexcept { return static_cast<__m512>(v); }

BIFOLIO_INLINE vf fma(vf a, vf b, vf c) noexcept { return vf(_mm512_fmadd_ps(raw(a), raw(b), raw(c))); }

BIFOLIO_INLINE vf lane_numbers() noexcept {
  return vf(_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

/// p · 2^n; `shifted` is n + 1.5·2^23.
BIFOLIO_INLINE vf times_power_of_two(vf p, vf, vf n) noexcept { return vf(_mm512_scalef_ps(raw(p), raw(n))); }

/// 0 where x < limit, else value.
BIFOLIO_INLINE vf zero_below(vf x, float limit, vf value) noexcept {
  const __mmask16 keep = _mm512_cmp_ps_mask(raw(x), _mm512_set1_ps(limit), _CMP_NLT_UQ);
  return vf(_mm512_maskz_mov_ps(keep, raw(value)));
}

/// One fixed tree: halves, quarters, pairs.
BIFOLIO_INLINE float reduce_add(vf v) noexcept {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(raw(v)), _mm512_extractf32x8_ps(raw(v), 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

BIFOLIO_INLINE float reduce_max(vf v) noexcept {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(raw(v)), _mm512_extractf32x8_ps(raw(v), 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/// Four columns: named, because GCC 12 keeps an array of them in memory as well.
struct four_columns {
  __m512 c0;
  __m512 c1;
  __m512 c2;
  __m512 c3;
};

/// 128-bit piece k of column c holds column 4·k + c of the four rows. With `Halved` the halves of the elements are
/// apart: a piece holds the lower 16 bits of the four rows, then their upper 16.
template <bool Halved = false>
BIFOLIO_INLINE four_columns interleave_four(vf row0, vf row1, vf row2, vf row3) noexcept {
  if constexpr (Halved) {
    const __m512i rows[4] = {_mm512_castps_si512(raw(row0)), _mm512_castps_si512(raw(row1)),
                             _mm512_castps_si512(raw(row2)), _mm512_castps_si512(raw(row3))};
    const __m512i low01 = _mm512_unpacklo_epi16(rows[0], rows[1]);
    const __m512i high01 = _mm512_unpackhi_epi16(rows[0], rows[1]);
    const __m512i low23 = _mm512_unpacklo_epi16(rows[2], rows[3]);
    const __m512i high23 = _mm512_unpackhi_epi16(rows[2], rows[3]);
    return {_mm512_castsi512_ps(_mm512_unpacklo_epi32(low01, low23)),
            _mm512_castsi512_ps(_mm512_unpackhi_epi32(low01, low23)),
            _mm512_castsi512_ps(_mm512_unpacklo_epi32(high01, high23)),
            _mm512_castsi512_ps(_mm512_unpackhi_epi32(high01, high23))};
  } else {
    const __m512d low01 = _mm512_castps_pd(_mm512_unpacklo_ps(raw(row0), raw(row1)));
    const __m512d high01 = _mm512_castps_pd(_mm512_unpackhi_ps(raw(row0), raw(row1)));
    const __m512d low23 = _mm512_castps_pd(_mm512_unpacklo_ps(raw(row2), raw(row3)));
    const __m512d high23 = _mm512_castps_pd(_mm512_unpackhi_ps(raw(row2), raw(row3)));
    return {_mm512_castpd_ps(_mm512_unpacklo_pd(low01, low23)), _mm512_castpd_ps(_mm512_unpackhi_pd(low01, low23)),
            _mm512_castpd_ps(_mm512_unpacklo_pd(high01, high23)), _mm512_castpd_ps(_mm512_unpackhi_pd(high01, high23))};
  }
}

/// Transposes 16 × 16 elements of 32 bits: row i is read by `load_row(i)`, column j leaves through `store_column(j,
/// v)`. Loads and stores are woven in, so that no more than 24 registers are alive. `Halved`: see `interleave_four`.
template <bool Halved = false, class LoadRow, class StoreColumn>
BIFOLIO_INLINE void transpose(const LoadRow& load_row, const StoreColumn& store_column) noexcept {
  const auto rows = [&](int i) __attribute__((always_inline)) {
    return interleave_four<Halved>(load_row(i), load_row(i + 1), load_row(i + 2), load_row(i + 3));
  };
  const four_columns a = rows(0);
  const four_columns b = rows(4);
  const four_columns c = rows(8);
  const four_columns d = rows(12);
  // Now 4 × 4 transpositions of pieces.
  const auto columns = [&](int i, __m512 piece0, __m512 piece1, __m512 piece2, __m512 piece3)
      __attribute__((always_inline)) {
    const __m512 low01 = _mm512_shuffle_f32x4(piece0, piece1, 0x44);
    const __m512 low23 = _mm512_shuffle_f32x4(piece2, piece3, 0x44);
    store_column(i, vf(_mm512_shuffle_f32x4(low01, low23, 0x88)));
    store_column(4 + i, vf(_mm512_shuffle_f32x4(low01, low23, 0xdd)));
    const __m512 high01 = _mm512_shuffle_f32x4(piece0, piece1, 0xee);
    const __m512 high23 = _mm512_shuffle_f32x4(piece2, piece3, 0xee);
    store_column(8 + i, vf(_mm512_shuffle_f32x4(high01, high23, 0x88)));
    store_column(12 + i, vf(_mm512_shuffle_f32x4(high01, high23, 0xdd)));
  };
  columns(0, a.c0, b.c0, c.c0, d.c0);
  columns(1, a.c1, b.c1, c.c1, d.c1);
  columns(2, a.c2, b.c2, c.c2, d.c2);
  columns(3, a.c3, b.c3, c.c3, d.c3);
}

/// Transposes 16 rows of four elements of 32 bits that lie one after the other: `load_rows(i)` reads rows 4·i … 4·i +
/// 3, column j leaves through `store_column(j, v)`.
template <class LoadRows, class StoreColumn>
BIFOLIO_INLINE void transpose_quads(const LoadRows& load_rows, const StoreColumn& store_column) noexcept {
  const __m512i first_two = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i last_two = _mm512_setr_epi32(2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
  const __m512 rows0 = raw(load_rows(0));
  const __m512 rows1 = raw(load_rows(1));
  const __m512 rows2 = raw(load_rows(2));
  const __m512 rows3 = raw(load_rows(3));
  const __m512 low01 = _mm512_permutex2var_ps(rows0, first_two, rows1);
  const __m512 low23 = _mm512_permutex2var_ps(rows2, first_two, rows3);
  store_column(0, vf(_mm512_shuffle_f32x4(low01, low23, 0x44)));
  store_column(1, vf(_mm512_shuffle_f32x4(low01, low23, 0xee)));
  const __m512 high01 = _mm512_permutex2var_ps(rows0, last_two, rows1);
  const __m512 high23 = _mm512_permutex2var_ps(rows2, last_two, rows3);
  store_column(2, vf(_mm512_shuffle_f32x4(high01, high23, 0x44)));
  store_column(3, vf(_mm512_shuffle_f32x4(high01, high23, 0xee)));
}

/// Two times 32 bytes, `low` in the lower half.
BIFOLIO_INLINE __m512i join_halves(const void* low, const void* high) noexcept {
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(low))),
                            _mm256_loadu_si256(static_cast<const __m256i*>(high)), 1);
}

inline constexpr bool transposes_half_rows = true;

/// Transposes 16 rows of eight elements of 32 bits: row i is at `row(i)`, column j leaves through `store_column(j, v)`.
template <class Row, class StoreColumn>
BIFOLIO_INLINE void transpose_half_rows(const Row& row, const StoreColumn& store_column) noexcept {
  const auto rows = [&](int i) __attribute__((always_inline)) {
    const auto at = [&](int j) __attribute__((always_inline)) {
      return vf(_mm512_castsi512_ps(join_halves(row(i + j), row(i + 4 + j))));
    };
    return interleave_four(at(0), at(1), at(2), at(3));
  };
  const four_columns a = rows(0);
  const four_columns b = rows(8);
  // The even 128-bit pieces hold column i, the odd ones column 4 + i.
  const auto columns = [&](int i, __m512 piece0, __m512 piece1) __attribute__((always_inline)) {
    store_column(i, vf(_mm512_shuffle_f32x4(piece0, piece1, 0x88)));
    store_column(4 + i, vf(_mm512_shuffle_f32x4(piece0, piece1, 0xdd)));
  };
  columns(0, a.c0, b.c0);
  columns(1, a.c1, b.c1);
  columns(2, a.c2, b.c2);
  columns(3, a.c3, b.c3);
}

/// Transposes 32 rows of 16 elements of 16 bits: row i is at `row(i)`, column j leaves through `store_column(j, v)`.
template <class Row, class StoreColumn>
BIFOLIO_INLINE void transpose_words(const Row& row, const StoreColumn& store_column) noexcept {
  __m512i b[16];
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    // Pairs of rows, fours, eights; a row of the upper eight is in the upper half of the vectors.
    __m512i pairs[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      const int at = 16 * half + i;
      const __m512i even = join_halves(row(at), row(at + 8));
      const __m512i odd = join_halves(row(at + 1), row(at + 9));
      pairs[i] = _mm512_unpacklo_epi16(even, odd);
      pairs[i + 1] = _mm512_unpackhi_epi16(even, odd);
    }
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {  // columns 4·c … 4·c + 3, and those 8 later in the odd pieces
      const __m512i low_four = _mm512_unpacklo_epi32(pairs[c], pairs[2 + c]);
      const __m512i low_four_next = _mm512_unpackhi_epi32(pairs[c], pairs[2 + c]);
      const __m512i high_four = _mm512_unpacklo_epi32(pairs[4 + c], pairs[6 + c]);
      const __m512i high_four_next = _mm512_unpackhi_epi32(pairs[4 + c], pairs[6 + c]);
      __m512i* const to = b + 8 * half + 4 * c;
      to[0] = _mm512_unpacklo_epi64(low_four, high_four);
      to[1] = _mm512_unpackhi_epi64(low_four, high_four);
      to[2] = _mm512_unpacklo_epi64(low_four_next, high_four_next);
      to[3] = _mm512_unpackhi_epi64(low_four_next, high_four_next);
    }
  }
#pragma GCC unroll 8
  for (int c = 0; c < 8; ++c) {
    store_column(c, vf(_mm512_castsi512_ps(_mm512_shuffle_i32x4(b[c], b[8 + c], 0x88))));
    store_column(8 + c, vf(_mm512_castsi512_ps(_mm512_shuffle_i32x4(b[c], b[8 + c], 0xdd))));
  }
}

/// 32 elements of 16 bits as 16 lanes of 32, the earlier element in the low half.
BIFOLIO_INLINE vf load_bits(const void* p) noexcept { return vf(_mm512_castsi512_ps(_mm512_loadu_si512(p))); }

/// The first `num_bytes` of a vector, 0 in the rest. Reads no other byte.
BIFOLIO_INLINE vf load_first(const void* p, int num_bytes) noexcept {
  const __mmask64 bytes = num_bytes < 64 ? (std::uint64_t{1} << num_bytes) - 1 : ~std::uint64_t{0};
  return vf(_mm512_castsi512_ps(_mm512_maskz_loadu_epi8(bytes, p)));
}

/// The low and the high halves of the lanes as floats.
template <class T>
void split_pair(vf bits, vf& low, vf& high) noexcept = delete;

template <>
BIFOLIO_INLINE void split_pair<bfloat16>(vf bits, vf& low, vf& high) noexcept {
  const __m512i pairs = _mm512_castps_si512(raw(bits));
  low = vf(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
  high = vf(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))));
}

template <>
BIFOLIO_INLINE void split_pair<float16>(vf bits, vf& low, vf& high) noexcept {
  const __m512i pairs = _mm512_castps_si512(raw(bits));
  low = vf(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(pairs)));
  high = vf(_mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(pairs, 16))));
}

/// Transposed keys may wait in scratch as pairs: widening them overlaps with the multiply-adds that use them.
inline constexpr bool keeps_pairs = true;

template <class T>
void store_pairs(float* to, vf bits) noexcept = delete;
template <class T, int Half>
vf load_half(const float* pairs) noexcept = delete;

template <>
BIFOLIO_INLINE void store_pairs<bfloat16>(float* to, vf bits) noexcept {
  store(to, bits);
}
template <>
BIFOLIO_INLINE vf load_half<bfloat16, 0>(const float* pairs) noexcept {
  return vf(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(raw(load(pairs))), 16)));
}
template <>
BIFOLIO_INLINE vf load_half<bfloat16, 1>(const float* pairs) noexcept {
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  return vf(_mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(raw(load(pairs))), high)));
}

// The 16 low halves, then the 16 high ones: each is one converting load.
template <>
BIFOLIO_INLINE void store_pairs<float16>(float* to, vf bits) noexcept {
  const __m512i order = _mm512_set_epi16(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1,  //
                                         30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, _mm512_castps_si512(raw(bits))));
}
template <>
BIFOLIO_INLINE vf load_half<float16, 0>(const float* pairs) noexcept {
  return vf(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs))));
}
template <>
BIFOLIO_INLINE vf load_half<float16, 1>(const float* pairs) noexcept {
  return vf(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs) + 1)));
}

#if BIFOLIO_PAIR_DOT
/// acc + a.high · b.high + a.low · b.low of bfloat16 pairs, in this order, each step rounded to nearest even;
/// subnormals count as 0 (Intel SDM, VDPBF16PS).
inline constexpr bool has_pair_dot = true;
BIFOLIO_INLINE vf pair_dot(vf a, vf b, vf acc) noexcept {
  return vf(_mm512_dpbf16_ps(raw(acc), __builtin_bit_cast(__m512bh, raw(a)), __builtin_bit_cast(__m512bh, raw(b))));
}

/// 2·lanes floats, rounded to nearest even, as pairs of bfloat16: lane i holds elements 2·i and 2·i + 1.
BIFOLIO_INLINE vf narrow_pairs(vf first, vf second) noexcept {
  return vf(__builtin_bit_cast(__m512, _mm512_cvtne2ps_pbh(raw(second), raw(first))));
}

/// Pairs (even[d], odd[d]) of 2·lanes elements of two rows. Which lane of a or b holds dim d: `order_dims`.
BIFOLIO_INLINE void pair_rows(vf even, vf odd, vf& a, vf& b) noexcept {
  const __m512i low = _mm512_castps_si512(raw(even));
  const __m512i high = _mm512_castps_si512(raw(odd));
  a = vf(_mm512_castsi512_ps(_mm512_unpacklo_epi16(low, high)));
  b = vf(_mm512_castsi512_ps(_mm512_unpackhi_epi16(low, high)));
}

/// Which of the 2·lanes dims is in a lane of a (half 0) or b (half 1).
[[nodiscard]] constexpr int paired_dim(int half, int lane) noexcept { return lane / 4 * 8 + half * 4 + lane % 4; }

/// Puts the dims of what `pair_rows` made in order.
BIFOLIO_INLINE void order_dims(vf a, vf b, vf& first, vf& second) noexcept {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const vf in_order(_mm512_permutex2var_ps(raw(a), low, raw(b)));
  second = vf(_mm512_permutex2var_ps(raw(a), high, raw(b)));
  first = in_order;
}

/// The bits that are also in `bits`.
BIFOLIO_INLINE vf keep_bits(vf value, std::uint32_t bits) noexcept {
  return vf(_mm512_castsi512_ps(
      _mm512_and_si512(_mm512_castps_si512(raw(value)), _mm512_set1_epi32(static_cast<int>(bits)))));
}
#endif

#if BIFOLIO_QUAD_DOT
/// Lanes of int32: acc + Σ of four products of signed bytes of `query` with unsigned ones of `key`, exactly.
inline constexpr bool has_quad_dot = true;
BIFOLIO_INLINE vf quad_dot(vf query, vf key, vf acc) noexcept {
  return vf(_mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(raw(acc)), _mm512_castps_si512(raw(key)),
                                                    _mm512_castps_si512(raw(query)))));
}

/// Signed bytes less the lowest of them, −128: unsigned ones.
BIFOLIO_INLINE vf above_lowest(vf codes) noexcept {
  return vf(_mm512_castsi512_ps(
      _mm512_xor_si512(_mm512_castps_si512(raw(codes)), _mm512_set1_epi32(static_cast<int>(0x80808080u)))));
}

/// Lanes of int32, `offset` added, as floats.
BIFOLIO_INLINE vf sums_as_floats(vf sums, std::int32_t offset) noexcept {
  return vf(_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_castps_si512(raw(sums)), _mm512_set1_epi32(offset))));
}
#endif

template <class T>
inline constexpr bool pair_is_interleaved = false;
template <>
inline constexpr bool pair_is_interleaved<bfloat16> = true;

BIFOLIO_INLINE void load_pair(const float* p, vf& a, vf& b) noexcept {
  a = load(p);
  b = load(p + lanes);
}
BIFOLIO_INLINE void load_pair(const bfloat16* p, vf& a, vf& b) noexcept { split_pair<bfloat16>(load_bits(p), a, b); }
BIFOLIO_INLINE void load_pair(const float16* p, vf& a, vf& b) noexcept {
  a = vf(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  b = vf(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + lanes))));
}

/// 16 elements of which those that `present` does not name are 0 and not read.
BIFOLIO_INLINE vf widen_first(const float16* p, std::uint16_t present) noexcept {
  return vf(_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(present, p)));
}

/// Even elements in a, odd ones in b → in order.
BIFOLIO_INLINE void interleave(vf a, vf b, vf& first, vf& second) noexcept {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  first = vf(_mm512_permutex2var_ps(raw(a), low, raw(b)));
  second = vf(_mm512_permutex2var_ps(raw(a), high, raw(b)));
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

// SPDX-License-Identifier: Apache-2.0
#pragma once

// AVX2 + FMA + F16C part of simd.hpp.

#include <immintrin.h>

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

static_assert(lanes == 8);
inline constexpr int num_vector_registers = 16;

BIFOLIO_INLINE __m256 raw(vf v) noexcept { return static_cast<__m256>(v); }

BIFOLIO_INLINE vf fma(vf a, vf b, vf c) noexcept { return vf(_mm256_fmadd_ps(raw(a), raw(b), raw(c))); }

BIFOLIO_INLINE vf lane_numbers() noexcept { return vf(_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7)); }

/// p · 2^n; `shifted` is n + 1.5·2^23, whose low bits hold n. −126 ≤ n ≤ 127.
BIFOLIO_INLINE vf times_power_of_two(vf p, vf shifted, vf) noexcept {
  const __m256i biased = _mm256_add_epi32(_mm256_castps_si256(raw(shifted)), _mm256_set1_epi32(127));
  return p * vf(_mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
}

/// 0 where x < limit, else value.
BIFOLIO_INLINE vf zero_below(vf x, float limit, vf value) noexcept {
  return vf(_mm256_and_ps(_mm256_cmp_ps(raw(x), _mm256_set1_ps(limit), _CMP_NLT_UQ), raw(value)));
}

/// One fixed tree: halves, quarters, pairs.
BIFOLIO_INLINE float reduce_add(vf v) noexcept {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(raw(v)), _mm256_extractf128_ps(raw(v), 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

BIFOLIO_INLINE float reduce_max(vf v) noexcept {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(raw(v)), _mm256_extractf128_ps(raw(v), 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/// Transposes 8 × 8 elements of 32 bits: row i is read by `load_row(i)`, column j leaves through `store_column(j, v)`.
/// With `Halved` each 128-bit piece of a column holds the lower 16 bits of four rows, then their upper 16.
template <bool Halved = false, class LoadRow, class StoreColumn>
BIFOLIO_INLINE void transpose(const LoadRow& load_row, const StoreColumn& store_column) noexcept {
  __m256 b[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const __m256 row0 = raw(load_row(i));
    const __m256 row1 = raw(load_row(i + 1));
    const __m256 row2 = raw(load_row(i + 2));
    const __m256 row3 = raw(load_row(i + 3));
    if constexpr (Halved) {
      const __m256i low01 = _mm256_unpacklo_epi16(_mm256_castps_si256(row0), _mm256_castps_si256(row1));
      const __m256i high01 = _mm256_unpackhi_epi16(_mm256_castps_si256(row0), _mm256_castps_si256(row1));
      const __m256i low23 = _mm256_unpacklo_epi16(_mm256_castps_si256(row2), _mm256_castps_si256(row3));
      const __m256i high23 = _mm256_unpackhi_epi16(_mm256_castps_si256(row2), _mm256_castps_si256(row3));
      b[i] = _mm256_castsi256_ps(_mm256_unpacklo_epi32(low01, low23));
      b[i + 1] = _mm256_castsi256_ps(_mm256_unpackhi_epi32(low01, low23));
      b[i + 2] = _mm256_castsi256_ps(_mm256_unpacklo_epi32(high01, high23));
      b[i + 3] = _mm256_castsi256_ps(_mm256_unpackhi_epi32(high01, high23));
    } else {
      const __m256 low01 = _mm256_unpacklo_ps(row0, row1);
      const __m256 high01 = _mm256_unpackhi_ps(row0, row1);
      const __m256 low23 = _mm256_unpacklo_ps(row2, row3);
      const __m256 high23 = _mm256_unpackhi_ps(row2, row3);
      b[i] = _mm256_shuffle_ps(low01, low23, 0x44);
      b[i + 1] = _mm256_shuffle_ps(low01, low23, 0xee);
      b[i + 2] = _mm256_shuffle_ps(high01, high23, 0x44);
      b[i + 3] = _mm256_shuffle_ps(high01, high23, 0xee);
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    store_column(c, vf(_mm256_permute2f128_ps(b[c], b[4 + c], 0x20)));
    store_column(4 + c, vf(_mm256_permute2f128_ps(b[c], b[4 + c], 0x31)));
  }
}

/// Transposes 8 rows of four elements of 32 bits that lie one after the other: `load_rows(i)` reads rows 2·i and 2·i +
/// 1, column j leaves through `store_column(j, v)`.
template <class LoadRows, class StoreColumn>
BIFOLIO_INLINE void transpose_quads(const LoadRows& load_rows, const StoreColumn& store_column) noexcept {
  const __m256 rows01 = raw(load_rows(0));
  const __m256 rows23 = raw(load_rows(1));
  const __m256 rows45 = raw(load_rows(2));
  const __m256 rows67 = raw(load_rows(3));
  const __m256 rows04 = _mm256_permute2f128_ps(rows01, rows45, 0x20);
  const __m256 rows15 = _mm256_permute2f128_ps(rows01, rows45, 0x31);
  const __m256 rows26 = _mm256_permute2f128_ps(rows23, rows67, 0x20);
  const __m256 rows37 = _mm256_permute2f128_ps(rows23, rows67, 0x31);
  const __m256 low01 = _mm256_unpacklo_ps(rows04, rows15);
  const __m256 high01 = _mm256_unpackhi_ps(rows04, rows15);
  const __m256 low23 = _mm256_unpacklo_ps(rows26, rows37);
  const __m256 high23 = _mm256_unpackhi_ps(rows26, rows37);
  store_column(0, vf(_mm256_shuffle_ps(low01, low23, 0x44)));
  store_column(1, vf(_mm256_shuffle_ps(low01, low23, 0xee)));
  store_column(2, vf(_mm256_shuffle_ps(high01, high23, 0x44)));
  store_column(3, vf(_mm256_shuffle_ps(high01, high23, 0xee)));
}

/// 16 elements of 16 bits as 8 lanes of 32, the earlier element in the low half.
BIFOLIO_INLINE vf load_bits(const void* p) noexcept {
  return vf(_mm256_castsi256_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))));
}

/// The first `num_bytes` of a vector, a multiple of 2, 0 in the rest. Reads no other byte.
BIFOLIO_INLINE vf load_first(const void* p, int num_bytes) noexcept {
  const int words = num_bytes / 4;
  const __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(words), number);
  __m256i bits = _mm256_maskload_epi32(static_cast<const int*>(p), mask);
  if (num_bytes % 4 != 0) {
    const int last = static_cast<const std::uint16_t*>(p)[2 * words];
    bits = _mm256_or_si256(
        bits, _mm256_and_si256(_mm256_set1_epi32(last), _mm256_cmpeq_epi32(_mm256_set1_epi32(words), number)));
  }
  return vf(_mm256_castsi256_ps(bits));
}

/// Two times 8 elements of 16 bits as 8 lanes of 32: `even` in the low halves.
BIFOLIO_INLINE vf join_elements(const void* even, const void* odd) noexcept {
  const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(even)));
  const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(odd)));
  return vf(_mm256_castsi256_ps(_mm256_or_si256(low, _mm256_slli_epi32(high, 16))));
}

/// The low and the high halves of the lanes as floats.
template <class T>
void split_pair(vf bits, vf& low, vf& high) noexcept = delete;

template <>
BIFOLIO_INLINE void split_pair<bfloat16>(vf bits, vf& low, vf& high) noexcept {
  const __m256i pairs = _mm256_castps_si256(raw(bits));
  low = vf(_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)));
  high = vf(_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))));
}

/// The low halves of 8 pairs, then the high ones.
BIFOLIO_INLINE __m256i halves_apart(vf bits) noexcept {
  const __m256i pairs = _mm256_castps_si256(raw(bits));
  const __m256i evens = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff));
  const __m256i odds = _mm256_srli_epi32(pairs, 16);
  // [evens 0-3, odds 0-3 | evens 4-7, odds 4-7] → [evens 0-7 | odds 0-7]
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(evens, odds), 0xd8);
}

template <>
BIFOLIO_INLINE void split_pair<float16>(vf bits, vf& low, vf& high) noexcept {
  const __m256i packed = halves_apart(bits);
  low = vf(_mm256_cvtph_ps(_mm256_castsi256_si128(packed)));
  high = vf(_mm256_cvtph_ps(_mm256_extracti128_si256(packed, 1)));
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
  return vf(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(raw(load(pairs))), 16)));
}
template <>
BIFOLIO_INLINE vf load_half<bfloat16, 1>(const float* pairs) noexcept {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  return vf(_mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(raw(load(pairs))), high)));
}

// The 8 low halves, then the 8 high ones: each is one converting load.
template <>
BIFOLIO_INLINE void store_pairs<float16>(float* to, vf bits) noexcept {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves_apart(bits));
}
template <>
BIFOLIO_INLINE vf load_half<float16, 0>(const float* pairs) noexcept {
  return vf(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs))));
}
template <>
BIFOLIO_INLINE vf load_half<float16, 1>(const float* pairs) noexcept {
  return vf(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs) + 1)));
}

#if BIFOLIO_QUAD_DOT
/// Lanes of int32: acc + Σ of four products of signed bytes of `query` with unsigned ones of `key`, exactly.
inline constexpr bool has_quad_dot = true;
BIFOLIO_INLINE vf quad_dot(vf query, vf key, vf acc) noexcept {
  return vf(_mm256_castsi256_ps(_mm256_dpbusd_avx_epi32(_mm256_castps_si256(raw(acc)), _mm256_castps_si256(raw(key)),
                                                        _mm256_castps_si256(raw(query)))));
}

/// Signed bytes less the lowest of them, −128: unsigned ones.
BIFOLIO_INLINE vf above_lowest(vf codes) noexcept {
  return vf(_mm256_castsi256_ps(
      _mm256_xor_si256(_mm256_castps_si256(raw(codes)), _mm256_set1_epi32(static_cast<int>(0x80808080u)))));
}

/// Lanes of int32, `offset` added, as floats.
BIFOLIO_INLINE vf sums_as_floats(vf sums, std::int32_t offset) noexcept {
  return vf(_mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_castps_si256(raw(sums)), _mm256_set1_epi32(offset))));
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
  a = vf(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  b = vf(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + lanes))));
}

/// Even elements in a, odd ones in b → in order.
BIFOLIO_INLINE void interleave(vf a, vf b, vf& first, vf& second) noexcept {
  const __m256 low = _mm256_unpacklo_ps(raw(a), raw(b));
  const __m256 high = _mm256_unpackhi_ps(raw(a), raw(b));
  first = vf(_mm256_permute2f128_ps(low, high, 0x20));
  second = vf(_mm256_permute2f128_ps(low, high, 0x31));
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

// SPDX-License-Identifier: Apache-2.0
#pragma once

// Baseline x86-64 (SSE2) part of simd.hpp.

#include <emmintrin.h>

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

static_assert(lanes == 4);
inline constexpr int num_vector_registers = 16;

BIFOLIO_INLINE __m128 raw(vf v) noexcept { return static_cast<__m128>(v); }

/// No fused instruction here: a product and a sum, rounded twice.
BIFOLIO_INLINE vf fma(vf a, vf b, vf c) noexcept { return vf(_mm_add_ps(_mm_mul_ps(raw(a), raw(b)), raw(c))); }

BIFOLIO_INLINE vf lane_numbers() noexcept { return vf(_mm_setr_ps(0, 1, 2, 3)); }

/// p · 2^n; `shifted` is n + 1.5·2^23, whose low bits hold n. −126 ≤ n ≤ 127.
BIFOLIO_INLINE vf times_power_of_two(vf p, vf shifted, vf) noexcept {
  const __m128i biased = _mm_add_epi32(_mm_castps_si128(raw(shifted)), _mm_set1_epi32(127));
  return p * vf(_mm_castsi128_ps(_mm_slli_epi32(biased, 23)));
}

/// 0 where x < limit, else value.
BIFOLIO_INLINE vf zero_below(vf x, float limit, vf value) noexcept {
  return vf(_mm_and_ps(_mm_cmpnlt_ps(raw(x), _mm_set1_ps(limit)), raw(value)));
}

/// One fixed tree: halves, pairs.
BIFOLIO_INLINE float reduce_add(vf v) noexcept {
  const __m128 two = _mm_add_ps(raw(v), _mm_movehl_ps(raw(v), raw(v)));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

BIFOLIO_INLINE float reduce_max(vf v) noexcept {
  const __m128 two = _mm_max_ps(raw(v), _mm_movehl_ps(raw(v), raw(v)));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/// Transposes 4 × 4 elements of 32 bits: row i is read by `load_row(i)`, column j leaves through `store_column(j, v)`.
template <class LoadRow, class StoreColumn>
BIFOLIO_INLINE void transpose(const LoadRow& load_row, const StoreColumn& store_column) noexcept {
  const __m128 row0 = raw(load_row(0));
  const __m128 row1 = raw(load_row(1));
  const __m128 row2 = raw(load_row(2));
  const __m128 row3 = raw(load_row(3));
  const __m128 low01 = _mm_unpacklo_ps(row0, row1);
  const __m128 high01 = _mm_unpackhi_ps(row0, row1);
  const __m128 low23 = _mm_unpacklo_ps(row2, row3);
  const __m128 high23 = _mm_unpackhi_ps(row2, row3);
  store_column(0, vf(_mm_movelh_ps(low01, low23)));
  store_column(1, vf(_mm_movehl_ps(low23, low01)));
  store_column(2, vf(_mm_movelh_ps(high01, high23)));
  store_column(3, vf(_mm_movehl_ps(high23, high01)));
}

/// 8 elements of 16 bits as 4 lanes of 32, the earlier element in the low half.
BIFOLIO_INLINE vf load_bits(const void* p) noexcept {
  return vf(_mm_castsi128_ps(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}

/// The first `num_bytes` of a vector, 0 in the rest. Reads no other byte.
BIFOLIO_INLINE vf load_first(const void* p, int num_bytes) noexcept {
  alignas(16) char bytes[16] = {};
  __builtin_memcpy(bytes, p, static_cast<std::size_t>(num_bytes));
  return load_bits(bytes);
}

/// Two times 4 elements of 16 bits as 4 lanes of 32: `even` in the low halves.
BIFOLIO_INLINE vf join_elements(const void* even, const void* odd) noexcept {
  return vf(_mm_castsi128_ps(_mm_unpacklo_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(even)),
                                                _mm_loadl_epi64(static_cast<const __m128i*>(odd)))));
}

/// Lanes that hold a binary16 in their low half, upper half 0, as floats.
BIFOLIO_INLINE vf halves_to_floats(__m128i halves) noexcept {
  const __m128i magnitude = _mm_and_si128(halves, _mm_set1_epi32(0x7fff));
  const __m128i sign = _mm_slli_epi32(_mm_xor_si128(halves, magnitude), 16);
  const __m128i normal = _mm_add_epi32(_mm_slli_epi32(magnitude, 13), _mm_set1_epi32(0x38000000));
  const __m128 units =
      _mm_sub_ps(_mm_castsi128_ps(_mm_or_si128(magnitude, _mm_set1_epi32(0x4b000000))), _mm_set1_ps(0x1p23f));
  const __m128i subnormal = _mm_castps_si128(_mm_mul_ps(units, _mm_set1_ps(0x1p-24f)));
  const __m128i is_subnormal = _mm_cmplt_epi32(magnitude, _mm_set1_epi32(0x400));
  const __m128i is_special = _mm_cmpgt_epi32(magnitude, _mm_set1_epi32(0x7bff));
  __m128i bits = _mm_or_si128(_mm_and_si128(is_subnormal, subnormal), _mm_andnot_si128(is_subnormal, normal));
  bits = _mm_or_si128(bits, _mm_and_si128(is_special, _mm_set1_epi32(0x7f800000)));
  return vf(_mm_castsi128_ps(_mm_or_si128(bits, sign)));
}

/// The low and the high halves of the lanes as floats.
template <class T>
void split_pair(vf bits, vf& low, vf& high) noexcept = delete;

template <>
BIFOLIO_INLINE void split_pair<bfloat16>(vf bits, vf& low, vf& high) noexcept {
  const __m128i pairs = _mm_castps_si128(raw(bits));
  low = vf(_mm_castsi128_ps(_mm_slli_epi32(pairs, 16)));
  high = vf(_mm_castsi128_ps(_mm_and_si128(pairs, _mm_set1_epi32(static_cast<int>(0xffff0000u)))));
}

template <>
BIFOLIO_INLINE void split_pair<float16>(vf bits, vf& low, vf& high) noexcept {
  const __m128i pairs = _mm_castps_si128(raw(bits));
  low = halves_to_floats(_mm_and_si128(pairs, _mm_set1_epi32(0xffff)));
  high = halves_to_floats(_mm_srli_epi32(pairs, 16));
}

template <class T>
inline constexpr bool pair_is_interleaved = true;
template <>
inline constexpr bool pair_is_interleaved<float> = false;

BIFOLIO_INLINE void load_pair(const float* p, vf& a, vf& b) noexcept {
  a = load(p);
  b = load(p + lanes);
}
template <class T>
BIFOLIO_INLINE void load_pair(const T* p, vf& a, vf& b) noexcept {
  split_pair<T>(load_bits(p), a, b);
}

/// Transposed keys are widened once: doing it at every use costs more than it hides (without conversions in hardware),
/// or was not measured.
inline constexpr bool keeps_pairs = false;

template <class T>
BIFOLIO_INLINE void store_pairs(float* to, vf bits) noexcept {
  store(to, bits);
}
template <class T, int Half>
BIFOLIO_INLINE vf load_half(const float* pairs) noexcept {
  vf half[2];
  split_pair<T>(load(pairs), half[0], half[1]);
  return half[Half];
}

/// Even elements in a, odd ones in b → in order.
BIFOLIO_INLINE void interleave(vf a, vf b, vf& first, vf& second) noexcept {
  first = vf(_mm_unpacklo_ps(raw(a), raw(b)));
  second = vf(_mm_unpackhi_ps(raw(a), raw(b)));
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

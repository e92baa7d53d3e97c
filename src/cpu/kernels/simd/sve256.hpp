// SPDX-License-Identifier: Apache-2.0
#pragma once

// Part of simd.hpp for SVE with vectors of 256 bits and its BF16 instructions. The vectors' length is a constant of the
// compilation (-msve-vector-bits=256); isa.cpp runs this where the system has set that length.

#include <cstddef>

#include "cpu/kernels/simd/sve_batch.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

static_assert(lanes == 8);
inline constexpr int num_vector_registers = 32;

BIFOLIO_INLINE svfloat32_t raw(vf v) noexcept { return v.raw(); }
BIFOLIO_INLINE svuint32_t bits_of(vf v) noexcept { return svreinterpret_u32_f32(v.raw()); }
BIFOLIO_INLINE svuint16_t halves_of(vf v) noexcept { return svreinterpret_u16_f32(v.raw()); }
BIFOLIO_INLINE vf from_bits(svuint32_t bits) noexcept { return vf(svreinterpret_f32_u32(bits)); }
BIFOLIO_INLINE vf from_bits(svuint16_t bits) noexcept { return vf(svreinterpret_f32_u16(bits)); }

BIFOLIO_INLINE vf fma(vf a, vf b, vf c) noexcept { return vf(svmla_f32_x(svptrue_b32(), raw(c), raw(a), raw(b))); }

BIFOLIO_INLINE vf lane_numbers() noexcept { return vf(svcvt_f32_s32_x(svptrue_b32(), svindex_s32(0, 1))); }

/// p · 2^n; `shifted` is n + 1.5·2^23, whose low bits hold n. −126 ≤ n ≤ 127.
BIFOLIO_INLINE vf times_power_of_two(vf p, vf shifted, vf) noexcept {
  const svuint32_t biased = svadd_n_u32_x(svptrue_b32(), bits_of(shifted), 127);
  return p * from_bits(svlsl_n_u32_x(svptrue_b32(), biased, 23));
}

/// 0 where x < limit, else value.
BIFOLIO_INLINE vf zero_below(vf x, float limit, vf value) noexcept {
  return vf(svsel_f32(svcmplt_n_f32(svptrue_b32(), raw(x), limit), svdup_n_f32(0.0f), raw(value)));
}

/// One fixed tree: pairs of neighbours, of pairs, of fours (Arm ARM, FADDV).
BIFOLIO_INLINE float reduce_add(vf v) noexcept { return svaddv_f32(svptrue_b32(), raw(v)); }

BIFOLIO_INLINE float reduce_max(vf v) noexcept { return svmaxv_f32(svptrue_b32(), raw(v)); }

/// Transposes 8 × 8 elements of 32 bits: row i is read by `load_row(i)`, column j leaves through `store_column(j, v)`.
/// Three perfect shuffles of the rows.
template <class LoadRow, class StoreColumn>
BIFOLIO_INLINE void transpose(const LoadRow& load_row, const StoreColumn& store_column) noexcept {
  vf a[8];
  vf b[8];
  const auto shuffle = [](const vf* from, vf* to) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = vf(svzip1_f32(raw(from[i]), raw(from[i + 4])));
      to[2 * i + 1] = vf(svzip2_f32(raw(from[i]), raw(from[i + 4])));
    }
  };
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = load_row(i);
  shuffle(a, b);
  shuffle(b, a);
  shuffle(a, b);
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) store_column(j, b[j]);
}

/// Transposes 8 rows of four elements of 32 bits that lie one after the other: `load_rows(i)` reads rows 2·i and 2·i +
/// 1, column j leaves through `store_column(j, v)`.
template <class LoadRows, class StoreColumn>
BIFOLIO_INLINE void transpose_quads(const LoadRows& load_rows, const StoreColumn& store_column) noexcept {
  const svfloat32_t rows01 = raw(load_rows(0));
  const svfloat32_t rows23 = raw(load_rows(1));
  const svfloat32_t rows45 = raw(load_rows(2));
  const svfloat32_t rows67 = raw(load_rows(3));
  const svfloat32_t even0123 = svuzp1_f32(rows01, rows23);
  const svfloat32_t odd0123 = svuzp2_f32(rows01, rows23);
  const svfloat32_t even4567 = svuzp1_f32(rows45, rows67);
  const svfloat32_t odd4567 = svuzp2_f32(rows45, rows67);
  store_column(0, vf(svuzp1_f32(even0123, even4567)));
  store_column(1, vf(svuzp1_f32(odd0123, odd4567)));
  store_column(2, vf(svuzp2_f32(even0123, even4567)));
  store_column(3, vf(svuzp2_f32(odd0123, odd4567)));
}

/// 16 elements of 16 bits as 8 lanes of 32, the earlier element in the low half.
BIFOLIO_INLINE vf load_bits(const void* p) noexcept {
  return from_bits(svld1_u16(svptrue_b16(), static_cast<const std::uint16_t*>(p)));
}

/// The first `num_bytes` of a vector, 0 in the rest. Reads no other byte.
BIFOLIO_INLINE vf load_first(const void* p, int num_bytes) noexcept {
  const svbool_t present = svwhilelt_b8_s32(0, num_bytes);
  return vf(svreinterpret_f32_u8(svld1_u8(present, static_cast<const std::uint8_t*>(p))));
}

/// 8 elements of 16 bits, each in the low half of a lane of 32.
BIFOLIO_INLINE svuint32_t load_words(const void* p) noexcept {
  return svld1uh_u32(svptrue_b32(), static_cast<const std::uint16_t*>(p));
}

/// Two times 8 elements of 16 bits as 8 lanes of 32: `even` in the low halves.
BIFOLIO_INLINE vf join_elements(const void* even, const void* odd) noexcept {
  const svuint32_t high = svlsl_n_u32_x(svptrue_b32(), load_words(odd), 16);
  return from_bits(svorr_u32_x(svptrue_b32(), load_words(even), high));
}

/// The low and the high halves of the lanes as floats.
template <class T>
void split_pair(vf bits, vf& low, vf& high) noexcept = delete;

template <>
BIFOLIO_INLINE void split_pair<bfloat16>(vf bits, vf& low, vf& high) noexcept {
  const svuint32_t pairs = bits_of(bits);
  low = from_bits(svlsl_n_u32_x(svptrue_b32(), pairs, 16));
  high = from_bits(svand_n_u32_x(svptrue_b32(), pairs, 0xffff0000u));
}

/// The float16 in the low half of each lane.
BIFOLIO_INLINE vf widen_words(svuint32_t words) noexcept {
  return vf(svcvt_f32_f16_x(svptrue_b32(), svreinterpret_f16_u32(words)));
}

template <>
BIFOLIO_INLINE void split_pair<float16>(vf bits, vf& low, vf& high) noexcept {
  const svuint32_t pairs = bits_of(bits);
  low = widen_words(pairs);
  high = widen_words(svlsr_n_u32_x(svptrue_b32(), pairs, 16));
}

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
  a = widen_words(load_words(p));
  b = widen_words(load_words(p + lanes));
}

/// acc + (a.high · b.high + a.low · b.low) of bfloat16 pairs, as in neon.hpp.
inline constexpr bool has_pair_dot = true;
BIFOLIO_INLINE vf pair_dot(vf a, vf b, vf acc) noexcept {
  return vf(svbfdot_f32(raw(acc), svreinterpret_bf16_f32(raw(a)), svreinterpret_bf16_f32(raw(b))));
}

/// 2·lanes floats, rounded to nearest even, as pairs of bfloat16: lane i holds elements 2·i and 2·i + 1.
BIFOLIO_INLINE vf narrow_pairs(vf first, vf second) noexcept {
  const svfloat32_t even = svuzp1_f32(raw(first), raw(second));
  const svfloat32_t odd = svuzp2_f32(raw(first), raw(second));
  const svbfloat16_t low = svcvt_bf16_f32_x(svptrue_b32(), even);
  return vf(svreinterpret_f32_bf16(svcvtnt_bf16_f32_x(low, svptrue_b32(), odd)));
}

/// Pairs (even[d], odd[d]) of 2·lanes elements of two rows, the first `lanes` dims in a.
BIFOLIO_INLINE void pair_rows(vf even, vf odd, vf& a, vf& b) noexcept {
  const svuint16_t low = halves_of(even);
  const svuint16_t high = halves_of(odd);
  a = from_bits(svzip1_u16(low, high));
  b = from_bits(svzip2_u16(low, high));
}

/// Which of the 2·lanes dims is in a lane of a (half 0) or b (half 1).
[[nodiscard]] constexpr int paired_dim(int half, int lane) noexcept { return half * lanes + lane; }

/// Puts the dims of what `pair_rows` made in order: they are.
BIFOLIO_INLINE void order_dims(vf a, vf b, vf& first, vf& second) noexcept { first = a, second = b; }

/// The bits that are also in `bits`.
BIFOLIO_INLINE vf keep_bits(vf value, std::uint32_t bits) noexcept {
  return from_bits(svand_n_u32_x(svptrue_b32(), bits_of(value), bits));
}

/// Lanes of int32: acc + Σ of four products of signed bytes of `query` with unsigned ones of `key`, exactly. Written as
/// an instruction: GCC 12 moves and spills accumulators whose type changes at every step.
inline constexpr bool has_quad_dot = true;
BIFOLIO_INLINE vf quad_dot(vf query, vf key, vf acc) noexcept {
  svfloat32_t sums = raw(acc);
  __asm__("usdot %0.s, %1.b, %2.b" : "+w"(sums) : "w"(raw(key)), "w"(raw(query)));
  return vf(sums);
}

/// Signed bytes less the lowest of them, −128: unsigned ones.
BIFOLIO_INLINE vf above_lowest(vf codes) noexcept {
  return from_bits(sveor_n_u32_x(svptrue_b32(), bits_of(codes), 0x80808080u));
}

/// Lanes of int32, `offset` added, as floats.
BIFOLIO_INLINE vf sums_as_floats(vf sums, std::int32_t offset) noexcept {
  const svint32_t shifted = svadd_n_s32_x(svptrue_b32(), svreinterpret_s32_f32(raw(sums)), offset);
  return vf(svcvt_f32_s32_x(svptrue_b32(), shifted));
}

/// Transposed keys are widened once; doing it at every use was not measured.
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
  const svfloat32_t low = svzip1_f32(raw(a), raw(b));
  second = vf(svzip2_f32(raw(a), raw(b)));
  first = vf(low);
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

// SPDX-License-Identifier: Apache-2.0
#pragma once

// AArch64 Advanced SIMD part of simd.hpp, and the BF16 extension's dot product where it is compiled in.

#include <arm_neon.h>

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

static_assert(lanes == 4);
inline constexpr int num_vector_registers = 32;

BIFOLIO_INLINE float32x4_t raw(vf v) noexcept { return static_cast<float32x4_t>(v); }

BIFOLIO_INLINE vf fma(vf a, vf b, vf c) noexcept { return vf(vfmaq_f32(raw(c), raw(a), raw(b))); }

BIFOLIO_INLINE vf lane_numbers() noexcept {
  const float numbers[4] = {0, 1, 2, 3};
  return vf(vld1q_f32(numbers));
}

/// p · 2^n; `shifted` is n + 1.5·2^23, whose low bits hold n. −126 ≤ n ≤ 127.
BIFOLIO_INLINE vf times_power_of_two(vf p, vf shifted, vf) noexcept {
  const int32x4_t biased = vaddq_s32(vreinterpretq_s32_f32(raw(shifted)), vdupq_n_s32(127));
  return p * vf(vreinterpretq_f32_s32(vshlq_n_s32(biased, 23)));
}

/// 0 where x < limit, else value.
BIFOLIO_INLINE vf zero_below(vf x, float limit, vf value) noexcept {
  const uint32x4_t below = vcltq_f32(raw(x), vdupq_n_f32(limit));
  return vf(vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(raw(value)), below)));
}

/// One fixed tree: halves, pairs.
BIFOLIO_INLINE float reduce_add(vf v) noexcept {
  const float32x2_t two = vadd_f32(vget_low_f32(raw(v)), vget_high_f32(raw(v)));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

BIFOLIO_INLINE float reduce_max(vf v) noexcept { return vmaxvq_f32(raw(v)); }

/// Transposes 4 × 4 elements of 32 bits: row i is read by `load_row(i)`, column j leaves through `store_column(j, v)`.
template <class LoadRow, class StoreColumn>
BIFOLIO_INLINE void transpose(const LoadRow& load_row, const StoreColumn& store_column) noexcept {
  const float32x4_t row0 = raw(load_row(0));
  const float32x4_t row1 = raw(load_row(1));
  const float32x4_t row2 = raw(load_row(2));
  const float32x4_t row3 = raw(load_row(3));
  const float32x4_t low02 = vzip1q_f32(row0, row2);
  const float32x4_t high02 = vzip2q_f32(row0, row2);
  const float32x4_t low13 = vzip1q_f32(row1, row3);
  const float32x4_t high13 = vzip2q_f32(row1, row3);
  store_column(0, vf(vzip1q_f32(low02, low13)));
  store_column(1, vf(vzip2q_f32(low02, low13)));
  store_column(2, vf(vzip1q_f32(high02, high13)));
  store_column(3, vf(vzip2q_f32(high02, high13)));
}

/// 8 elements of 16 bits as 4 lanes of 32, the earlier element in the low half.
BIFOLIO_INLINE vf load_bits(const void* p) noexcept {
  return vf(vreinterpretq_f32_u16(vld1q_u16(static_cast<const std::uint16_t*>(p))));
}

/// The first `num_bytes` of a vector, 0 in the rest. Reads no other byte.
BIFOLIO_INLINE vf load_first(const void* p, int num_bytes) noexcept {
  alignas(16) char bytes[16] = {};
  __builtin_memcpy(bytes, p, static_cast<std::size_t>(num_bytes));
  return load_bits(bytes);
}

/// Two times 4 elements of 16 bits as 4 lanes of 32: `even` in the low halves.
BIFOLIO_INLINE vf join_elements(const void* even, const void* odd) noexcept {
  const uint16x4x2_t both =
      vzip_u16(vld1_u16(static_cast<const std::uint16_t*>(even)), vld1_u16(static_cast<const std::uint16_t*>(odd)));
  return vf(vreinterpretq_f32_u16(vcombine_u16(both.val[0], both.val[1])));
}

/// The low and the high halves of the lanes as floats.
template <class T>
void split_pair(vf bits, vf& low, vf& high) noexcept = delete;

template <>
BIFOLIO_INLINE void split_pair<bfloat16>(vf bits, vf& low, vf& high) noexcept {
  const uint32x4_t pairs = vreinterpretq_u32_f32(raw(bits));
  low = vf(vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)));
  high = vf(vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u))));
}

template <>
BIFOLIO_INLINE void split_pair<float16>(vf bits, vf& low, vf& high) noexcept {
  const uint32x4_t pairs = vreinterpretq_u32_f32(raw(bits));
  low = vf(vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(pairs))));
  high = vf(vcvt_f32_f16(vreinterpret_f16_u16(vshrn_n_u32(pairs, 16))));
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
  const float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const std::uint16_t*>(p)));
  a = vf(vcvt_f32_f16(vget_low_f16(halves)));
  b = vf(vcvt_f32_f16(vget_high_f16(halves)));
}

#if BIFOLIO_PAIR_DOT
/// acc + (a.high · b.high + a.low · b.low) of bfloat16 pairs: exact products, the inner sum rounded, then the outer
/// one, both to odd, whatever FPCR says of rounding; subnormals count as 0 (Arm ARM, BFDOT with FPCR.EBF = 0).
inline constexpr bool has_pair_dot = true;
BIFOLIO_INLINE vf pair_dot(vf a, vf b, vf acc) noexcept {
  return vf(vbfdotq_f32(raw(acc), vreinterpretq_bf16_f32(raw(a)), vreinterpretq_bf16_f32(raw(b))));
}

/// 2·lanes floats, rounded to nearest even, as pairs of bfloat16: lane i holds elements 2·i and 2·i + 1.
BIFOLIO_INLINE vf narrow_pairs(vf first, vf second) noexcept {
  return vf(vreinterpretq_f32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(raw(first)), raw(second))));
}

/// Pairs (even[d], odd[d]) of 2·lanes elements of two rows, the first `lanes` dims in a.
BIFOLIO_INLINE void pair_rows(vf even, vf odd, vf& a, vf& b) noexcept {
  const uint16x8_t low = vreinterpretq_u16_f32(raw(even));
  const uint16x8_t high = vreinterpretq_u16_f32(raw(odd));
  a = vf(vreinterpretq_f32_u16(vzip1q_u16(low, high)));
  b = vf(vreinterpretq_f32_u16(vzip2q_u16(low, high)));
}

/// Which of the 2·lanes dims is in a lane of a (half 0) or b (half 1).
[[nodiscard]] constexpr int paired_dim(int half, int lane) noexcept { return half * lanes + lane; }

/// Puts the dims of what `pair_rows` made in order: they are.
BIFOLIO_INLINE void order_dims(vf a, vf b, vf& first, vf& second) noexcept { first = a, second = b; }

/// The bits that are also in `bits`.
BIFOLIO_INLINE vf keep_bits(vf value, std::uint32_t bits) noexcept {
  return vf(vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(raw(value)), vdupq_n_u32(bits))));
}
#endif

#if BIFOLIO_QUAD_DOT
/// Lanes of int32: acc + Σ of four products of signed bytes of `query` with unsigned ones of `key`, exactly. Written as
/// an instruction: GCC 12 moves accumulators whose type changes at every step.
inline constexpr bool has_quad_dot = true;
BIFOLIO_INLINE vf quad_dot(vf query, vf key, vf acc) noexcept {
  float32x4_t sums = raw(acc);
  __asm__("usdot %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(raw(key)), "w"(raw(query)));
  return vf(sums);
}

/// Signed bytes less the lowest of them, −128: unsigned ones.
BIFOLIO_INLINE vf above_lowest(vf codes) noexcept {
  return vf(vreinterpretq_f32_u8(veorq_u8(vreinterpretq_u8_f32(raw(codes)), vdupq_n_u8(0x80))));
}

/// Lanes of int32, `offset` added, as floats.
BIFOLIO_INLINE vf sums_as_floats(vf sums, std::int32_t offset) noexcept {
  return vf(vcvtq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(raw(sums)), vdupq_n_s32(offset))));
}
#endif

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
  first = vf(vzip1q_f32(raw(a), raw(b)));
  second = vf(vzip2q_f32(raw(a), raw(b)));
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

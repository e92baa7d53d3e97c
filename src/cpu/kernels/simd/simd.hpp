// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The vocabulary of the CPU kernels, and the only file that includes xsimd. One vector type, `vf`, holds `lanes`
/// floats: xsimd's, or that of sve_batch.hpp with its operators. Everything that differs between instruction sets or
/// between xsimd versions (8.1 and newer) is hidden here:
///   - fma: xsimd 8.1's AVX-512 `fma` is not fused; SSE2 has none, there it is a product and a sum, everywhere alike;
///   - 16-bit floats, which no xsimd has: `split_pair`, `load_pair`, and pairs in scratch, written by `store_pairs<T>`
///     and read by `load_half<T, 0>` (the low halves as floats) and `load_half<T, 1>`;
///   - dot products of bfloat16 pairs and of four 8-bit integers, where the hardware has them: `pair_dot`, `quad_dot`;
///   - transposition, 2^n, reductions: names or semantics changed between versions.
///
/// Value order of pairs: a pair is 2·lanes consecutive elements in two vectors. `load_pair<T>` may hand out the even
/// elements and then the odd ones (`pair_is_interleaved<T>`); arithmetic per element does not care, and
/// `store_pair<T>` puts them back in order.
///
/// Everything is in an unnamed namespace and inlined: a kernel object shares no symbol with that of another ISA.

#include <bifolio/dtype.hpp>
#include <cstdint>

#include "cpu/kernels/simd/inline.hpp"

// What the flags of the instruction set allow (cmake/BifolioIsa.cmake), and nothing else, decides which parts of these
// headers it uses.
#if defined(__AMX_TILE__)
#define BIFOLIO_TILES 1
#endif
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define BIFOLIO_PAIR_DOT 1
#endif
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_MATMUL_INT8)
#define BIFOLIO_QUAD_DOT 1
#endif
#if defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256
#define BIFOLIO_SVE256 1
#endif

#if BIFOLIO_SVE256
#include "cpu/kernels/simd/sve_batch.hpp"
#else
#include <xsimd/xsimd.hpp>

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {
using vf = xsimd::batch<float>;
}
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA
#endif

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

inline constexpr int lanes = static_cast<int>(vf::size);

BIFOLIO_INLINE vf load(const float* p) noexcept { return vf::load_unaligned(p); }
BIFOLIO_INLINE void store(float* p, vf v) noexcept { v.store_unaligned(p); }
BIFOLIO_INLINE vf broadcast(float x) noexcept { return vf(x); }

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

#if defined(__AVX512F__)
#include "cpu/kernels/simd/avx512.hpp"
#elif defined(__AVX2__)
#include "cpu/kernels/simd/avx2.hpp"
#elif BIFOLIO_SVE256
#include "cpu/kernels/simd/sve256.hpp"
#elif defined(__ARM_NEON)
#include "cpu/kernels/simd/neon.hpp"
#else
#include "cpu/kernels/simd/sse2.hpp"
#endif

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

#if !defined(__AVX2__) && !BIFOLIO_SVE256
/// Transposes four rows of four elements of 32 bits, as the wider `transpose_quads`.
template <class LoadRows, class StoreColumn>
BIFOLIO_INLINE void transpose_quads(const LoadRows& load_rows, const StoreColumn& store_column) noexcept {
  static_assert(lanes == 4);
  transpose(load_rows, store_column);
}
#endif

#if !defined(__AVX512F__)
inline constexpr bool transposes_half_rows = false;
// Never called:
template <class Row, class StoreColumn>
void transpose_half_rows(const Row&, const StoreColumn&) noexcept {}
template <class Row, class StoreColumn>
void transpose_words(const Row&, const StoreColumn&) noexcept {}
#else
// Never called:
BIFOLIO_INLINE vf join_elements(const void* even, const void*) noexcept { return load_bits(even); }
#endif

#if !BIFOLIO_PAIR_DOT
inline constexpr bool has_pair_dot = false;
// Never called:
BIFOLIO_INLINE vf pair_dot(vf, vf, vf acc) noexcept { return acc; }
BIFOLIO_INLINE vf narrow_pairs(vf first, vf) noexcept { return first; }
BIFOLIO_INLINE void pair_rows(vf even, vf odd, vf& a, vf& b) noexcept { a = even, b = odd; }
[[nodiscard]] constexpr int paired_dim(int, int lane) noexcept { return lane; }
BIFOLIO_INLINE void order_dims(vf a, vf b, vf& first, vf& second) noexcept { first = a, second = b; }
BIFOLIO_INLINE vf keep_bits(vf value, std::uint32_t) noexcept { return value; }
#endif

#if !BIFOLIO_QUAD_DOT
inline constexpr bool has_quad_dot = false;
// Never called:
BIFOLIO_INLINE vf quad_dot(vf, vf, vf acc) noexcept { return acc; }
BIFOLIO_INLINE vf above_lowest(vf codes) noexcept { return codes; }
BIFOLIO_INLINE vf sums_as_floats(vf sums, std::int32_t) noexcept { return sums; }
#endif

/// As load_pair, of the first `count` < 2·lanes elements, 0 for the others. Reads no other element.
template <class T>
BIFOLIO_INLINE void load_first_of_pair(const T* p, int count, vf& a, vf& b) noexcept {
  constexpr int size = static_cast<int>(sizeof(T));
  if constexpr (size == 4) {
    a = load_first(p, size * (count < lanes ? count : lanes));
    b = count > lanes ? load_first(p + lanes, size * (count - lanes)) : vf(0.0f);
  } else if constexpr (pair_is_interleaved<T>) {
    split_pair<T>(load_first(p, size * count), a, b);
#if defined(__AVX512F__)
  } else if constexpr (__is_same(T, float16)) {
    const std::uint32_t present = (std::uint32_t{1} << count) - 1;
    a = widen_first(p, static_cast<std::uint16_t>(present));
    b = widen_first(p + lanes, static_cast<std::uint16_t>(present >> lanes));
#endif
  } else {
    alignas(64) T whole[static_cast<std::size_t>(2 * lanes)];
    store(reinterpret_cast<float*>(whole), load_first(p, size * count));
    load_pair(whole, a, b);
  }
}

/// e^x for x ≤ 88, within 1.5 ulp; below −87.3 it is 0, −inf gives 0, NaN stays NaN. x = n·ln 2 + r with
/// |r| ≤ ln 2 / 2 (two-step reduction, Cody & Waite), e^r = 1 + r + r²·P(r), P of degree 4 through Chebyshev nodes
/// (relative error 1e-8).
BIFOLIO_INLINE vf exp(vf x) noexcept {
  constexpr float magic = 0x1.8p23f;  // adding it rounds to an integer and leaves that integer in the low bits
  const vf shifted = fma(x, vf(1.44269504f), vf(magic));
  const vf n = shifted - vf(magic);
  vf r = fma(n, vf(-0x1.62ep-1f), x);   // upper 12 bits of ln 2: n · that is exact
  r = fma(n, vf(-0x1.0bfbe8p-15f), r);  // the rest of ln 2
  vf p = fma(vf(0x1.6d117cp-10f), r, vf(0x1.120be2p-7f));
  p = fma(p, r, vf(0x1.555518p-5f));
  p = fma(p, r, vf(0x1.5554dcp-3f));
  p = fma(p, r, vf(0.5f));
  p = fma(p * r, r, r) + vf(1.0f);
  return zero_below(x, -87.3f, times_power_of_two(p, shifted, n));
}

/// tanh, within 3 ulp; NaN stays NaN. |x| < 0.625: x + x³·P(x²) (relative error 2e-8), else 1 − 2 / (e^2|x| + 1).
BIFOLIO_INLINE vf tanh(vf x) noexcept {
  const vf magnitude = abs(x);
  const vf z = x * x;
  vf p = fma(vf(-0x1.8c2d0ap-8f), z, vf(0x1.576e3p-6f));
  p = fma(p, z, vf(-0x1.b91582p-5f));
  p = fma(p, z, vf(0x1.110dd8p-3f));
  p = fma(p, z, vf(-0x1.555552p-2f));
  const vf small = fma(p * z, x, x);
  // Clamped where tanh is 1 in float32; the comparison is false for NaN, which passes through exp.
  const vf doubled = select(magnitude > vf(20.0f), vf(40.0f), magnitude + magnitude);
  const vf positive = vf(1.0f) - vf(2.0f) / (exp(doubled) + vf(1.0f));
  const vf large = select(x < vf(0.0f), vf(0.0f) - positive, positive);
  return select(magnitude < vf(0.625f), small, large);
}

/// `value` in the lanes whose number is in [begin, end), `other` in the others, whatever `value` is there.
BIFOLIO_INLINE vf keep_lanes(vf value, int begin, int end, float other = -__builtin_inff()) noexcept {
  const vf number = lane_numbers();
  const vf lowest(other);
  const auto inside = (number >= vf(static_cast<float>(begin))) & (number < vf(static_cast<float>(end)));
  return select(inside, value, lowest);
}

// Element conversions for the rows at the edges: written without branches, so that the compiler vectorises the loops
// around them. Same results as dtype.hpp.

BIFOLIO_INLINE float widen(float value) noexcept { return value; }

BIFOLIO_INLINE float widen(bfloat16 value) noexcept {
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(value.bits) << 16);
}

BIFOLIO_INLINE float widen(float16 value) noexcept {
  const std::uint32_t sign = (value.bits & 0x8000u) << 16;
  const std::uint32_t magnitude = value.bits & 0x7fffu;
  const std::uint32_t normal = (magnitude << 13) + 0x38000000u;
  // Subnormals: 2^23 + magnitude units, less 2^23, in units of 2^-24; no denormal float32 is touched.
  const float units = __builtin_bit_cast(float, magnitude | 0x4b000000u) - 0x1p23f;
  const std::uint32_t subnormal = __builtin_bit_cast(std::uint32_t, units * 0x1p-24f);
  std::uint32_t bits = magnitude < 0x400u ? subnormal : normal;
  bits = magnitude >= 0x7c00u ? bits | 0x7f800000u : bits;
  return __builtin_bit_cast(float, bits | sign);
}

template <class T>
T narrow(float value) noexcept = delete;

template <>
BIFOLIO_INLINE float narrow<float>(float value) noexcept {
  return value;
}

template <>
BIFOLIO_INLINE bfloat16 narrow<bfloat16>(float value) noexcept {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t rounded = (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16;
  rounded = rounded >= 0x7f80u ? 0x7f7fu : rounded;
  rounded = magnitude >= 0x7f800000u ? 0x7f80u : rounded;
  rounded = magnitude > 0x7f800000u ? 0x7fc0u : rounded;
  return {static_cast<std::uint16_t>(rounded | ((bits >> 16) & 0x8000u))};
}

template <>
BIFOLIO_INLINE float16 narrow<float16>(float value) noexcept {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the unit is 2^-24: adding 0.5, whose last bit is worth that, rounds to it.
  const float sum = __builtin_bit_cast(float, magnitude) + 0.5f;
  const std::uint32_t subnormal = __builtin_bit_cast(std::uint32_t, sum) - 0x3f000000u;
  std::uint32_t rounded = normal >= 0x7c00u ? 0x7bffu : normal;
  rounded = magnitude < 0x38800000u ? subnormal : rounded;
  rounded = magnitude >= 0x7f800000u ? 0x7c00u : rounded;
  rounded = magnitude > 0x7f800000u ? 0x7e00u : rounded;
  return {static_cast<std::uint16_t>(rounded | ((bits >> 16) & 0x8000u))};
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

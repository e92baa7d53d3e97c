// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Vectors of storage elements widened to float32 and narrowed back, for kernel sources only: everything is in an
/// unnamed namespace and means the ISA that the including file is compiled for. Results are bit for bit those of
/// `to_float` and `from_float` of dtype.hpp on every ISA, in the default rounding mode.
///
/// Written on the compiler's vector types (GCC and Clang) instead of xsimd, which has neither 8- and 16-bit floats nor
/// stores that narrow integers; the only instructions named are the hardware conversions of binary16.

#include <bifolio/dtype.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace bifolio::inline v0_2::cpu {
namespace {

template <class T, int N>
struct vector_of {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
template <int N>
using f32_vector = typename vector_of<float, N>::type;
template <int N>
using u32_vector = typename vector_of<std::uint32_t, N>::type;
template <int N>
using i32_vector = typename vector_of<std::int32_t, N>::type;
template <int N>
using u16_vector = typename vector_of<std::uint16_t, N>::type;
template <int N>
using u8_vector = typename vector_of<std::uint8_t, N>::type;

/// Lanes of the widest vector.
#if defined(__AVX512F__)
inline constexpr int max_lanes = 16;
#elif defined(__AVX2__)
inline constexpr int max_lanes = 8;
#else
inline constexpr int max_lanes = 4;
#endif

#define BIFOLIO_FORCE_INLINE [[gnu::always_inline]] inline

template <class To, class From>
BIFOLIO_FORCE_INLINE To same_bits(const From& from) noexcept {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

template <int N>
BIFOLIO_FORCE_INLINE u32_vector<N> splat(std::uint32_t value) noexcept {
  return u32_vector<N>{} + value;
}

/// `mask` has all bits of a lane set or none.
template <int N>
BIFOLIO_FORCE_INLINE u32_vector<N> select(i32_vector<N> mask, u32_vector<N> yes, u32_vector<N> no) noexcept {
  const auto bits = same_bits<u32_vector<N>>(mask);
  return (yes & bits) | (no & ~bits);
}

/// Lanes of a and b are below 2^31: SSE2 compares signed integers only.
template <int N>
BIFOLIO_FORCE_INLINE i32_vector<N> greater(u32_vector<N> a, u32_vector<N> b) noexcept {
  return same_bits<i32_vector<N>>(a) > same_bits<i32_vector<N>>(b);
}

// ---- bytes to and from lanes of 32 bits, which GCC 12 moves one by one where it is left to it

template <int N>
BIFOLIO_FORCE_INLINE u32_vector<N> load_bytes(const void* from) noexcept {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    __m128i bytes;
    std::memcpy(&bytes, from, sizeof(bytes));
    return same_bits<u32_vector<N>>(_mm512_maskz_cvtepu8_epi32(0xffff, bytes));
  }
#endif
#if defined(__AVX2__)
  if constexpr (N == 8) {
    std::int64_t bytes = 0;
    std::memcpy(&bytes, from, sizeof(bytes));
    return same_bits<u32_vector<N>>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes)));
  }
  if constexpr (N == 4) {
    std::int32_t bytes = 0;
    std::memcpy(&bytes, from, sizeof(bytes));
    return same_bits<u32_vector<N>>(_mm_cvtepu8_epi32(_mm_cvtsi32_si128(bytes)));
  }
#else
  u8_vector<N> bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(bytes, u32_vector<N>);
#endif
}

/// The low byte of each lane, which holds no more.
template <int N>
BIFOLIO_FORCE_INLINE void store_bytes(void* to, u32_vector<N> lanes) noexcept {
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, same_bits<__m512i>(lanes));
    std::memcpy(to, &bytes, sizeof(bytes));
  }
#endif
#if defined(__AVX2__)
  if constexpr (N == 8) {
    const auto all = same_bits<__m256i>(lanes);
    const __m128i pairs = _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
    const std::int64_t bytes = _mm_cvtsi128_si64(_mm_packus_epi16(pairs, pairs));
    std::memcpy(to, &bytes, sizeof(bytes));
  }
  if constexpr (N == 4) {
    const auto all = same_bits<__m128i>(lanes);
    const __m128i pairs = _mm_packus_epi32(all, all);
    const std::int32_t bytes = _mm_cvtsi128_si32(_mm_packus_epi16(pairs, pairs));
    std::memcpy(to, &bytes, sizeof(bytes));
  }
#else
  const u8_vector<N> bytes = __builtin_convertvector(lanes, u8_vector<N>);
  std::memcpy(to, &bytes, sizeof(bytes));
#endif
}

// ---- widen: N elements from memory

template <int N>
BIFOLIO_FORCE_INLINE f32_vector<N> widen(const float* from) noexcept {
  f32_vector<N> lanes;
  std::memcpy(&lanes, from, sizeof(lanes));
  return lanes;
}

template <int N>
BIFOLIO_FORCE_INLINE f32_vector<N> widen(const bfloat16* from) noexcept {
  u16_vector<N> halves;
  std::memcpy(&halves, from, sizeof(halves));
  return same_bits<f32_vector<N>>(__builtin_convertvector(halves, u32_vector<N>) << 16);
}

template <int N>
BIFOLIO_FORCE_INLINE f32_vector<N> widen(const float16* from) noexcept {
  u16_vector<N> halves;
  std::memcpy(&halves, from, sizeof(halves));
#if defined(__AVX512F__)
  if constexpr (N == 16) return same_bits<f32_vector<N>>(_mm512_maskz_cvtph_ps(0xffff, same_bits<__m256i>(halves)));
#endif
#if defined(__F16C__)
  if constexpr (N == 8) return same_bits<f32_vector<N>>(_mm256_cvtph_ps(same_bits<__m128i>(halves)));
  if constexpr (N == 4) {
    std::int64_t low = 0;
    std::memcpy(&low, from, sizeof(low));
    return same_bits<f32_vector<N>>(_mm_cvtph_ps(_mm_cvtsi64_si128(low)));
  }
#elif defined(__aarch64__)
  if constexpr (N == 4) return same_bits<f32_vector<N>>(vcvt_f32_f16(same_bits<float16x4_t>(halves)));
#else
  const u32_vector<N> bits = __builtin_convertvector(halves, u32_vector<N>);
  const u32_vector<N> sign = (bits & 0x8000u) << 16;
  const u32_vector<N> magnitude = bits & 0x7fffu;
  const i32_vector<N> special = greater<N>(magnitude, splat<N>(0x7bffu));
  const i32_vector<N> nan = greater<N>(magnitude, splat<N>(0x7c00u));
  const i32_vector<N> subnormal = greater<N>(splat<N>(0x400u), magnitude);
  u32_vector<N> wide = (magnitude << 13) + 0x38000000u;     // exponent − 15 + 127
  wide += same_bits<u32_vector<N>>(special) & 0x38000000u;  // … of inf and NaN: 255
  wide |= same_bits<u32_vector<N>>(nan) & 0x400000u;        // quiet
  // A subnormal is mantissa · 2^-24, which is a normal float32: no mode that flushes subnormals can change it.
  const f32_vector<N> small = __builtin_convertvector(same_bits<i32_vector<N>>(magnitude), f32_vector<N>) * 0x1p-24f;
  wide = select<N>(subnormal, same_bits<u32_vector<N>>(small), wide);
  return same_bits<f32_vector<N>>(wide | sign);
#endif
}

template <int N>
BIFOLIO_FORCE_INLINE f32_vector<N> widen(const float8_e5m2* from) noexcept {
  u8_vector<N> bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  const u16_vector<N> halves = __builtin_convertvector(bytes, u16_vector<N>) << 8;
  float16 elements[static_cast<std::size_t>(N)];
  std::memcpy(static_cast<void*>(elements), &halves, sizeof(halves));
  return widen<N>(elements);
}

template <int N>
BIFOLIO_FORCE_INLINE f32_vector<N> widen(const float8_e4m3* from) noexcept {
  const u32_vector<N> bits = load_bytes<N>(from);
  const u32_vector<N> magnitude = bits & 0x7fu;
  const f32_vector<N> small = __builtin_convertvector(same_bits<i32_vector<N>>(magnitude), f32_vector<N>) * 0x1p-9f;
  u32_vector<N> wide = (magnitude << 20) + (120u << 23);
  wide = select<N>(greater<N>(splat<N>(8), magnitude), same_bits<u32_vector<N>>(small), wide);
  wide = select<N>(magnitude == splat<N>(0x7f), splat<N>(0x7fc00000u), wide);
  return same_bits<f32_vector<N>>(wide | ((bits & 0x80u) << 24));
}

template <int N>
BIFOLIO_FORCE_INLINE f32_vector<N> widen(const std::int8_t* from) noexcept {
  const i32_vector<N> integers = same_bits<i32_vector<N>>(load_bytes<N>(from) << 24) >> 24;
  return __builtin_convertvector(integers, f32_vector<N>);
}

template <int N>
BIFOLIO_FORCE_INLINE f32_vector<N> widen(const std::uint8_t* from) noexcept {
  return __builtin_convertvector(same_bits<i32_vector<N>>(load_bytes<N>(from)), f32_vector<N>);
}

// ---- narrow: N lanes to memory, to nearest even, saturating, NaN without payload

template <int N>
BIFOLIO_FORCE_INLINE void narrow(float* to, f32_vector<N> lanes) noexcept {
  std::memcpy(to, &lanes, sizeof(lanes));
}

template <int N>
BIFOLIO_FORCE_INLINE void narrow(bfloat16* to, f32_vector<N> lanes) noexcept {
  const auto bits = same_bits<u32_vector<N>>(lanes);
  const u32_vector<N> magnitude = bits & 0x7fffffffu;
  const u32_vector<N> infinity = splat<N>(0x7f800000u);
  u32_vector<N> rounded = (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16;
  rounded = select<N>(greater<N>(rounded, splat<N>(0x7f7fu)), splat<N>(0x7f7fu), rounded);
  rounded = select<N>(same_bits<u32_vector<N>>(magnitude) == infinity, splat<N>(0x7f80u), rounded);
  rounded = select<N>(greater<N>(magnitude, infinity), splat<N>(0x7fc0u), rounded);
  const u16_vector<N> halves = __builtin_convertvector(rounded | ((bits >> 16) & 0x8000u), u16_vector<N>);
  std::memcpy(static_cast<void*>(to), &halves, sizeof(halves));
}

template <int N>
BIFOLIO_FORCE_INLINE void narrow(float16* to, f32_vector<N> lanes) noexcept {
  const auto bits = same_bits<u32_vector<N>>(lanes);
  const u32_vector<N> magnitude = bits & 0x7fffffffu;
  const u32_vector<N> infinity = splat<N>(0x7f800000u);
  const i32_vector<N> nan = greater<N>(magnitude, infinity);
#if defined(__F16C__) || defined(__aarch64__)
  // The hardware overflows to infinity and keeps payloads: both are decided before it.
  const u32_vector<N> largest = splat<N>(0x477fe000u);  // 65504
  u32_vector<N> tame = select<N>(greater<N>(magnitude, largest), largest, magnitude);
  tame = select<N>(magnitude == infinity, infinity, tame);
  tame = select<N>(nan, splat<N>(0x7fc00000u), tame) | (bits & 0x80000000u);
#if defined(__AVX512F__)
  if constexpr (N == 16) {
    // With a mask of all lanes: GCC 12 warns of its own undefined vector in the plain form.
    const __m256i halves =
        _mm512_maskz_cvtps_ph(0xffff, same_bits<__m512>(tame), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(static_cast<void*>(to), &halves, sizeof(halves));
  }
#endif
#if defined(__F16C__)
  if constexpr (N == 8) {
    const __m128i halves = _mm256_cvtps_ph(same_bits<__m256>(tame), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(static_cast<void*>(to), &halves, sizeof(halves));
  }
  if constexpr (N == 4) {
    const __m128i halves = _mm_cvtps_ph(same_bits<__m128>(tame), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(static_cast<void*>(to), &halves, 8);
  }
#else
  static_assert(N == 4);
  const float16x4_t halves = vcvt_f16_f32(same_bits<float32x4_t>(tame));
  std::memcpy(static_cast<void*>(to), &halves, sizeof(halves));
#endif
#else
  u32_vector<N> normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  normal = select<N>(greater<N>(normal, splat<N>(0x7bffu)), splat<N>(0x7bffu), normal);
  // Below 2^-14 the unit is 2^-24, which is also that of 0.5: adding 0.5 leaves the rounded count of units in the
  // mantissa.
  const f32_vector<N> shifted = same_bits<f32_vector<N>>(magnitude) + 0.5f;
  const u32_vector<N> units = same_bits<u32_vector<N>>(shifted) - 0x3f000000u;
  u32_vector<N> rounded = select<N>(greater<N>(splat<N>(0x38800000u), magnitude), units, normal);
  rounded = select<N>(magnitude == infinity, splat<N>(0x7c00u), rounded);
  rounded = select<N>(nan, splat<N>(0x7e00u), rounded);
  const u16_vector<N> halves = __builtin_convertvector(rounded | ((bits >> 16) & 0x8000u), u16_vector<N>);
  std::memcpy(static_cast<void*>(to), &halves, sizeof(halves));
#endif
}

/// An 8-bit float, as detail::narrow_to_8.
template <int N, std::uint32_t MantissaBits, std::uint32_t Bias, std::uint32_t Largest>
BIFOLIO_FORCE_INLINE void narrow_to_8(void* to, f32_vector<N> lanes) noexcept {
  constexpr std::uint32_t dropped = 23 - MantissaBits;
  const auto bits = same_bits<u32_vector<N>>(lanes);
  const u32_vector<N> magnitude = bits & 0x7fffffffu;
  constexpr std::uint32_t half = (1u << (dropped - 1)) - 1;
  u32_vector<N> normal = (magnitude - ((127u - Bias) << 23) + half + ((magnitude >> dropped) & 1u)) >> dropped;
  normal = select<N>(greater<N>(normal, splat<N>(Largest)), splat<N>(Largest), normal);
  // Below the normal range the unit in the last place is that of `shift`: adding it leaves the rounded count of units
  // in the mantissa.
  constexpr std::uint32_t shift_bits = (151u - Bias - MantissaBits) << 23;
  const f32_vector<N> shifted = same_bits<f32_vector<N>>(magnitude) + __builtin_bit_cast(float, shift_bits);
  const u32_vector<N> units = same_bits<u32_vector<N>>(shifted) - shift_bits;
  u32_vector<N> rounded = select<N>(greater<N>(splat<N>((128u - Bias) << 23), magnitude), units, normal);
  rounded |= (bits >> 24) & 0x80u;
  rounded = select<N>(greater<N>(magnitude, splat<N>(0x7f800000u)), splat<N>(0x7f), rounded);
  store_bytes<N>(to, rounded);
}

template <int N>
BIFOLIO_FORCE_INLINE void narrow(float8_e4m3* to, f32_vector<N> lanes) noexcept {
  narrow_to_8<N, 3, 7, 0x7e>(static_cast<void*>(to), lanes);
}

template <int N>
BIFOLIO_FORCE_INLINE void narrow(float8_e5m2* to, f32_vector<N> lanes) noexcept {
  narrow_to_8<N, 2, 15, 0x7b>(static_cast<void*>(to), lanes);
}

/// To the nearest integer in [least, most], NaN to 0.
template <int N>
BIFOLIO_FORCE_INLINE i32_vector<N> narrow_to_integers(f32_vector<N> lanes, float least, float most) noexcept {
  const f32_vector<N> low = f32_vector<N>{} + least;
  const f32_vector<N> high = f32_vector<N>{} + most;
  auto bits = same_bits<u32_vector<N>>(lanes);
  bits = select<N>(lanes < low, same_bits<u32_vector<N>>(low), bits);
  bits = select<N>(lanes > high, same_bits<u32_vector<N>>(high), bits);
  bits &= same_bits<u32_vector<N>>(lanes == lanes);
  // Adding 1.5 · 2^23 rounds to an integer and leaves it in the low bits.
  const f32_vector<N> shifted = same_bits<f32_vector<N>>(bits) + 0x1.8p23f;
  return same_bits<i32_vector<N>>(shifted) - 0x4b400000;
}

template <int N>
BIFOLIO_FORCE_INLINE void narrow(std::int8_t* to, f32_vector<N> lanes) noexcept {
  store_bytes<N>(to, same_bits<u32_vector<N>>(narrow_to_integers<N>(lanes, -127.0f, 127.0f)) & 0xffu);
}

template <int N>
BIFOLIO_FORCE_INLINE void narrow(std::uint8_t* to, f32_vector<N> lanes) noexcept {
  store_bytes<N>(to, same_bits<u32_vector<N>>(narrow_to_integers<N>(lanes, 0.0f, 255.0f)));
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// 16 bytes of codes as 16 elements of a 16-bit type, in their order. Every code is exact in float16 and in bfloat16.

#include <bifolio/dtype.hpp>
#include <cstdint>
#include <type_traits>

#include "cuda/device/code_pairs.cuh"
#include "cuda/device/float16_types.cuh"

namespace bifolio::inline v0_2::cuda::device {

/// Codes of four elements as bfloat16. Exponent and mantissa of an 8-bit float in their places are the value times a
/// power of two, subnormal or not.
class e4m3_bf16_pairs {
 public:
  [[nodiscard]] __device__ __forceinline__ half_pairs neighbours(std::uint32_t codes) {
    nan_ |= (codes & 0x7f7f7f7fu) + 0x01010101u;
    return {widened(__byte_perm(codes, 0, 0x1404)), widened(__byte_perm(codes, 0, 0x3424))};
  }
  /// Whether one of the codes so far was a NaN, which came out as a number.
  [[nodiscard]] __device__ __forceinline__ bool has_nan() const { return (nan_ & 0x80808080u) != 0; }

 private:
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t widened(std::uint32_t x) {
    std::uint32_t pair = (x & 0x80008000u) | (x >> 4 & 0x07f007f0u);
    asm("mul.rn.bf16x2 %0, %0, %1;\n" : "+r"(pair) : "r"(0x7b807b80u));  // 2^120
    return pair;
  }
  std::uint32_t nan_ = 0;
};
class e5m2_bf16_pairs {
 public:
  [[nodiscard]] __device__ __forceinline__ half_pairs neighbours(std::uint32_t codes) {
    special_ |= (codes & 0x7f7f7f7fu) + 0x04040404u;
    return {widened(__byte_perm(codes, 0, 0x1404)), widened(__byte_perm(codes, 0, 0x3424))};
  }
  /// The same of NaN and infinity.
  [[nodiscard]] __device__ __forceinline__ bool has_nan() const { return (special_ & 0x80808080u) != 0; }

 private:
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t widened(std::uint32_t x) {
    std::uint32_t pair = (x & 0x80008000u) | (x >> 3 & 0x0fe00fe0u);
    asm("mul.rn.bf16x2 %0, %0, %1;\n" : "+r"(pair) : "r"(0x77807780u));  // 2^112
    return pair;
  }
  std::uint32_t special_ = 0;
};
/// i8: its lower seven bits under the upper byte of 128, less 128 or 256.
struct i8_bf16_pairs {
  [[nodiscard]] static __device__ __forceinline__ half_pairs neighbours(std::uint32_t codes) {
    return {widened(__byte_perm(codes, 0, 0x4140)), widened(__byte_perm(codes, 0, 0x4342))};
  }
  [[nodiscard]] static __device__ __forceinline__ bool has_nan() { return false; }

 private:
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t widened(std::uint32_t x) {
    std::uint32_t pair = (x & 0x007f007fu) | 0x43004300u;
    asm("sub.rn.bf16x2 %0, %0, %1;\n" : "+r"(pair) : "r"((x & 0x00800080u) | 0x43004300u));
    return pair;
  }
};

/// 16 codes as T.
template <class T, class Pairs, class Half>
__device__ __forceinline__ void widen_codes(Pairs pairs, const Half& as_half, const uint4& codes,
                                            uint4 (&elements)[2]) {
  const std::uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  std::uint32_t wide[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const half_pairs two = pairs.neighbours(words[i]);
    wide[2 * i] = two.first;
    wide[2 * i + 1] = two.second;
  }
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (pairs.has_nan()) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const half_pairs two = as_half.neighbours(words[i]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t bits = half == 0 ? two.first : two.second;
          const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&bits));
          wide[2 * i + half] = pack<__nv_bfloat16>(values.x, values.y);
        }
      }
    }
  }
  elements[0] = make_uint4(wide[0], wide[1], wide[2], wide[3]);
  elements[1] = make_uint4(wide[4], wide[5], wide[6], wide[7]);
}

/// Calls body(widen) with a function from 16 bytes of codes to 16 elements of T.
template <class T, class Body>
__device__ __forceinline__ void visit_code_vectors(dtype type, const Body& body) {
  const auto call = [&](auto pairs, auto as_half) {
    body([=](const uint4& codes, uint4(&elements)[2]) { widen_codes<T>(pairs, as_half, codes, elements); });
  };
  if constexpr (std::is_same_v<T, __half>) {
    visit_code_pairs(type, [&](const auto& pairs) { call(pairs, pairs); });
  } else if (type == dtype::e4m3) {
    call(e4m3_bf16_pairs{}, e4m3_pairs{});
  } else if (type == dtype::e5m2) {
    call(e5m2_bf16_pairs{}, e5m2_pairs{});
  } else {
    call(i8_bf16_pairs{}, i8_pairs{});
  }
}

}  // namespace bifolio::inline v0_2::cuda::device

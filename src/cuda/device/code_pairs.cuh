// SPDX-License-Identifier: Apache-2.0
#pragma once

/// 8-bit codes as pairs of float16, four at a time in registers. Every code is exact in float16: e5m2 is its upper
/// byte, e4m3 a part of its range, and integers of 8 bits fit into its 11.

#include <bifolio/dtype.hpp>
#include <cstdint>

namespace bifolio::inline v0_2::cuda::device {

/// Two pairs, the first value of each in the low 16 bits.
struct half_pairs {
  std::uint32_t first;
  std::uint32_t second;
};

/// Each has `neighbours`: bytes 0 and 1, 2 and 3; and `alternate`: bytes 0 and 2, 1 and 3.
struct e4m3_pairs {
  [[nodiscard]] static __device__ __forceinline__ half_pairs neighbours(std::uint32_t codes) {
    half_pairs pairs;
#if __CUDA_ARCH__ >= 890
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}\n"
        : "=r"(pairs.first), "=r"(pairs.second)
        : "r"(codes));
#else
    pairs.first = widened(__byte_perm(codes, 0, 0x1404));
    pairs.second = widened(__byte_perm(codes, 0, 0x3424));
#endif
    return pairs;
  }
  [[nodiscard]] static __device__ __forceinline__ half_pairs alternate(std::uint32_t codes) {
    return neighbours(__byte_perm(codes, 0, 0x3120));
  }

 private:
#if __CUDA_ARCH__ < 890
  // Codes in the upper bytes. Exponent and mantissa in their places are the value times 2^-8, subnormal or not; codes
  // of NaN become 480, and are put right.
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t widened(std::uint32_t x) {
    const std::uint32_t magnitude = x & 0x7f007f00u;
    std::uint32_t pair = (x & 0x80008000u) | magnitude >> 1;
    asm("mul.rn.f16x2 %0, %0, %1;\n" : "+r"(pair) : "r"(0x5c005c00u));
    if ((magnitude & 0xff00u) == 0x7f00u) pair |= 0x7fffu;
    if ((magnitude & 0xff000000u) == 0x7f000000u) pair |= 0x7fff0000u;
    return pair;
  }
#endif
};

struct e5m2_pairs {
  [[nodiscard]] static __device__ __forceinline__ half_pairs neighbours(std::uint32_t codes) {
    return {__byte_perm(codes, 0, 0x1404), __byte_perm(codes, 0, 0x3424)};
  }
  [[nodiscard]] static __device__ __forceinline__ half_pairs alternate(std::uint32_t codes) {
    return {__byte_perm(codes, 0, 0x2404), __byte_perm(codes, 0, 0x3414)};
  }
};

/// i8: its byte with the sign bit turned over, b, under the upper byte of 1024 is 1024 + b, and its value b − 128.
struct i8_pairs {
  [[nodiscard]] static __device__ __forceinline__ half_pairs neighbours(std::uint32_t codes) {
    const std::uint32_t bytes = codes ^ 0x80808080u;
    return {less_1152(__byte_perm(bytes, 0x64646464u, 0x4140)), less_1152(__byte_perm(bytes, 0x64646464u, 0x4342))};
  }
  [[nodiscard]] static __device__ __forceinline__ half_pairs alternate(std::uint32_t codes) {
    const std::uint32_t bytes = codes ^ 0x80808080u;
    return {less_1152(__byte_perm(bytes, 0x64646464u, 0x4240)), less_1152(__byte_perm(bytes, 0x64646464u, 0x4341))};
  }

 private:
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t less_1152(std::uint32_t pair) {
    asm("sub.rn.f16x2 %0, %0, %1;\n" : "+r"(pair) : "r"(0x64806480u));
    return pair;
  }
};

/// u8 less a number of each code's token (zero_codes.cuh).
struct u8_pairs {
  std::uint32_t origins;  ///< two of float16 that 1024 + code is less: the same of `neighbours`, of both of `alternate`

  [[nodiscard]] __device__ __forceinline__ half_pairs neighbours(std::uint32_t codes) const {
    return {less(__byte_perm(codes, 0x64646464u, 0x4140)), less(__byte_perm(codes, 0x64646464u, 0x4342))};
  }
  [[nodiscard]] __device__ __forceinline__ half_pairs alternate(std::uint32_t codes) const {
    return {less(__byte_perm(codes, 0x64646464u, 0x4240)), less(__byte_perm(codes, 0x64646464u, 0x4341))};
  }

 private:
  [[nodiscard]] __device__ __forceinline__ std::uint32_t less(std::uint32_t pair) const {
    asm("sub.rn.f16x2 %0, %0, %1;\n" : "+r"(pair) : "r"(origins));
    return pair;
  }
};

/// Calls body(pairs) with those of e4m3, e5m2 or i8. Every thread of a warp has the same.
template <class Body>
__device__ __forceinline__ void visit_code_pairs(dtype type, const Body& body) {
  if (type == dtype::e4m3) {
    body(e4m3_pairs{});
  } else if (type == dtype::e5m2) {
    body(e5m2_pairs{});
  } else {
    body(i8_pairs{});
  }
}

}  // namespace bifolio::inline v0_2::cuda::device

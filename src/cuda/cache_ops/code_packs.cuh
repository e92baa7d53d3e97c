// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Several elements at a time from float32 values, packed into words, bit for bit as `narrow` makes each of them.

#include <bifolio/dtype.hpp>
#include <cstdint>
#include <type_traits>

#include "common/base/kv_code.hpp"
#include "cuda/device/convert.cuh"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/softmax.cuh"

namespace bifolio::inline v0_2::cuda {

/// An 8-bit float.
template <class T>
struct float8_code {
  static constexpr dtype type = dtype_of<T>;
  static constexpr bool is_float = true;
  static constexpr bool has_zero = false;
  static __device__ __forceinline__ std::uint32_t four_of(float a, float b, float c, float d) {
#if __CUDA_ARCH__ >= 890
    // `pairs`: PTX's name of the type.
#define BIFOLIO_CONVERT_FOUR(pairs) \
  asm("{\n"                         \
      ".reg .b16 low, high;\n"      \
      "cvt.rn.satfinite." pairs     \
      ".f32 low, %2, %1;\n"         \
      "cvt.rn.satfinite." pairs     \
      ".f32 high, %4, %3;\n"        \
      "mov.b32 %0, {low, high};\n"  \
      "}\n"                         \
      : "=r"(word)                  \
      : "f"(a), "f"(b), "f"(c), "f"(d))
    std::uint32_t word;
    if constexpr (type == dtype::e4m3) {
      BIFOLIO_CONVERT_FOUR("e4m3x2");
    } else {
      BIFOLIO_CONVERT_FOUR("e5m2x2");
    }
#undef BIFOLIO_CONVERT_FOUR
    return word;
#else
    return narrow<T>(a).bits | narrow<T>(b).bits << 8 | narrow<T>(c).bits << 16 |
           static_cast<std::uint32_t>(narrow<T>(d).bits) << 24;
#endif
  }
};
using e4m3_code = float8_code<float8_e4m3>;
using e5m2_code = float8_code<float8_e5m2>;
struct i8_code {
  static constexpr dtype type = dtype::i8;
  static constexpr bool is_float = false;
  static constexpr bool has_zero = false;
  static constexpr float least = -127.0f;
  static constexpr float most = 127.0f;
};
struct u8_code {
  static constexpr dtype type = dtype::u8;
  static constexpr bool is_float = false;
  static constexpr bool has_zero = true;
  static constexpr float least = 0.0f;
  static constexpr float most = 255.0f;
};

/// Codes of values that have been shifted and scaled, four to a word. The hardware's conversions make 0x7f of every
/// NaN. `Bounded`: integers with the scale of their own row, which are numbers and round to codes.
template <class Code, bool Bounded, int Count>
__device__ __forceinline__ void pack_codes(const float (&values)[Count], std::uint32_t* words) {
  if constexpr (Code::is_float) {
#pragma unroll
    for (int i = 0; i < Count / 4; ++i) {
      words[i] = Code::four_of(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Count / 4; ++i) {
      std::uint32_t bytes[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float x = values[4 * i + j];
        if constexpr (!Bounded) x = x == x ? fminf(fmaxf(x, Code::least), Code::most) : 0.0f;
        // In the sum the lowest bit is worth 1: it rounds to an integer, which is in the low bits.
        bytes[j] = __float_as_uint(__fadd_rn(x, 12582912.0f));
      }
      words[i] = __byte_perm(__byte_perm(bytes[0], bytes[1], 0x0040), __byte_perm(bytes[2], bytes[3], 0x0040), 0x5410);
    }
  }
}

/// The magnitude of a number, for comparisons: as integers, magnitudes are in the order of their values, and those that
/// are not finite above all others.
__device__ __forceinline__ std::uint32_t magnitude_of(float value) { return __float_as_uint(value) & 0x7fffffffu; }
/// `range` with the largest magnitude of its dims.
__device__ __forceinline__ detail::dim_range range_within(std::uint32_t magnitude, detail::dim_range range = {}) {
  range.finite = magnitude < 0x7f800000u;
  range.magnitude = __uint_as_float(magnitude);
  return range;
}

/// Scale, zero point and inverse of the row whose dims the `lanes` threads of `members` have: each `a` and `b`.
template <class Code, int Count>
__device__ __forceinline__ detail::encoding encoding_of_row(const float (&a)[Count], const float (&b)[Count], int lanes,
                                                            std::uint32_t members) {
  std::uint32_t magnitude = 0;
  detail::dim_range range;
  const auto take = [&](float value) {
    magnitude = max(magnitude, magnitude_of(value));
    if constexpr (Code::has_zero) {
      range.least = fminf(range.least, value);
      range.most = fmaxf(range.most, value);
    }
  };
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    take(a[i]);
    if (&a != &b) take(b[i]);
  }
  for (int mask = lanes / 2; mask > 0; mask /= 2) {
    magnitude = max(magnitude, __shfl_xor_sync(members, magnitude, mask));
    if constexpr (Code::has_zero) {
      range.least = fminf(range.least, __shfl_xor_sync(members, range.least, mask));
      range.most = fmaxf(range.most, __shfl_xor_sync(members, range.most, mask));
    }
  }
  return detail::encode_token_head<device_math>(Code::type, range_within(magnitude, range));
}

/// The larger of each half of two words, as unsigned integers.
__device__ __forceinline__ std::uint32_t larger_halves(std::uint32_t a, std::uint32_t b) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t larger;
  asm("max.u16x2 %0, %1, %2;\n" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
#else
  return __vmaxu2(a, b);
#endif
}

/// Elements of float16 or bfloat16, two to a word, as the hardware rounds; `largest` follows their magnitudes in both
/// halves.
template <class T, int Count>
__device__ __forceinline__ void pack_run(const float (&values)[Count], std::uint32_t* words, std::uint32_t& largest) {
  using native = std::conditional_t<std::is_same_v<T, bfloat16>, __nv_bfloat16, __half>;
#pragma unroll
  for (int i = 0; i < Count / 2; ++i) {
    words[i] = device::pack<native>(values[2 * i], values[2 * i + 1]);
    largest = larger_halves(largest, words[i] & 0x7fff7fffu);
  }
}
/// Whether there is an infinity, which a large value may have become, or a NaN.
template <class T>
[[nodiscard]] __device__ __forceinline__ bool is_special(std::uint32_t largest) {
  constexpr std::uint32_t exponent = std::is_same_v<T, bfloat16> ? 0x7f80u : 0x7c00u;
  return (largest & 0xffffu) >= exponent || largest >> 16 >= exponent;
}
/// The same elements where there is; every NaN as the one without a sign, or with its own (`keeps_signs`).
template <class T, int Count>
__device__ __forceinline__ void pack_special(const float (&values)[Count], std::uint32_t* words,
                                             bool keeps_signs = false) {
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    const float x = !keeps_signs && values[i] != values[i] ? __uint_as_float(0x7fc00000u) : values[i];
    const std::uint32_t bits = narrow<T>(x).bits;
    words[i / 2] = i % 2 == 0 ? bits : words[i / 2] | bits << 16;
  }
}

/// Elements of float16 or bfloat16, two to a word; every NaN as the one without a sign.
template <class T, int Count>
__device__ __forceinline__ void pack_halves(const float (&values)[Count], std::uint32_t* words) {
  std::uint32_t largest = 0;
  pack_run<T>(values, words, largest);
  if (is_special<T>(largest)) pack_special<T>(values, words);
}

}  // namespace bifolio::inline v0_2::cuda

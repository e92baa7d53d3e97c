// SPDX-License-Identifier: Apache-2.0
#pragma once

/// 16 bytes of codes as 16 elements of a 16-bit type, in their order. Every code is exact in float16 and in bfloat16.

#include <bifolio/dtype.hpp>
#include <cstdint>
#include <type_traits>

#include "cuda/device/code_pairs.cuh"
#include "cuda/device/float16_types.cuh"

namespace bifolio::inline v0_2::cuda::device {

/// The same as bfloat16, by way of float16 and float32.
template <class Pairs>
struct bf16_pairs {
  [[nodiscard]] static __device__ __forceinline__ half_pairs neighbours(std::uint32_t codes) {
    const half_pairs halves = Pairs::neighbours(codes);
    return {widened(halves.first), widened(halves.second)};
  }

 private:
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t widened(std::uint32_t halves) {
    const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    return pack<__nv_bfloat16>(values.x, values.y);
  }
};
/// Integers: the lower seven bits under the upper byte of 128, less 128 or 256.
template <>
struct bf16_pairs<i8_pairs> {
  [[nodiscard]] static __device__ __forceinline__ half_pairs neighbours(std::uint32_t codes) {
    const std::uint32_t lower = codes & 0x7f7f7f7fu;
    const std::uint32_t signs = codes & 0x80808080u;
    return {difference(under_43(lower, 0x4140), under_43(signs, 0x4140)),
            difference(under_43(lower, 0x4342), under_43(signs, 0x4342))};
  }

 private:
  // Byte 4 of the selector is 43.
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t under_43(std::uint32_t bytes, std::uint32_t selector) {
    return __byte_perm(bytes, 0x43434343u, selector);
  }
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t difference(std::uint32_t pair, std::uint32_t less) {
    asm("sub.rn.bf16x2 %0, %0, %1;\n" : "+r"(pair) : "r"(less));
    return pair;
  }
};

/// Calls body(widen) with a function from 16 bytes of codes to 16 elements of T.
template <class T, class Body>
__device__ __forceinline__ void visit_code_vectors(dtype type, const Body& body) {
  visit_code_pairs(type, [&](auto as_half) {
    using pairs = std::conditional_t<std::is_same_v<T, __half>, decltype(as_half), bf16_pairs<decltype(as_half)>>;
    body([](const uint4& codes, uint4(&elements)[2]) {
      const half_pairs x = pairs::neighbours(codes.x);
      const half_pairs y = pairs::neighbours(codes.y);
      const half_pairs z = pairs::neighbours(codes.z);
      const half_pairs w = pairs::neighbours(codes.w);
      elements[0] = make_uint4(x.first, x.second, y.first, y.second);
      elements[1] = make_uint4(z.first, z.second, w.first, w.second);
    });
  });
}

}  // namespace bifolio::inline v0_2::cuda::device

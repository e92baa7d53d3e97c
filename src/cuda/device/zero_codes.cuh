// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Codes of u8 less a number of their token, as float16. value = code · scale + zero is the same as (code − origin) ·
/// scale + shift, where the origin is the code nearest to the value 0 and the shift what that code stands for. Then
/// neither part is much larger than the value: |code − origin| · scale ≤ 2 · |value|, and |shift| ≤ |value|. What is
/// rounded relative to a part is rounded relative to the value, wherever zero lies.

#include <cstdint>

#include "common/base/kv_code.hpp"

namespace bifolio::inline v0_2::cuda::device {

/// Of a token and head.
struct code_origin {
  float shift = 0;
  std::uint32_t pair = 0x64006400;  ///< 1024 + origin, twice, in float16

  code_origin() = default;
  __device__ __forceinline__ explicit code_origin(const bifolio::detail::scale_pair& scales) {
    // NaN becomes 0. A scale of 0 stands for the zero alone, whatever the code.
    const float origin = fminf(fmaxf(rintf(__fdividef(-scales.zero, scales.scale)), 0.0f), 255.0f);
    shift = __fadd_rn(__fmul_rn(origin, scales.scale), scales.zero);  // the bits of the code's value
    const auto bits = static_cast<std::uint32_t>(origin);
    pair += bits | bits << 16;
  }
};

/// 16 codes, in their order, less the origin of `pair`. Exact: 1024 + code and 1024 + origin are float16.
__device__ __forceinline__ void widen_from_origin(const uint4& codes, std::uint32_t pair, uint4 (&elements)[2]) {
  const auto less = [pair](std::uint32_t from, std::uint32_t selector) {
    std::uint32_t value = __byte_perm(from, 0x64646464u, selector);
    asm("sub.rn.f16x2 %0, %0, %1;\n" : "+r"(value) : "r"(pair));
    return value;
  };
  constexpr std::uint32_t low = 0x4140;
  constexpr std::uint32_t high = 0x4342;
  elements[0] = make_uint4(less(codes.x, low), less(codes.x, high), less(codes.y, low), less(codes.y, high));
  elements[1] = make_uint4(less(codes.z, low), less(codes.z, high), less(codes.w, low), less(codes.w, high));
}

/// The sum of two elements of float16.
[[nodiscard]] __device__ __forceinline__ float sum_of_halves(std::uint32_t pair) {
  float low, high;
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}\n"
      : "=f"(low), "=f"(high)
      : "r"(pair));
  return low + high;
}

}  // namespace bifolio::inline v0_2::cuda::device

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// 16 codes of a record (kv_record) as 16 elements of bfloat16, scaled, in their order. A code times a power of two is
/// exact; times any other scale it is rounded once. By way of float16 and float32: bits moved to their places take more
/// instructions, and NaN and subnormal codes a branch.

#include <cstdint>

#include "cuda/device/code_pairs.cuh"
#include "cuda/device/float16_types.cuh"

namespace bifolio::inline v0_2::cuda::device {

__device__ __forceinline__ void scale_record_codes(const uint4& codes, float scale, uint4 (&elements)[2]) {
  const auto scaled = [&](std::uint32_t halves) {
    const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    return pack<__nv_bfloat16>(__fmul_rn(values.x, scale), __fmul_rn(values.y, scale));
  };
  const half_pairs x = e4m3_pairs::neighbours(codes.x);
  const half_pairs y = e4m3_pairs::neighbours(codes.y);
  const half_pairs z = e4m3_pairs::neighbours(codes.z);
  const half_pairs w = e4m3_pairs::neighbours(codes.w);
  elements[0] = make_uint4(scaled(x.first), scaled(x.second), scaled(y.first), scaled(y.second));
  elements[1] = make_uint4(scaled(z.first), scaled(z.second), scaled(w.first), scaled(w.second));
}

}  // namespace bifolio::inline v0_2::cuda::device

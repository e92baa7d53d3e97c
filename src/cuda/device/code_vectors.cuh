// SPDX-License-Identifier: Apache-2.0
#pragma once

/// 16 bytes of codes as 16 elements of float16, in their order.

#include <bifolio/dtype.hpp>
#include <cstdint>

#include "cuda/device/code_pairs.cuh"

namespace bifolio::inline v0_2::cuda::device {

/// Calls body(widen) with a function from 16 bytes of codes to 16 elements.
template <class Body>
__device__ __forceinline__ void visit_code_vectors(dtype type, const Body& body) {
  visit_code_pairs(type, [&](auto as_half) {
    using pairs = decltype(as_half);
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

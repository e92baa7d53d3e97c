// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Loops whose index is a constant in their body.

#include <type_traits>

namespace bifolio::inline v0_2::cuda::device {

/// Calls body(std::integral_constant<int, i>) for i in [Begin, End).
template <int Begin, int End, class Body>
__device__ __forceinline__ void for_each_step(const Body& body) {
  if constexpr (Begin < End) {
    body(std::integral_constant<int, Begin>{});
    for_each_step<Begin + 1, End>(body);
  }
}

}  // namespace bifolio::inline v0_2::cuda::device

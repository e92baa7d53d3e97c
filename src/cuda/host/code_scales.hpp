// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Where a plane's scales are, as kernels receive it.

#include <bifolio/kv_layout.hpp>
#include <cstdint>

namespace bifolio::inline v0_2::cuda {

struct code_scales {
  std::int32_t tail_floats = 0;  ///< per token and head, in the tails of blocks
  kv_tail_strides tail;
  const float* static_scales = nullptr;
  std::int32_t static_step = 0;  ///< from a head's static scale to the next one's

  [[nodiscard]] static code_scales of(const kv_plane& plane, const float* static_scales) noexcept {
    const bool is_static = plane.code.has_static_scales();
    return {plane.code.tail_floats(), plane.tail, is_static ? static_scales : nullptr,
            plane.code.granularity == scale_granularity::head ? 1 : 0};
  }
};

}  // namespace bifolio::inline v0_2::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Launchers of append and gather: rows of K and V to and from the slots of one layer. Arguments have been checked,
/// but for the slots, which only the device can see: a negative one is skipped, and so is one past the end.

#include <bifolio/dtype.hpp>
#include <bifolio/kv_layout.hpp>
#include <cstdint>

#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {

/// Rows of one plane, and the plane.
struct transfer_plane {
  void* row = nullptr;  ///< [num_tokens, num_kv_heads, head_dim], dims contiguous; only read by append
  std::int64_t row_token_stride = 0;
  std::int64_t row_head_stride = 0;
  void* cache = nullptr;  ///< [num_blocks, …] in the order of `strides`; only read by gather
  kv_strides strides{};
  std::int32_t head_dim = 0;
};

struct transfer_args {
  transfer_plane planes[2];  ///< K, V
  std::int32_t num_planes = 2;
  const std::int64_t* slot_mapping = nullptr;  ///< [num_tokens]
  std::int64_t num_slots = 0;                  ///< num_blocks · block_size
  std::int64_t num_tokens = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t block_size = 0;
  dtype row_type = dtype::f32;
  dtype cache_type = dtype::f32;
};

/// `dependent`: see `launch`; the kernels wait for the one before them themselves.
[[nodiscard]] cudaError_t launch_append(const runtime_api& api, const transfer_args& args, bool dependent,
                                        cudaStream_t stream) noexcept;
[[nodiscard]] cudaError_t launch_gather(const runtime_api& api, const transfer_args& args, bool dependent,
                                        cudaStream_t stream) noexcept;

}  // namespace bifolio::inline v0_2::cuda

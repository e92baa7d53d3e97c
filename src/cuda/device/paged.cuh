// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Offsets in a paged cache, in 64 bits at the multiplication.

#include <bifolio/kv_layout.hpp>
#include <cstdint>

namespace bifolio::inline v0_2::cuda {

/// Elements from a head's (block, token) to its dim `dim`.
__device__ __forceinline__ std::int64_t dim_offset(const kv_strides& strides, std::int32_t head_dim, std::int32_t dim) {
  if (strides.chunk >= head_dim) return dim * strides.dim;
  const std::int32_t chunk = dim / strides.chunk;
  return chunk * strides.chunk_stride + (dim - chunk * strides.chunk) * strides.dim;
}

/// Elements from the start of the plane to (block, head, token, dim 0).
__device__ __forceinline__ std::int64_t token_offset(const kv_strides& strides, std::int64_t block, std::int32_t head,
                                                     std::int32_t token) {
  return block * strides.block + head * strides.head + token * strides.token;
}

}  // namespace bifolio::inline v0_2::cuda

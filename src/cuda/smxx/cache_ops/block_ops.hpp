// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Launchers that move whole blocks. Lists of pairs and layers travel as kernel parameters: nothing is staged, nothing
/// has to be waited for, and a captured graph keeps its own copy. Arguments have been checked, and the pairs of one
/// call are independent of each other (block_moves.hpp).

#include <bifolio/kv_layout.hpp>
#include <bifolio/step.hpp>
#include <cstdint>
#include <span>

#include "cuda/block_moves.hpp"
#include "cuda/runtime.hpp"

namespace bifolio::cuda {

/// One layer's four halves.
struct layer_move {
  const void* src_k = nullptr;
  const void* src_v = nullptr;
  void* dst_k = nullptr;
  void* dst_v = nullptr;
};

/// Layers alike: how far apart their blocks lie, and that a block of a half is one run of bytes.
struct run_geometry {
  std::int64_t src_k_step = 0;  ///< bytes from a block to the next
  std::int64_t src_v_step = 0;
  std::int64_t dst_k_step = 0;
  std::int64_t dst_v_step = 0;
  std::int64_t run_bytes = 0;
};

/// Copies runs of bytes, all layers and K and V in one launch (several when there are more layers or pairs than one
/// launch carries). Pointers may be of the device or of pinned host memory.
[[nodiscard]] cudaError_t launch_copy_runs(const runtime_api& api, std::span<const layer_move> layers,
                                           const run_geometry& geometry, std::span<const block_copy> copies,
                                           cudaStream_t stream) noexcept;

/// Copies elements of one layer across layouts and dtypes.
[[nodiscard]] cudaError_t launch_convert_blocks(const runtime_api& api, const kv_cache_view& src,
                                                const kv_cache_view& dst, std::span<const block_copy> copies,
                                                cudaStream_t stream) noexcept;

}  // namespace bifolio::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Launchers that move whole blocks. Lists of pairs and layers travel as kernel parameters: nothing is staged, nothing
/// has to be waited for, and a captured graph keeps its own copy. Arguments have been checked, and the pairs of one
/// call are independent of each other (block_moves.hpp).

#include <bifolio/kv_layout.hpp>
#include <bifolio/step.hpp>
#include <cstdint>
#include <span>

#include "cuda/host/block_moves.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {

/// One layer's four planes; without V planes the pointers to them are not used.
struct layer_move {
  const void* src_k = nullptr;
  const void* src_v = nullptr;
  void* dst_k = nullptr;
  void* dst_v = nullptr;
};

/// Layers alike: how far apart their blocks are, and that a block of a plane is one run of bytes.
struct run_geometry {
  std::int64_t src_k_step = 0;  ///< bytes from a block to the next
  std::int64_t src_v_step = 0;
  std::int64_t dst_k_step = 0;
  std::int64_t dst_v_step = 0;
  std::int64_t k_bytes = 0;  ///< of a run
  std::int64_t v_bytes = 0;  ///< 0: there are no V planes
  friend constexpr bool operator==(const run_geometry&, const run_geometry&) = default;
};

/// How copies of runs are launched.
struct copy_launch {
  bool dependent = false;      ///< see `launch`; the kernels wait for the one before them themselves
  bool shares_device = false;  ///< bound by the bus: take as little of the device as fills it
};

/// Copies runs of bytes, all layers and K and V in one launch (several when there are more layers or pairs than one
/// launch carries, or when the runs of K and V differ in length). Pointers may be of the device or of pinned host
/// memory.
[[nodiscard]] cudaError_t launch_copy_runs(const runtime_api& api, std::span<const layer_move> layers,
                                           const run_geometry& geometry, std::span<const block_copy> copies,
                                           const copy_launch& how, cudaStream_t stream) noexcept;

/// Copies elements of one layer across layouts and dtypes; bits stay where the dtype does.
[[nodiscard]] cudaError_t launch_convert_blocks(const runtime_api& api, const kv_cache_view& src,
                                                const kv_cache_view& dst, std::span<const block_copy> copies,
                                                bool dependent, cudaStream_t stream) noexcept;

/// The same between an x_split cache and one whose dims are contiguous, where alignment allows accesses of 16 bytes on
/// both sides; false where not, and for any other pair of layouts.
[[nodiscard]] bool try_launch_convert_x_split(const runtime_api& api, const kv_cache_view& src,
                                              const kv_cache_view& dst, std::span<const block_copy> copies,
                                              bool dependent, cudaStream_t stream, cudaError_t& status) noexcept;

}  // namespace bifolio::inline v0_2::cuda

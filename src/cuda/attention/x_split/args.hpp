// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What planner, launcher and kernels of decode on x_split share.

#include <bifolio/dtype.hpp>
#include <cstdint>

#include "cuda/host/kernel_args.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {

/// Positions of one partition, counted from position 0 of the sequence.
inline constexpr std::int32_t x_split_positions = 512;
[[nodiscard]] constexpr std::int32_t x_split_partitions(std::int32_t seq_len) noexcept {
  return seq_len <= 0 ? 0 : (seq_len - 1) / x_split_positions + 1;
}

/// Query heads of one KV head that one CTA takes at most. A larger group takes several CTAs, each of which reads the
/// keys and values.
[[nodiscard]] constexpr std::int32_t x_split_max_heads(bool on_tensor_cores) noexcept {
  return on_tensor_cores ? 16 : 8;
}

/// CTAs that run at once on one SM. Each of 16 warps in all takes up to 128 registers per thread.
[[nodiscard]] constexpr std::int32_t x_split_ctas_per_sm(std::int32_t head_dim) noexcept {
  return head_dim < 128 ? 4 : 2;
}

struct x_split_args {
  attention_kernel_args call;
  std::int32_t max_partitions = 0;
  std::int32_t num_splits = 1;  ///< CTAs that share a sequence's partitions round-robin (v2); 1: v1
};

/// Partial result of (sequence · num_q_heads + head, partition): m, l, then head_dim values.
[[nodiscard]] constexpr float* x_split_partial(const x_split_args& args, std::int64_t row,
                                               std::int32_t partition) noexcept {
  return args.call.workspace + (row * args.max_partitions + partition) * (args.call.head_dim + 2);
}

/// CTAs of a KV head, per sequence and split.
[[nodiscard]] constexpr std::int32_t x_split_head_tiles(std::int32_t group_size, bool on_tensor_cores) noexcept {
  const std::int32_t heads = x_split_max_heads(on_tensor_cores);
  return (group_size + heads - 1) / heads;
}

/// The kernel for K and V of one type, one file each, and the one that combines partial results.
using x_split_launcher = cudaError_t(const runtime_api&, const x_split_args&, bool dependent, cudaStream_t) noexcept;
[[nodiscard]] x_split_launcher launch_x_split_f32, launch_x_split_f16, launch_x_split_bf16, launch_x_split_reduce;

}  // namespace bifolio::inline v0_2::cuda

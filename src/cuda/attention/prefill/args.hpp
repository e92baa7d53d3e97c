// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the launcher passes to the prefill kernels, next to the tensor maps.

#include "cuda/attention/prefill/plan.hpp"
#include "cuda/host/kernel_args.hpp"

namespace bifolio::cuda {

/// The call, with clamped windows, and the scheduler metadata. workspace: [max_partials, 128, head_dim] outputs, then
/// [max_partials, 128, 2] maxima (base 2) and sums. counters: [1], work tiles that were taken.
struct prefill_args : attention_kernel_args {
  prefill_metadata metadata;
  std::int32_t packed_heads = 1;
  std::int32_t tokens_per_half = 0;
  std::int32_t box_tokens = 0;  ///< min(block_size, 128); block_size is a multiple of it
  std::int32_t max_partials = 0;
};

}  // namespace bifolio::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the launcher passes to the decode kernels.

#include "cuda/attention/decode/plan.hpp"
#include "cuda/host/kernel_args.hpp"

namespace bifolio::cuda {

/// The call, with clamped windows, and the scheduler metadata. K and V have equal strides and contiguous dims.
/// workspace: [num_partials, 16, head_dim] outputs, then [.., 16, 2] maxima (base 2) and sums. counters:
/// [2, num_partials].
struct decode_args : attention_kernel_args {
  decode_metadata metadata;
};

}  // namespace bifolio::cuda

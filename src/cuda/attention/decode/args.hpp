// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the launcher passes to the decode kernels.

#include "cuda/attention/decode/metadata.hpp"
#include "cuda/host/divisor.hpp"
#include "cuda/host/kernel_args.hpp"

namespace bifolio::inline v0_2::cuda {

/// The call, with clamped windows, and the scheduler metadata. K and V have equal strides and contiguous dims.
/// workspace: [num_partials, 16, padded head_dim] outputs, then [.., 16, 2] maxima (base 2) and sums. counters:
/// [2, num_partials].
struct decode_args : attention_kernel_args {
  decode_metadata metadata;
  divisor by_block_size;
  divisor by_group_size;
  divisor by_row_vectors;    // of 16 bytes, in a row of V, and of K but where their elements differ in size
  float product_factor = 0;  // from a product to its base-2 logit or, with a soft cap, to the argument of tanh
  float cap_log2e = 0;       // from tanh to a base-2 logit
  divisor by_key_vectors;    // as by_row_vectors, of K
};

}  // namespace bifolio::inline v0_2::cuda

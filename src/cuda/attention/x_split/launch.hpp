// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Decode on the x_split layout, after the kernel that the papers and notes on paged attention describe (vLLM's
/// PagedAttention; Kwon et al. 2023, section 5.1), with CTAs per KV head instead of per query head: keys
/// and values are read once for up to 16 heads of a group (8 in float32 arithmetic).
/// docs/kernels/attention_cuda_x_split.md says how.
///
///   v1  one CTA walks the partitions of its sequence in order and writes the output
///   v2  several take the partitions round-robin, and a second kernel combines the partial results in order
///
/// `plan_x_split` chooses. Both combine the same partial results in the same order: the choice, which depends on the
/// batch, decides no bit.

#include <string>

#include "cuda/attention/x_split/plan.hpp"
#include "cuda/host/kernel_args.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {

/// Whether the cache of this call has the strides of `make_layout(x_split)` and the call no bias. `why`: null, or
/// receives what is not so. head_dim, block_size and dtypes are those of a step that the implementation accepts.
[[nodiscard]] bool x_split_accepts_call(const attention_kernel_args& args, std::string* why) noexcept;

/// Computes the rows of sequences with one new token, of a call that it serves.
[[nodiscard]] cudaError_t launch_x_split(const runtime_api& api, const attention_kernel_args& args,
                                         const x_split_plan& plan, const device_numbers& device,
                                         cudaStream_t stream) noexcept;

}  // namespace bifolio::inline v0_2::cuda

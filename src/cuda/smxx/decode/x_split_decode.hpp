// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Decode on the x_split layout, by the kernel that the papers and notes on paged attention describe (vLLM's
/// PagedAttention; Kwon et al. 2023, section 5.1): one thread block per (query head, sequence, partition of 512
/// positions); warps stride over blocks; a group of threads shares a token and takes its K in 16-byte vectors; logits
/// in shared memory as float32; then V in 16-byte vectors along the tokens.
///
///   v1  one thread block walks the partitions of its sequence in order and writes the output
///   v2  a thread block per partition, and a second kernel that folds the partial results in order
///
/// v1 is taken when no sequence has more than one partition, or sequences × query heads exceed 512. Both fold the same
/// partial results in the same order: the choice, which depends on the batch, decides no bit.

#include "cuda/attention_plan.hpp"
#include "cuda/kernel_args.hpp"

namespace bifolio::cuda {

/// Computes the rows of sequences with one new token. False when the call is not of this kernel: a bias, another
/// layout, a head_dim other than 64, 128 and 256, or a block_size that is no multiple of the tokens in 16 bytes.
[[nodiscard]] bool try_launch_x_split(const runtime_api& api, const attention_kernel_args& args,
                                      const x_split_plan& plan, cudaStream_t stream, cudaError_t& status) noexcept;

}  // namespace bifolio::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the launcher passes to the decode kernels.

#include <cstdint>

namespace bifolio::cuda {

/// Everything the kernel reads. K and V have equal strides and head_dim contiguous.
struct decode_args {
  const void* q;  // [num_tokens, num_q_heads, head_dim]
  void* out;      // like q
  float* lse;     // [num_tokens, num_q_heads] or null
  const void* k;  // [num_blocks, …] at the strides below
  const void* v;
  const std::int32_t* block_tables;  // [num_seqs, block_table_stride]
  const std::int32_t* metadata;      // of the scheduler: plan.hpp
  float* workspace;                  // [num_partials, 16, head_dim] outputs, then [.., 16, 2] maxima (base 2) and sums
  std::uint32_t* semaphores;         // [2, num_partials], zero between launches
  const float* alibi_slopes;         // [num_q_heads] or null
  const float* sinks;                // [num_q_heads] or null
  std::int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;  // elements
  std::int64_t block_stride, head_stride, token_stride;                           // elements
  std::int64_t block_table_stride;
  std::int64_t num_blocks;
  std::int32_t num_q_heads, num_kv_heads, group_size, block_size;
  std::int32_t window_left, window_right;  // < 0: none
  bool causal;
  float scale;
  float soft_cap;  // 0: none
};

}  // namespace bifolio::cuda

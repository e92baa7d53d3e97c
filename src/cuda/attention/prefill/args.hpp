// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the launcher passes to the prefill kernels, next to the tensor maps of q, K and V.

#include <cstdint>

namespace bifolio::cuda {

struct prefill_args {
  void* out;                                       // [num_tokens, num_q_heads, head_dim]
  float* lse;                                      // [num_tokens, num_q_heads] or null
  const std::int32_t* block_tables;                // [num_seqs, block_table_stride]
  const std::int32_t* metadata;                    // of the scheduler: a prefill_header and the work tiles
  const float* alibi_slopes;                       // [num_q_heads] or null
  const float* sinks;                              // [num_q_heads] or null
  std::int64_t out_token_stride, out_head_stride;  // elements
  std::int64_t block_table_stride;
  std::int32_t num_q_heads, group_size, packed_heads, block_size;
  std::int32_t box_tokens;  // min(block_size, 128); block_size is a multiple of it
  std::int32_t window_left, window_right;
  bool causal;
  float scale;
  float soft_cap;
};

}  // namespace bifolio::cuda

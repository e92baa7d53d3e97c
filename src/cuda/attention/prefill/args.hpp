// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the launcher passes to the prefill kernels, next to the tensor maps.

#include "cuda/attention/prefill/metadata.hpp"
#include "cuda/host/divisor.hpp"
#include "cuda/host/kernel_args.hpp"

namespace bifolio::inline v0_2::cuda {

/// How tiles of K and V come into shared memory: by TMA in boxes of `box_tokens` of one KV head, or, where no box fits,
/// by cp.async. Coordinates of a box are (0, 0, kv_head · head_chunks, kv_head · head_groups + group of 8 tokens in the
/// block, block).
struct kv_loading {
  bool by_copy = false;
  std::int32_t box_tokens = 0;   ///< divides block_size and the keys of a tile; a multiple of 8
  std::int32_t head_chunks = 0;  ///< from one KV head to the next, in chunks of 64 dims
  std::int32_t head_groups = 0;  ///< or in groups of 8 tokens
};

/// Where the tokens of planes of codes are: strides in units of 16 bytes, modulo 2^32, which planes do not exceed.
struct coded_tokens {
  std::uint32_t num_blocks = 0;
  std::uint32_t k_block = 0, v_block = 0;
  std::uint32_t head = 0, token = 0;  ///< of both planes; twice that where elements have 16 bits
  divisor by_block_size;
};

/// The call, with clamped windows, and the scheduler metadata. workspace: [max_partials, tile_rows, head_dim] outputs,
/// then [max_partials, tile_rows, 2] maxima (base 2) and sums. counters: [1], work tiles that were taken.
struct prefill_args : attention_kernel_args {
  prefill_metadata metadata;
  std::int32_t packed_heads = 1;
  std::int32_t tokens_per_warpgroup = 0;
  std::int32_t tile_rows = 0;  ///< 64 of each consumer warpgroup that rows are divided among
  std::int32_t max_partials = 0;
  kv_loading loading;
  coded_tokens codes;
};

}  // namespace bifolio::inline v0_2::cuda

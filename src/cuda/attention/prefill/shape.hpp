// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Tile sizes, pipeline depth and shared memory of one prefill kernel, for launcher and kernel alike.

#include "cuda/attention/prefill/plan.hpp"

namespace bifolio::cuda::prefill {

inline constexpr int num_consumers = 2;  // warpgroups of 64 query rows
inline constexpr int num_threads = 128 * (1 + num_consumers);

/// How the keys of a tile are arranged in shared memory. A box costs TMA about 120 cycles however small it is, so K and
/// V take one box per block where that is possible, all 64-element chunks of the head in it: [block][chunk][token][128
/// bytes]. V is read that way whatever the block size. K needs the rows of a chunk at one stride: `rows` loads it chunk
/// by chunk, [chunk][key][128 bytes]; `pairs`, for boxes of 16 tokens, takes whole boxes and computes two products of
/// 64 keys, the first 8 tokens of each block and the last 8.
enum class key_order { rows, pairs };

/// Bytes from the start of the CTA's shared memory, which is rounded up to 1024 for the swizzle.
struct shared_layout {
  int q, k, v;   // stages of tiles
  int barriers;  // full and empty for each stage of K, V and q
  int bytes;     // of everything, rounding included
};

template <int HeadDim>
struct shape {
  static constexpr int head_dim = HeadDim;
  static constexpr int stages = 2;  // of K and of V
  static constexpr int q_stages = 2;
  static constexpr int chunks = HeadDim / 64;     // of 128 bytes in a row
  static constexpr int q_chunk_bytes = 64 * 128;  // 64 rows of one warpgroup
  static constexpr int kv_chunk_bytes = prefill_tile_keys * 128;
  static constexpr int q_bytes = num_consumers * chunks * q_chunk_bytes;
  static constexpr int kv_bytes = chunks * kv_chunk_bytes;
  static constexpr int num_barriers = 2 * q_stages + 4 * stages;
  static constexpr int score_registers = prefill_tile_keys / 2;  // of a consumer thread
  static constexpr int out_registers = HeadDim / 2;

  [[nodiscard]] static constexpr shared_layout make_shared_layout() noexcept {
    shared_layout l = {};
    l.k = l.q + q_stages * q_bytes;
    l.v = l.k + stages * kv_bytes;
    l.barriers = l.v + stages * kv_bytes;
    l.bytes = 1024 + l.barriers + num_barriers * 8;
    return l;
  }
  static constexpr shared_layout shared = make_shared_layout();
};

}  // namespace bifolio::cuda::prefill

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Tile sizes and shared memory of one decode kernel, for launcher and kernel alike.

#include "cuda/attention/decode/plan.hpp"

namespace bifolio::cuda::decode {

/// Bytes from the start of the CTA's dynamic shared memory.
struct shared_layout {
  int stages;    // K and V tiles; the epilogue reduces over warps in a free one
  int queries;   // one buffer per stage
  int row_sums;  // maximum and sum per warp and row
  int flag;      // of the combine
  int bytes;     // of everything
};

template <int HeadDim, int Warps>
struct shape {
  static_assert(Warps == 4 || Warps == 8);
  static constexpr int head_dim = HeadDim;
  static constexpr int warps = Warps;
  static constexpr int threads = 32 * Warps;
  static constexpr int stages = HeadDim == 64 ? 6 : 3;
  static constexpr int ctas_per_sm = HeadDim == 256 ? 1 : 2;
  /// Two CTAs of 128 threads leave room for a small CTA of another stream's kernel, such as a swap.
  static constexpr int max_registers = Warps == 4 ? 224 : HeadDim == 256 ? 255 : 128;

  static constexpr int warp_keys = decode_tile_tokens / Warps;
  static constexpr int key_tiles = warp_keys / 8;  // of a warp's score products
  static constexpr int k_steps = HeadDim / 16;     // of a score product
  static constexpr int n_tiles = HeadDim / 8;      // of the output
  /// Where registers are short the queries stay in shared memory.
  static constexpr bool q_in_registers = HeadDim == 64 || (HeadDim == 128 && Warps == 4);

  static constexpr int row_vectors = HeadDim / 8;         // of 16 bytes
  static constexpr int rows_per_pass = 32 / row_vectors;  // that a warp loads at once
  static constexpr int passes = warp_keys / rows_per_pass;

  static constexpr int tile_bytes = decode_tile_tokens * HeadDim * 2;
  static constexpr int stage_bytes = 2 * tile_bytes;
  static constexpr int q_bytes = decode_tile_rows * HeadDim * 2;
  static_assert(stage_bytes == 4 * decode_tile_rows * HeadDim * 4, "a stage holds the outputs of four warps");

  [[nodiscard]] static constexpr shared_layout make_shared_layout() noexcept {
    shared_layout l = {};
    l.queries = l.stages + stages * stage_bytes;
    l.row_sums = l.queries + stages * q_bytes;
    l.flag = l.row_sums + warps * decode_tile_rows * 8;
    l.bytes = l.flag + 16;
    return l;
  }
  static constexpr shared_layout shared = make_shared_layout();
};

}  // namespace bifolio::cuda::decode

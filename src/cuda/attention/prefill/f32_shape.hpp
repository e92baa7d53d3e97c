// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Tile sizes, pipeline depth and shared memory of float32's prefill kernels, for launcher and kernel alike.

#include <algorithm>

#include "cuda/attention/prefill/metadata.hpp"

namespace bifolio::inline v0_2::cuda::prefill {

/// The products are three of TensorFloat-32 each. The producer splits each element of K and V into a larger and a
/// smaller part once. A stage of the ring holds one tile of K or V, first all larger parts, then all smaller ones, in
/// rows of 128 bytes in the 128-byte swizzle: of K, [chunk of 32 dims][key][dim of the chunk]; of V, transposed because
/// `wgmma` does not transpose this type, [dim][key]. The keys of each 8 of V are in the order 0, 2, 4, 6, 1, 3, 5, 7,
/// in which a thread of the consumers has its probabilities. Queries lie in shared memory as the thread that uses them
/// takes them, and are split on their way to its registers.
/// `HasTree`: in deterministic plans, keys are taken from the first to the last.
template <int TileDims, bool HasTree = false>
struct f32_shape {
  static constexpr bool has_tree = HasTree;
  static constexpr bool has_parts = false;
  static constexpr bool is_coded = false;
  static constexpr int tile_dims = TileDims;
  static constexpr int min_dims = TileDims > 64 ? 64 : 0;  // every head_dim has these
  static constexpr prefill_tiling tiling = prefill_tiling_of(dtype::f32, TileDims, false);
  static constexpr int tile_keys = tiling.keys;
  static_assert(tile_keys == 32, "a row of V transposed is one row of the swizzle");
  static constexpr int num_consumers = tiling.num_consumers;  // warpgroups of 64 query rows
  static constexpr int num_threads = 128 * (1 + num_consumers);
  static constexpr int start_registers = 65536 / num_threads / 8 * 8;
  static constexpr int producer_registers = 120;
  static constexpr int consumer_registers = 192;
  static_assert(producer_registers + num_consumers * consumer_registers <= (1 + num_consumers) * start_registers);
  static constexpr int score_registers = tile_keys / 2;  // of a consumer thread
  static constexpr int out_registers = TileDims / 2;
  static constexpr int chunks = TileDims / 32;             // of K
  static constexpr int chunk_bytes = tile_keys * 128;      // of one part
  static constexpr int part_bytes = chunks * chunk_bytes;  // the larger or the smaller ones of a tile
  static constexpr int stage_bytes = 2 * part_bytes;
  static constexpr int query_bytes = num_consumers * prefill_warpgroup_rows * TileDims * 4;
  static constexpr int raw_bytes = 2 * tile_keys * TileDims * 4;  // K and V of a tile, before they are split
  static constexpr int stages = std::min(8, (226 * 1024 - query_bytes - raw_bytes) / stage_bytes);
  static constexpr int queries = stages * stage_bytes;                // where they begin
  static constexpr int raw = queries + query_bytes;                   // likewise
  static constexpr int sums = raw + raw_bytes;                        // maximum and sum of each row, from one warpgroup
  static constexpr int barriers = sums + prefill_warpgroup_rows * 8;  // full and empty for each stage
  static constexpr int shared_bytes = barriers + 2 * stages * 8 + 1023;  // stages begin at multiples of 1024
  static_assert(shared_bytes <= 227 * 1024 - 256);
};

}  // namespace bifolio::inline v0_2::cuda::prefill

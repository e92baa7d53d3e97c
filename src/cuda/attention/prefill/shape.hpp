// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Tile sizes, pipeline depth and shared memory of one prefill kernel, for launcher and kernel alike.

#include "cuda/attention/prefill/metadata.hpp"

namespace bifolio::inline v0_2::cuda::prefill {

/// Bytes from the start of the CTA's shared memory, which is rounded up to 1024 for the swizzle.
struct shared_layout {
  int q, k, v;   // stages of tiles
  int nodes;     // outputs of each consumer thread, as far as they fit; with a tree only
  int raw;       // codes of a tile of K and one of V as they are stored, as far as they fit
  int scales;    // of the tokens of tiles; with those only
  int kept;      // of a work tile by producer warps, with codes of more dims; what they look up, beside 16 bits
  int barriers;  // full and empty for each stage of K, V and q
  int bytes;     // of everything, rounding included
};

/// `TileDims`: head_dim rounded up to a compiled width; what is past head_dim is zero in shared memory. A tile of K or
/// V is [group of 8 tokens][chunk of 64 dims][token of the group][128 bytes], whatever the block size: rows of K are
/// then at one stride, so are rows of V, and a block of one KV head is one box of a tensor map.
template <int TileDims, prefill_kind Kind = prefill_kind::plain>
struct shape {
  static constexpr bool has_tree = Kind == prefill_kind::tree;
  static constexpr bool has_parts = Kind == prefill_kind::parts;
  static constexpr bool has_zeros = Kind == prefill_kind::coded_by_zero;
  static constexpr bool by_token = Kind == prefill_kind::coded_by_token || has_zeros;
  static constexpr bool is_coded = Kind == prefill_kind::coded || by_token;
  static constexpr int tile_dims = TileDims;
  /// Whether shared memory has room for all codes of a tile of K and one of V beside the elements. Of more dims
  /// producers hold the rest in registers.
  static constexpr bool has_raw_codes = is_coded && TileDims <= 128;
  static constexpr prefill_tiling tiling = prefill_tiling_of(dtype::bf16, TileDims, has_tree, is_coded);
  static constexpr int tile_keys = tiling.keys;
  static constexpr int num_consumers = tiling.num_consumers;  // that rows are divided among, 64 each
  static constexpr int dim_parts = tiling.dim_parts;          // warpgroups that share the dims of the output
  static constexpr int num_warpgroups = tiling.num_warpgroups();
  /// Codes have a producer for K and one for V where registers leave room: one for both is slower than the products.
  static constexpr int num_producers = is_coded && num_warpgroups == 2 ? 2 : 1;
  static constexpr int num_threads = 128 * (num_producers + num_warpgroups);
  static constexpr int tile_rows = tiling.rows();
  /// Registers of a thread: at the start as many as fit when all threads have the same, a multiple of 8. Consumers get
  /// more from what the producer gives back; if they asked for more than that they would wait for ever.
  static constexpr int start_registers = 65536 / num_threads / 8 * 8;
  /// Producers of codes hold pieces of them in registers. Three consumers have none to give: with 152 their products
  /// are serialized.
  static constexpr int producer_registers = num_producers == 2 ? 48 : num_warpgroups == 3 ? 32 : 40;
  static constexpr int consumer_registers = num_producers == 2 ? 208 : num_warpgroups == 3 ? 160 : 232;
  static_assert(num_producers * producer_registers + num_warpgroups * consumer_registers <=
                (num_producers + num_warpgroups) * start_registers);
  static constexpr int stages = 2;  // of K and of V
  // Shared memory does not hold a second one and scales besides.
  static constexpr int q_stages = TileDims <= (by_token ? 64 : 128) && !has_tree ? 2 : 1;
  static constexpr int chunks = (TileDims + 63) / 64;  // of 128 bytes in a row
  static constexpr int q_chunk_bytes = 64 * 128;       // 64 rows of one warpgroup
  static constexpr int group_bytes = chunks * 1024;    // 8 tokens of K or V
  static constexpr int q_bytes = num_consumers * chunks * q_chunk_bytes;
  static constexpr int kv_bytes = tile_keys / 8 * group_bytes;
  static constexpr int plane_pieces = tile_keys / 32 * chunks;  // of 16 bytes of codes, of a producer thread
  /// Whether K or V may have 16 bits beside codes: shared memory holds a tile of them, twice a plane of codes, as well.
  static constexpr bool takes_wide = by_token && prefill_takes_wide_planes(TileDims);
  /// Scales of a tile: of K, of V, and the largest magnitude of V's finite ones of each producer warp. A consumer uses
  /// them after it has released the stage of K, and is done with them before it releases the next one. So where a
  /// stage of K is free, those of the tile before the one that was in it are: three places would do.
  static constexpr int scale_places = 4;
  static constexpr int scale_bytes = has_zeros ? 8 : 4;  // of a token: its scale and the shift of its origin
  static constexpr int largest_scales = 2 * tile_keys * scale_bytes;
  static constexpr int origins = largest_scales + 16;  // of K, of V; used by the producers alone
  static constexpr int scales_bytes = origins + (has_zeros ? 2 * tile_keys * 4 : 0);
  static constexpr int kept_bytes = 32;   // of a warp
  static constexpr int copied_bytes = 8;  // of a thread
  /// plane_producer.cuh. Zero points leave it no registers: with it u8 per token took 1.14 times as long.
  static constexpr bool has_plane_producers = has_raw_codes && num_producers == 2 && !has_zeros;
  /// Scales of V that its own producer finds may come later than K.
  static constexpr bool has_late_scales = takes_wide && has_plane_producers;
  static constexpr int num_barriers = 2 * q_stages + 4 * stages + (has_late_scales ? stages : 0);
  static constexpr int kept_size = is_coded && !has_raw_codes ? num_producers * 4 * kept_bytes
                                   : has_late_scales          ? num_producers * 128 * copied_bytes
                                                              : 0;
  /// Pieces of codes that wait in shared memory: of more than 128 dims as many as there is room for, of K as of V.
  static constexpr int room_for_codes = 226 * 1024 - 256 - q_stages * q_bytes - 2 * stages * kv_bytes -
                                        (by_token ? scale_places * scales_bytes : 0) - kept_size - num_barriers * 8;
  static constexpr int fitting_pieces = room_for_codes / (2 * 128 * 16);
  static constexpr int staged_pieces = has_raw_codes || plane_pieces < fitting_pieces ? plane_pieces : fitting_pieces;
  static constexpr int raw_bytes = is_coded ? staged_pieces * 128 * 16 : 0;  // of a plane
  static constexpr int score_registers = tile_keys / 2;                      // of a consumer thread
  static constexpr int part_dims = TileDims / dim_parts;                     // of the output of one warpgroup
  static constexpr int out_registers = part_dims / 2;
  /// Instructions for 16 keys of P · V: ptxas gives one of 256 dims no fewer registers than 158, and CTAs of 512
  /// threads begin with 128.
  static constexpr int value_products = num_threads > 384 && part_dims > 192 ? 2 : 1;
  static constexpr int out_vectors = out_registers / 4;

  /// Of a thread's node, vectors of 4 outputs that are in shared memory; the others are in the workspace.
  static constexpr int node_vector_bytes = num_warpgroups * 128 * 16;
  static constexpr int room_for_nodes = 225 * 1024 - q_stages * q_bytes - 2 * stages * kv_bytes - num_barriers * 8;
  static constexpr int fitting_vectors = room_for_nodes < 0 ? 0 : room_for_nodes / node_vector_bytes;
  static constexpr int node_vectors = !has_tree ? 0 : fitting_vectors < out_vectors ? fitting_vectors : out_vectors;
  static_assert(!has_tree || node_vectors == out_vectors || prefill_tree_outputs(dtype::bf16, TileDims) == 2);

  [[nodiscard]] static constexpr shared_layout make_shared_layout() noexcept {
    shared_layout l = {};
    l.k = l.q + q_stages * q_bytes;
    l.v = l.k + stages * kv_bytes;
    l.nodes = l.v + stages * kv_bytes;
    l.raw = l.nodes + node_vectors * node_vector_bytes;
    l.scales = l.raw + (is_coded ? (takes_wide ? 3 : 2) * raw_bytes : 0);
    l.kept = l.scales + (by_token ? scale_places * scales_bytes : 0);
    l.barriers = l.kept + kept_size;
    l.bytes = 1024 + l.barriers + num_barriers * 8;
    return l;
  }
  static constexpr shared_layout shared = make_shared_layout();
  static_assert(shared.bytes <= 227 * 1024 - 256);  // the slots of work tiles are beside it

  /// Of a consumer warpgroup: the number among those that rows are divided among, and the first dim of its output.
  [[nodiscard]] BIFOLIO_HOST_DEVICE static constexpr int row_part(int warpgroup) noexcept {
    return dim_parts == 1 ? warpgroup : warpgroup / dim_parts;
  }
  [[nodiscard]] BIFOLIO_HOST_DEVICE static constexpr int first_dim(int warpgroup) noexcept {
    return dim_parts == 1 ? 0 : warpgroup % dim_parts * part_dims;
  }
};

/// The part of the output that one warpgroup has, as the epilogue takes it.
template <class Shape>
struct output_part {
  static constexpr bool is_coded = Shape::is_coded;
  static constexpr int tile_dims = Shape::part_dims;
  static constexpr int out_registers = Shape::out_registers;
};

}  // namespace bifolio::inline v0_2::cuda::prefill

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Tile sizes and shared memory of the latent kernels, for launcher and kernels alike.

#include <bifolio/kv_layout.hpp>

#include "cuda/attention/latent/metadata.hpp"

namespace bifolio::inline v0_2::cuda::latent {

/// Bytes from the start of the CTA's shared memory, which is rounded up to 1024 for the swizzle.
struct shared_layout {
  int q, kv;
  int powers;         // of rows of q, over records with few rows
  int probabilities;  // of a tile: as registers hold them; with few rows as an operand, of each warpgroup
  int maxima;         // of rows, with them
  int sums;           // of rows, from each warpgroup; with many rows of two work tiles
  int scales;         // over records with few rows: largest ones of V, from each warp
  int outputs;        // with few rows: of the whole row tile, some of the dims at a time
  int barriers;       // full and empty for each stage and for q
  int bytes;          // of everything, rounding included
};

/// What all kernels have. A tile of K is [group of 8 tokens][chunk of 64 dims][token of the group][128 bytes], as in
/// prefill, but of records with few rows; its first chunks are V.
template <int Rows>
struct tiles {
  static constexpr int rows = Rows;
  static constexpr int tile_dims = latent_qk_dims;
  static constexpr int tile_keys = latent_tile_keys;
  static constexpr int num_consumers = 1;   // that rows are divided among
  static constexpr int num_warpgroups = 2;  // of consumers
  static constexpr int num_threads = 128 * (1 + num_warpgroups);
  static constexpr int producer_registers = 40;
  static constexpr int consumer_registers = 232;
  static constexpr int stages = num_warpgroups;  // a stage's scores are those of one warpgroup
  static constexpr int chunks = tile_dims / 64;
  static constexpr int value_chunks = latent_v_dims / 64;
  static constexpr int q_chunk_bytes = rows * 128;
  static constexpr int group_bytes = chunks * 1024;  // 8 tokens
  static constexpr int q_bytes = chunks * q_chunk_bytes;
  static constexpr int kv_bytes = tile_keys / 8 * group_bytes;
  static constexpr int key_steps = tile_keys / 16;
};

/// Both warpgroups have all rows, and each half the dims of V.
struct many_rows : tiles<latent_tile_rows> {
  static constexpr bool is_transposed = false;
  static constexpr int stage_readers = num_warpgroups;               // arrivals that empty a stage
  static constexpr int part_chunks = value_chunks / num_warpgroups;  // of one warpgroup
  static constexpr int part_dims = 64 * part_chunks;
  static constexpr int score_registers = tile_keys / 2;  // of a consumer thread
  static constexpr int out_registers = part_dims / 2;
};

/// Each warpgroup has tiles of its own, whose products it computes transposed: keys and dims of V are the 64 rows of
/// the tensor cores, queries the columns.
struct column_rows : tiles<latent_few_rows> {
  static constexpr bool is_transposed = true;
  static constexpr int score_registers = rows / 2;
  static constexpr int columns = rows / 4;          // of a thread
  static constexpr int operand_bytes = rows * 128;  // probabilities of a tile
  static constexpr int output_passes = 2;           // in which the outputs of both are added
  static constexpr int pass_chunks = value_chunks / output_passes;
  static constexpr int pass_dims = 64 * pass_chunks;
  static constexpr int output_stride = pass_dims + 4;  // floats; keeps a warp's accesses apart
};

struct few_rows : column_rows {
  static constexpr bool has_records = false;
  static constexpr int stage_readers = 1;
  static constexpr int probability_bytes = operand_bytes;  // of one warpgroup
  /// Dim of an output register, from the first of its chunk of 64 and of the thread's warp.
  [[nodiscard]] static constexpr int output_dim(int quad, int j) { return quad + (j & 2) * 4; }
};

/// The same over records, which stay in shared memory as they are in the cache: consumers widen what they read.
/// Probabilities are stored times each of V's scales.
struct few_records : column_rows {
  static constexpr bool has_records = true;
  static constexpr int scales = kv_record::v_head_dim / kv_record::dims_per_scale;
  static constexpr int stages = 4;
  static constexpr int stage_readers = 4;  // the warps of one warpgroup
  static constexpr int kv_bytes = tile_keys * static_cast<int>(kv_record::bytes);
  static constexpr int probability_bytes = scales * operand_bytes;
  static constexpr int producer_registers = 72;
  static constexpr int consumer_registers = 216;
  [[nodiscard]] static constexpr int output_dim(int quad, int j) { return 2 * quad + (j & 2) / 2; }
};

/// More rows over records, whose rows arrive in the stage that they get, when it is free; a warpgroup of producers
/// widens them there.
struct many_record_rows {
  static constexpr int producer_registers = 88;
  static constexpr int consumer_registers = 208;
};

template <class Shape>
inline constexpr int barriers_bytes = 2 * (Shape::stages + 1) * 8;
template <class Shape>
inline constexpr shared_layout shared_parts = [] {
  using S = Shape;
  shared_layout l = {};
  l.kv = l.q + S::q_bytes;
  l.probabilities = l.kv + S::stages * S::kv_bytes;
  if constexpr (S::is_transposed) {
    l.maxima = l.probabilities + S::num_warpgroups * S::probability_bytes;
    l.sums = l.maxima + S::num_warpgroups * 4 * S::rows * 4;  // from each warp
    l.outputs = l.sums + S::num_warpgroups * S::rows * 8;
    l.barriers = l.outputs + S::rows * S::output_stride * 4;
    if constexpr (S::has_records) {
      l.powers = l.barriers;
      l.scales = l.powers + S::rows * 4;
      l.barriers = l.scales + S::num_warpgroups * 4 * S::scales * 4;
    }
  } else {
    l.maxima = l.probabilities + S::rows * S::tile_keys * 2;
    l.sums = l.maxima + S::rows * 4;
    l.barriers = l.sums + 2 * S::num_warpgroups * S::rows * 4;
  }
  l.bytes = 1024 + l.barriers + barriers_bytes<S>;
  return l;
}();

/// What the kernel for many rows of records has after that, in bytes from the same start: for each 8 rows of the stages
/// a barrier.
struct record_layout {
  int arrived;
  int bytes;  // of everything, rounding included
};
inline constexpr record_layout record_parts = [] {
  using S = many_rows;
  static_assert(8 * kv_record::bytes <= S::group_bytes);
  record_layout l = {};
  l.arrived = shared_parts<S>.barriers + barriers_bytes<S>;
  l.bytes = 1024 + l.arrived + S::stages * S::tile_keys / 8 * 8;
  return l;
}();

// Beside them is the queue of work tiles.
inline constexpr int max_shared_bytes = 227 * 1024 - 256;
static_assert(shared_parts<many_rows>.bytes <= max_shared_bytes);
static_assert(shared_parts<few_rows>.bytes <= max_shared_bytes);
static_assert(shared_parts<few_records>.bytes <= max_shared_bytes);
static_assert(record_parts.bytes <= max_shared_bytes);

/// The part of the output that one warpgroup has, as prefill's epilogue takes it.
struct value_part {
  static constexpr bool is_coded = false;
  static constexpr int tile_dims = many_rows::part_dims;
  static constexpr int out_registers = many_rows::out_registers;
};

}  // namespace bifolio::inline v0_2::cuda::latent

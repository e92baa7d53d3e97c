// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producer warpgroup of prefill for caches of codes. Each thread requests pieces of 16 bytes by cp.async into
/// places of its own, and stores what has come as 16 elements of float16, in which every code is exact, whatever the
/// type of the queries. It takes several pieces at a time, so that one piece's instructions run while others wait. When
/// a plane of a tile is stored, that of the next tile is requested into the same places. No warp waits for another of
/// the four. Scales are the consumers'; those of tokens are put next to the tile of K. What is outside the sequence,
/// the window or head_dim becomes zero. Queries come by TMA as everywhere.
///
/// What the producer keeps from tile to tile is counters, from which stages and phases follow, and offsets in units of
/// 16 bytes.

#include <cstdint>

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/launch.hpp"
#include "cuda/attention/prefill/pipeline.cuh"
#include "cuda/attention/prefill/producer.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/prefill/shape.hpp"
#include "cuda/device/code_vectors.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// That fill a stage: one from each warp.
inline constexpr int coded_producer_arrivals = 4;

/// Lanes 4j … 4j + 3 take the 64 bytes of one token and chunk of 64 dims; in each pass the warpgroup takes 32 tokens, 8
/// a warp.
template <class Shape>
class coded_producer {
  using S = Shape;
  static constexpr int passes = S::tile_keys / 32;
  static_assert(passes * 8 == 32, "a lane for each token of a warp");
  static constexpr int batch_passes = 2;
  static constexpr int batch_pieces = batch_passes * S::chunks;  // of 16 bytes, that a thread has in registers
  static constexpr int piece_bytes = 128 * 16;                   // of the warpgroup
  static constexpr int pass_bytes = 4 * S::group_bytes;          // of a stage
  static_assert(passes * S::chunks * piece_bytes == S::raw_bytes);

 public:
  __device__ __forceinline__ coded_producer(const prefill_args& args, const shared_stages<Shape>& stages,
                                            const tensor_map* q_map)
      : a_(args),
        stages_(stages),
        q_map_(q_map),
        warp_(uniform(static_cast<int>(threadIdx.x) / 32)),
        lane_(static_cast<int>(threadIdx.x) & 31) {}

  /// Fills the stages for all work tiles of the CTA.
  template <class Source>
  __device__ __forceinline__ void run(Source source) {
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      const tokens_of_work tokens{a_.block_tables + work.seq * a_.block_table_stride,
                                  work.head / a_.group_size * a_.k_strides.head,
                                  work.head / a_.group_size,
                                  work.seq_len,
                                  e.begin,
                                  e.tile_end - 1};
      table_entry entry = look_up(tokens, 0);
      const int num_tiles = e.tile_end - e.tile_begin;
      requested_tokens requested;
      requested.of_k = find_token(tokens, entry);
      [[maybe_unused]] token_scales scales;
      if constexpr (S::by_token) scales = load_scales(tokens, entry, requested.of_k != outside);
      entry = look_up(tokens, 1);
      for (const bool is_k : {true, false}) request(is_k, requested.of_k);
      if (threadIdx.x == 0) load_queries(a_, stages_, q_map_, q_state_, work);
      __syncwarp();
      q_state_.advance();

      // Planes of tiles as they are used: K of the last tile, K of the one before, V of the last, and so on.
      const int num_planes = 2 * num_tiles;
      for (int n = 0; n < num_planes; ++n) {
        const bool is_k = n == 0 || (n % 2 == 1 && n != num_planes - 1);
        [[maybe_unused]] token_scales next_scales;
        const int tile = is_k ? (n + 1) / 2 : n == num_planes - 1 ? n / 2 : n / 2 - 1;
        if (is_k) {
          requested.of_v = requested.of_k;
          requested.of_k = find_token(tokens, entry);
          if constexpr (S::by_token) next_scales = load_scales(tokens, entry, requested.of_k != outside);
          entry = look_up(tokens, tile + 2);
        }
        // One plane was requested after this one, but none after the second of K and the last two of V.
        if (n == 1 || n >= num_planes - 2) {
          device::cp_async_wait_group<0>();
        } else {
          device::cp_async_wait_group<1>();
        }
        acquire(is_k, tiles_ + tile);
        if constexpr (S::by_token) {
          if (is_k) {
            store_scales(scales, tiles_ + tile);
            scales = next_scales;
          }
        }
        fill(is_k, tiles_ + tile);
        if (tile + 1 < num_tiles) request(is_k, is_k ? requested.of_k : requested.of_v);
      }
      tiles_ += num_tiles;
    }
  }

 private:
  static constexpr std::uint32_t outside = 0xffffffffu;

  struct tokens_of_work {
    const std::int32_t* table;
    std::int64_t head_offset;
    int head;
    int seq_len;
    int begin;
    int last_tile;
  };
  // Of the token that a lane looks up.
  struct table_entry {
    int block;  // negative: the token is outside
    int slot;   // of the block
  };
  // Of the lane, for the planes that are requested next: from the beginning of the plane, in units of 16 bytes.
  struct requested_tokens {
    std::uint32_t of_k;
    std::uint32_t of_v;
  };

  // The token that the lane looks up for its warp: of pass lane / 8 that of lanes 4 · (lane % 8) and the next three.
  [[nodiscard]] __device__ __forceinline__ int token_in_tile() const { return lane_ / 8 * 32 + warp_ * 8 + lane_ % 8; }

  // Of the tile so many before the last. Nothing here waits for the entry.
  [[nodiscard]] __device__ __forceinline__ table_entry look_up(const tokens_of_work& tokens, int tile) const {
    const int key = (tokens.last_tile - tile) * S::tile_keys + token_in_tile();
    table_entry entry = {-1, 0};
    if (key >= tokens.seq_len || key < tokens.begin) return entry;
    const int block = key / a_.block_size;
    entry.block = __ldg(tokens.table + block);
    entry.slot = key - block * a_.block_size;
    return entry;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t find_token(const tokens_of_work& tokens,
                                                                    const table_entry& entry) const {
    if (entry.block < 0 || entry.block >= a_.num_blocks) return outside;  // tables of a call are not checked
    return static_cast<std::uint32_t>(
        (entry.block * a_.k_strides.block + tokens.head_offset + entry.slot * a_.k_strides.token) / 16);
  }

  // Of the lane's token; 0: it is outside, or the plane has none.
  struct token_scales {
    float k = 0;
    float v = 0;
  };
  [[nodiscard]] __device__ __forceinline__ static float load_scale(const void* plane, const code_scales& scales,
                                                                   std::int64_t block_stride,
                                                                   const tokens_of_work& tokens,
                                                                   const table_entry& entry) {
    const std::int64_t at = entry.block * block_stride + scales.tail.offset + tokens.head * scales.tail.head +
                            entry.slot * scales.tail.token;
    return __ldg(reinterpret_cast<const float*>(static_cast<const char*>(plane) + at));
  }
  // Nothing here waits for the scales.
  [[nodiscard]] __device__ __forceinline__ token_scales load_scales(const tokens_of_work& tokens,
                                                                    const table_entry& entry, bool is_there) const {
    token_scales scales;
    if (!is_there) return scales;
    if (a_.k_scales.tail_floats > 0) scales.k = load_scale(a_.k, a_.k_scales, a_.k_strides.block, tokens, entry);
    if (a_.v_scales.tail_floats > 0) scales.v = load_scale(a_.v, a_.v_scales, a_.k_strides.block, tokens, entry);
    return scales;
  }
  // Before the warp's arrival at the tile of K.
  __device__ __forceinline__ void store_scales(const token_scales& scales, int count) const {
    const std::uint32_t place = stages_.scales(count);
    const std::uint32_t magnitude = __float_as_uint(scales.v) & 0x7fffffffu;
    const std::uint32_t largest = __reduce_max_sync(0xffffffffu, magnitude < 0x7f800000u ? magnitude : 0);
    device::store_shared_4(place + token_in_tile() * 4, __float_as_uint(scales.k));
    device::store_shared_4(place + (S::tile_keys + token_in_tile()) * 4, __float_as_uint(scales.v));
    if (lane_ == 0) device::store_shared_4(place + (2 * S::tile_keys + warp_) * 4, largest);
  }

  // Where the first of the thread's pieces of a plane arrives.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t raw_place(bool is_k) const {
    return stages_.raw() + (is_k ? 0 : S::raw_bytes) + threadIdx.x * 16;
  }

  // Requests a plane of the tile whose tokens the lanes have, as a group of copies.
  __device__ __forceinline__ void request(bool is_k, std::uint32_t tokens) const {
    const int first_dim = (lane_ & 3) * 16;
    const char* const plane = static_cast<const char*>(is_k ? a_.k : a_.v) + first_dim;
    const std::uint32_t place = raw_place(is_k);
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const std::uint32_t token = __shfl_sync(0xffffffffu, tokens, pass * 8 + lane_ / 4);
      const bool is_there = token != outside;
      const char* const row = plane + std::uint64_t{is_there ? token : 0} * 16;
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) {
        const bool is_inside = is_there && c * 64 + first_dim < a_.head_dim;
        device::cp_async_16(place + (pass * S::chunks + c) * piece_bytes, is_inside ? row + c * 64 : row, is_inside);
      }
    }
    device::cp_async_commit_group();
  }

  // Waits until the stage of K or V of tile `count` of the CTA is empty.
  __device__ __forceinline__ void acquire(bool is_k, int count) const {
    const int stage = count % S::stages;
    device::mbarrier_wait_parity(is_k ? stages_.k_empty(stage) : stages_.v_empty(stage), (count / S::stages & 1) ^ 1);
  }

  // Stores K or V, which has come.
  __device__ __forceinline__ void fill(bool is_k, int count) const {
    const int stage = count % S::stages;
    const int row = lane_ / 4;           // of its group of 8 tokens
    const int vector = (lane_ & 3) * 2;  // of 16 bytes in the 128 of a token and chunk
    const std::uint32_t to = (is_k ? stages_.k(stage) : stages_.v(stage)) +
                             static_cast<std::uint32_t>(warp_ * S::group_bytes + row * 128 + ((vector ^ row) << 4));
    const std::uint32_t from = raw_place(is_k);
    device::visit_code_vectors(is_k ? a_.k_type : a_.v_type, [&](const auto& widen) {
#pragma unroll 1
      for (int first = 0; first < passes; first += batch_passes) {
        uint4 codes[batch_pieces];
#pragma unroll
        for (int i = 0; i < batch_pieces; ++i) {
          codes[i] = device::load_shared_16(from + (first * S::chunks + i) * piece_bytes);
        }
        const std::uint32_t place = to + first * pass_bytes;
#pragma unroll
        for (int i = 0; i < batch_pieces; ++i) {
          const int offset = i / S::chunks * pass_bytes + i % S::chunks * 1024;
          uint4 elements[2];
          widen(codes[i], elements);
          device::store_shared_16(place + offset, elements[0]);
          device::store_shared_16((place ^ 16) + offset, elements[1]);
        }
      }
    });
    // Before the next request: a fence is a memory barrier as well, and may wait for copies that are on their way.
    device::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) device::mbarrier_arrive(is_k ? stages_.k_full(stage) : stages_.v_full(stage));
  }

  const prefill_args& a_;
  const shared_stages<Shape>& stages_;
  const tensor_map* q_map_;
  int warp_, lane_;
  pipeline_state<S::q_stages> q_state_;
  int tiles_ = 0;  // of the work tiles before
};

}  // namespace bifolio::inline v0_2::cuda::prefill

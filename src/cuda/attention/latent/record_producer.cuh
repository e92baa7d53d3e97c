// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producers of the latent kernels for records (kv_record): warpgroups that load rows of 656 bytes into registers,
/// scale their codes into bfloat16 and store them as tiles of K. Loads are a tile or a part of one ahead of the stores.
/// What is outside the sequence or the window becomes zero. Queries come by TMA as everywhere.

#include <bifolio/kv_layout.hpp>
#include <cstdint>

#include "cuda/attention/latent/pipeline.cuh"
#include "cuda/attention/latent/producer.cuh"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/record_vectors.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::latent {

/// A warp has 16 tokens of a tile, in parts of some. It takes two tokens at a time: of either four times 16 codes, in
/// chunks of 64 dims that are four lanes apart, so that the stores of eight lanes fall into all banks. Two parts are
/// held in registers: one is stored while the next is on its way. With two warpgroups of producers each fills the tiles
/// of one stage.
template <class R>
class record_producer {
  using S = typename R::tile_shape;
  static constexpr int tokens = S::tile_keys / 4;  // of a warp
  static constexpr int parts = tokens / R::part_tokens;
  static_assert(tokens == 16 && S::stages == 2 && parts % 2 == 0 && R::part_tokens % 4 == 0);

 public:
  static constexpr int arrivals = 128;  // that fill a stage

  __device__ __forceinline__ record_producer(const prefill_args& args, const shared_stages<S>& stages,
                                             const tensor_map* q_map, int producer)
      : a_(args),
        stages_(stages),
        q_map_(q_map),
        producer_(producer),
        warp_(static_cast<int>(threadIdx.x) / 32 & 3),
        lane_(static_cast<int>(threadIdx.x) & 31) {}

  /// Fills the stages for all work tiles of the CTA.
  template <class Source>
  __device__ __forceinline__ void run(Source source) {
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const prefill::kv_range e = prefill::kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      const int num_tiles = e.tile_end - e.tile_begin;
      int n = R::num_producers == 1 ? 0 : (producer_ ^ tiles_) & 1;
      std::uint32_t token = find_token(work, e, n, num_tiles);
      tile_scales scales = load_scales(token);
      request(first_, token, 0);
      if (threadIdx.x == 0) load_queries(a_, stages_, q_map_, q_phase_, work);
      __syncwarp();
      q_phase_ ^= 1;
      for (; n < num_tiles; n += R::num_producers) {
        const std::uint32_t next = find_token(work, e, n + R::num_producers, num_tiles);
        fill(tiles_ + n, token, next, scales);
        token = next;
      }
      tiles_ += num_tiles;
    }
  }

 private:
  static constexpr std::uint32_t outside = 0xffffffffu;

  /// What a lane has of part_tokens tokens.
  struct token_part {
    uint4 codes[R::part_tokens];        // of token pair i / 2 the half i % 2 of the dims
    uint4 rotated[R::part_tokens / 4];  // of token 4 i + lane / 8
  };
  /// Of the warp's 16 tokens: that of token t and dims 128 g … is in lane 4 · (t % 8) + g of number t / 8.
  struct tile_scales {
    float low, high;
  };

  // Of tile n of the work tile the warp's token lane % 16: from the beginning of the plane, in units of 16 bytes.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t find_token(const prefill_work_tile& work,
                                                                    const prefill::kv_range& e, int n,
                                                                    int num_tiles) const {
    const int key = (e.tile_end - 1 - n) * S::tile_keys + warp_ * tokens + lane_ % tokens;
    if (n >= num_tiles || key >= work.seq_len || key < e.begin) return outside;
    const int block = key / a_.block_size;
    const std::int64_t id = __ldg(a_.block_tables + work.seq * a_.block_table_stride + block);
    if (id < 0 || id >= a_.num_blocks) return outside;  // tables of a call are not checked
    return static_cast<std::uint32_t>((id * a_.k_strides.block + (key - block * a_.block_size) * a_.k_strides.token) /
                                      16);
  }
  [[nodiscard]] __device__ __forceinline__ const char* row_of(std::uint32_t token) const {
    return static_cast<const char*>(a_.k) + std::uint64_t{token == outside ? 0 : token} * 16;
  }

  // Token and chunk of 64 dims of piece i of a part.
  [[nodiscard]] __device__ __forceinline__ int token_of(int number, int i) const {
    return number * R::part_tokens + i / 2 * 2 + (lane_ / 4 & 1);
  }
  [[nodiscard]] __device__ __forceinline__ int chunk_of(int i) const { return i % 2 * 4 + lane_ / 8; }
  [[nodiscard]] __device__ __forceinline__ const char* piece_of(std::uint32_t token, int i) const {
    return row_of(token) + chunk_of(i) * 64 + (lane_ & 3) * 16;
  }

  __device__ __forceinline__ void request(token_part& part, std::uint32_t token, int number) const {
#pragma unroll
    for (int i = 0; i < R::part_tokens; i += 2) {
      const std::uint32_t from = __shfl_sync(0xffffffffu, token, token_of(number, i));
      part.codes[i] = load_16_if(piece_of(from, i), from != outside);
      part.codes[i + 1] = load_16_if(piece_of(from, i + 1), from != outside);
    }
#pragma unroll
    for (int i = 0; i < R::part_tokens / 4; ++i) {
      const std::uint32_t from = __shfl_sync(0xffffffffu, token, number * R::part_tokens + 4 * i + lane_ / 8);
      part.rotated[i] = load_16_if(row_of(from) + kv_record::rotated_offset + (lane_ & 7) * 16, from != outside);
    }
  }

  [[nodiscard]] __device__ __forceinline__ tile_scales load_scales(std::uint32_t token) const {
    const auto of = [&](int first) {
      const std::uint32_t from = __shfl_sync(0xffffffffu, token, first + lane_ / 4);
      const auto* const scales = reinterpret_cast<const float*>(row_of(from) + kv_record::scales_offset);
      return from == outside ? 0.0f : __ldg(scales + lane_ % 4);
    };
    return {of(0), of(8)};
  }

  // Brings the rows of the warp's tokens into the L2 (128 sequences of 4096 tokens, 16 heads: 232 instead of 246 µs).
  __device__ __forceinline__ void prefetch(std::uint32_t token) const {
    constexpr int lines = 6;  // of 128 bytes, that a row is in
#pragma unroll
    for (int i = 0; i < tokens * lines / 32; ++i) {
      const int line = i * 32 + lane_;
      const std::uint32_t from = __shfl_sync(0xffffffffu, token, line / lines);
      const char* const at = row_of(from) + min(line % lines * 128, static_cast<int>(kv_record::bytes) - 1);
      if (from != outside) asm volatile("prefetch.global.L2 [%0];\n" ::"l"(at));
    }
  }

  // Stores tile `count` of this CTA, whose first part is on its way; then that of the next is.
  __device__ __forceinline__ void fill(int count, std::uint32_t token, std::uint32_t next, tile_scales& scales) {
    const int stage = count & 1;
    const std::uint32_t to = stages_.kv(stage);
    const tile_scales coming = load_scales(next);
    prefetch(next);
#pragma unroll 1
    for (int number = 0; number < parts; number += 2) {
      const bool is_last = number + 2 == parts;
      request(second_, token, number + 1);
      if (number == 0) device::mbarrier_wait_parity(stages_.empty(stage), (count >> 1 & 1) ^ 1);
      store(first_, scales, number, to);
      request(first_, is_last ? next : token, is_last ? 0 : number + 2);
      store(second_, scales, number + 1, to);
    }
    device::fence_async_proxy();
    device::mbarrier_arrive(stages_.full(stage));
    scales = coming;
  }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t row_place(std::uint32_t stage, int token) const {
    return stage + static_cast<std::uint32_t>((warp_ * (tokens / 8) + token / 8) * S::group_bytes + token % 8 * 128);
  }
  // Of the first half of piece i; the other half is at ^ 16.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t place_of(std::uint32_t stage, int number, int i) const {
    const int token = token_of(number, i);
    const int vector = (lane_ & 3) * 2 ^ (token & 7);
    return row_place(stage, token) + static_cast<std::uint32_t>(chunk_of(i) * 1024 + vector * 16);
  }

  __device__ __forceinline__ void store(const token_part& part, const tile_scales& scales, int number,
                                        std::uint32_t stage) const {
    const float some = number * R::part_tokens < 8 ? scales.low : scales.high;
#pragma unroll
    for (int i = 0; i < R::part_tokens; ++i) {
      const float scale = __shfl_sync(0xffffffffu, some, token_of(number, i) % 8 * 4 + chunk_of(i) / 2);
      uint4 elements[2];
      device::scale_record_codes(part.codes[i], scale, elements);
      const std::uint32_t place = place_of(stage, number, i);
      device::store_shared_16(place, elements[0]);
      device::store_shared_16(place ^ 16, elements[1]);
    }
    constexpr int rotated_chunk = kv_record::v_head_dim / 64;
#pragma unroll
    for (int i = 0; i < R::part_tokens / 4; ++i) {
      const int of_warp = number * R::part_tokens + 4 * i + lane_ / 8;
      const auto place = static_cast<std::uint32_t>(rotated_chunk * 1024 + (((lane_ & 7) ^ (of_warp & 7)) << 4));
      device::store_shared_16(row_place(stage, of_warp) + place, part.rotated[i]);
    }
  }

  const prefill_args& a_;
  const shared_stages<S>& stages_;
  const tensor_map* q_map_;
  int producer_;
  int warp_, lane_;
  int q_phase_ = 0;
  int tiles_ = 0;  // of the work tiles before
  token_part first_, second_;
};

}  // namespace bifolio::inline v0_2::cuda::latent

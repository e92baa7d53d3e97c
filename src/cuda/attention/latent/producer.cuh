// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producers of the latent kernels: one warp that requests boxes of the cache's blocks by TMA, or a warpgroup that
/// requests pieces of 16 bytes by cp.async for blocks that no box fits. Queries come by TMA in both.

#include <cstdint>

#include "cuda/attention/latent/pipeline.cuh"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/launch.hpp"
#include "cuda/attention/prefill/pipeline.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/device/sm80.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::latent {

/// One thread: requests the queries of a work tile.
template <class S>
__device__ __forceinline__ void load_queries(const prefill_args& a, const shared_stages<S>& stages,
                                             const tensor_map* map, int phase, const prefill_work_tile& work) {
  device::mbarrier_wait_parity(stages.q_empty(), phase ^ 1);
  const int box_bytes = a.tokens_per_warpgroup * a.packed_heads * 128;
  device::mbarrier_arrive_expect_tx(stages.q_full(), S::chunks * box_bytes);
  const int token = work.query_start + work.row_tile * a.tokens_per_warpgroup;
  for (int c = 0; c < S::chunks; ++c) {
    device::tma_load_3d(stages.q() + c * S::q_chunk_bytes, map, stages.q_full(), c * 64, work.head, token);
  }
}

template <class S>
class tma_producer {
 public:
  __device__ __forceinline__ tma_producer(const prefill_args& args, const shared_stages<S>& stages,
                                          const tensor_map* q_map, const tensor_map* k_map)
      : a_(args), stages_(stages), q_map_(q_map), k_map_(k_map), lane_(static_cast<int>(threadIdx.x)) {}

  /// Fills the stages for all work tiles of the CTA.
  template <class Source>
  __device__ __forceinline__ void run(Source source) {
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const prefill::kv_range e = prefill::kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      if (lane_ == 0) load_queries(a_, stages_, q_map_, q_phase_, work);
      __syncwarp();
      q_phase_ ^= 1;
      boxes next = load_table_entries(work, e, e.tile_end - 1);
      for (int tile = e.tile_end - 1; tile >= e.tile_begin; --tile) {
        const boxes here = next;
        if (tile > e.tile_begin) next = load_table_entries(work, e, tile - 1);
        load(here);
      }
    }
  }

 private:
  // The blocks of one tile, one per lane. Blocks that begin past the sequence or end before the window are neither
  // looked up nor copied.
  struct boxes {
    int first, count;  // those that are copied: first … count − 1
    int id;
    int group;  // of 8 tokens in the block
  };

  __device__ __forceinline__ boxes load_table_entries(const prefill_work_tile& work, const prefill::kv_range& e,
                                                      int tile) const {
    const int box_tokens = a_.loading.box_tokens;
    const int first_key = tile * S::tile_keys;
    const int key = first_key + lane_ * box_tokens;
    const int block = key / a_.block_size;
    boxes b;
    b.count = (min(S::tile_keys, work.seq_len - first_key) + box_tokens - 1) / box_tokens;
    b.first = max(0, e.begin - first_key) / box_tokens;
    b.group = (key - block * a_.block_size) / 8;
    b.id = lane_ >= b.first && lane_ < b.count ? __ldg(a_.block_tables + work.seq * a_.block_table_stride + block) : 0;
    return b;
  }

  __device__ __forceinline__ void load(const boxes& b) {
    device::mbarrier_wait_parity(stages_.empty(state_.stage), state_.phase ^ 1);
    const int box_bytes = a_.loading.box_tokens / 8 * S::group_bytes;
    const std::uint32_t full = stages_.full(state_.stage);
    if (lane_ == 0) device::mbarrier_arrive_expect_tx(full, (b.count - b.first) * box_bytes);
    __syncwarp();
    if (lane_ >= b.first && lane_ < b.count) {
      device::tma_load_5d(stages_.kv(state_.stage) + lane_ * box_bytes, k_map_, full, 0, 0, 0, b.group, b.id);
    }
    __syncwarp();
    state_.advance();
  }

  const prefill_args& a_;
  const shared_stages<S>& stages_;
  const tensor_map* q_map_;
  const tensor_map* k_map_;
  int lane_;
  int q_phase_ = 0;
  prefill::pipeline_state<S::stages> state_;
};

/// Eight lanes copy the 128 bytes of one token and chunk; in each pass the warpgroup copies 16 tokens, two groups of 8.
template <class S>
class copy_producer {
  static constexpr int passes = S::tile_keys / 16;

 public:
  __device__ __forceinline__ copy_producer(const prefill_args& args, const shared_stages<S>& stages,
                                           const tensor_map* q_map)
      : a_(args),
        stages_(stages),
        q_map_(q_map),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) & 31) {
    const int row = (warp_ & 1) * 4 + lane_ / 8;  // in its group of 8
    dst_offset_ = (warp_ / 2) * S::group_bytes + row * 128 + (((lane_ & 7) ^ row) * 16);
  }

  /// Fills the stages for all work tiles of the CTA.
  template <class Source>
  __device__ __forceinline__ void run(Source source) {
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const prefill::kv_range e = prefill::kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      if (threadIdx.x == 0) load_queries(a_, stages_, q_map_, q_phase_, work);
      __syncwarp();
      q_phase_ ^= 1;
      std::int64_t next = find_token(work, e, e.tile_end - 1);
      for (int tile = e.tile_end - 1; tile >= e.tile_begin; --tile) {
        const std::int64_t here = next;
        if (tile > e.tile_begin) next = find_token(work, e, tile - 1);
        load(here);
      }
    }
  }

 private:
  static constexpr std::int64_t outside = -1;

  // Elements from the beginning of the plane to the token that this lane looks up for its warp: number
  // 16 · (lane / 4) + 4 · warp + lane % 4 of the tile.
  [[nodiscard]] __device__ __forceinline__ std::int64_t find_token(const prefill_work_tile& work,
                                                                   const prefill::kv_range& e, int tile) const {
    const int in_tile = lane_ / 4 * 16 + warp_ * 4 + (lane_ & 3);
    const int key = tile * S::tile_keys + in_tile;
    if (in_tile >= S::tile_keys || key >= work.seq_len || key < e.begin) return outside;
    const int block = key / a_.block_size;
    const std::int64_t id = __ldg(a_.block_tables + work.seq * a_.block_table_stride + block);
    if (id < 0 || id >= a_.num_blocks) return outside;  // tables of a call are not checked; TMA does the same
    return id * a_.k_strides.block + (key - block * a_.block_size) * a_.k_strides.token;
  }

  __device__ __forceinline__ void load(std::int64_t token) {
    device::mbarrier_wait_parity(stages_.empty(state_.stage), state_.phase ^ 1);
    const char* const base = static_cast<const char*>(a_.k);
    const std::uint32_t dst = stages_.kv(state_.stage) + dst_offset_;
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const std::int64_t from = __shfl_sync(0xffffffffu, token, pass * 4 + lane_ / 8);
      const bool valid = from != outside;
      const char* const src = base + (valid ? from * 2 + (lane_ & 7) * 16 : 0);
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) {
        device::cp_async_16(dst + pass * 2 * S::group_bytes + c * 1024, valid ? src + c * 128 : base, valid);
      }
    }
    device::mbarrier_arrive_after_copies(stages_.full(state_.stage));
    state_.advance();
  }

  const prefill_args& a_;
  const shared_stages<S>& stages_;
  const tensor_map* q_map_;
  int warp_, lane_;
  int dst_offset_;
  int q_phase_ = 0;
  prefill::pipeline_state<S::stages> state_;
};

}  // namespace bifolio::inline v0_2::cuda::latent

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producer warpgroup of prefill for caches that no tensor map fits: blocks of any number of tokens, any strides,
/// head_dims that need padding. Each thread requests pieces of 16 bytes by cp.async; what is outside the sequence, the
/// window or head_dim becomes zero. Queries come by TMA as everywhere.

#include <cstdint>

#include "cuda/attention/prefill/launch.hpp"
#include "cuda/attention/prefill/pipeline.cuh"
#include "cuda/attention/prefill/producer.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/prefill/shape.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm80.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// Eight lanes copy the 128 bytes of one token and chunk; in each pass the warpgroup copies 16 tokens, two groups of 8.
template <class Shape>
class copy_producer {
  using S = Shape;
  static_assert(S::tile_keys % 16 == 0);
  static constexpr int passes = S::tile_keys / 16;
  static_assert(4 * passes <= 32);

 public:
  __device__ __forceinline__ copy_producer(const prefill_args& args, const shared_stages<Shape>& stages,
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
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      const int kv_head = work.head / a_.group_size;
      if (threadIdx.x == 0) load_queries(a_, stages_, q_map_, q_state_, work);
      __syncwarp();
      q_state_.advance();

      // V of a tile is requested after K of the next one, as it is used. Table entries are loaded a tile ahead.
      std::int64_t last = outside;
      std::int64_t next = find_token(work, e, kv_head, e.template tile_at<S>(0));
      for (int n = 0; n < e.num_tiles(); ++n) {
        const std::int64_t here = next;
        if (n + 1 < e.num_tiles()) next = find_token(work, e, kv_head, e.template tile_at<S>(n + 1));
        load_k(here);
        if (n > 0) load_v(last);
        last = here;
      }
      load_v(last);
    }
  }

 private:
  static constexpr std::int64_t outside = -1;

  // Elements from the beginning of the plane to the token that this lane looks up for its warp: number
  // 16 · (lane / 4) + 4 · warp + lane % 4 of the tile.
  [[nodiscard]] __device__ __forceinline__ std::int64_t find_token(const prefill_work_tile& work, const kv_range& e,
                                                                   int kv_head, int tile) const {
    const int in_tile = lane_ / 4 * 16 + warp_ * 4 + (lane_ & 3);
    const int key = tile * S::tile_keys + in_tile;
    if (in_tile >= S::tile_keys || key >= work.seq_len || key < e.begin) return outside;
    const int block = key / a_.block_size;
    const std::int64_t id = __ldg(a_.block_tables + work.seq * a_.block_table_stride + block);
    if (id < 0 || id >= a_.num_blocks) return outside;  // tables of a call are not checked; TMA does the same
    return id * a_.k_strides.block + kv_head * a_.k_strides.head + (key - block * a_.block_size) * a_.k_strides.token;
  }

  __device__ __forceinline__ void load_k(std::int64_t token) {
    load(a_.k, stages_.k(k_state_.stage), stages_.k_full(k_state_.stage), stages_.k_empty(k_state_.stage),
         k_state_.phase, token);
    k_state_.advance();
  }
  __device__ __forceinline__ void load_v(std::int64_t token) {
    load(a_.v, stages_.v(v_state_.stage), stages_.v_full(v_state_.stage), stages_.v_empty(v_state_.stage),
         v_state_.phase, token);
    v_state_.advance();
  }

  __device__ __forceinline__ void load(const void* plane, std::uint32_t dst, std::uint32_t full, std::uint32_t empty,
                                       int phase, std::int64_t token) {
    device::mbarrier_wait_parity(empty, phase ^ 1);
    const char* const base = static_cast<const char*>(plane);
    const int first_dim = (lane_ & 7) * 8;
    dst += dst_offset_;
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const std::int64_t from = __shfl_sync(0xffffffffu, token, pass * 4 + lane_ / 8);
      const char* const src = base + (from == outside ? 0 : from * 2) + first_dim * 2;
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) {
        const bool valid = from != outside && c * 64 + first_dim < a_.head_dim;
        device::cp_async_16(dst + pass * 2 * S::group_bytes + c * 1024, valid ? src + c * 128 : base, valid);
      }
    }
    device::mbarrier_arrive_after_copies(full);
  }

  const prefill_args& a_;
  const shared_stages<Shape>& stages_;
  const tensor_map* q_map_;
  int warp_, lane_;
  int dst_offset_;
  pipeline_state<S::q_stages> q_state_;
  pipeline_state<S::stages> k_state_, v_state_;
};

}  // namespace bifolio::inline v0_2::cuda::prefill

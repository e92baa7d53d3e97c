// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The TMA producer warp of prefill: queries by one box per warpgroup and chunk, K and V by boxes of one block of one
/// KV head, whose block ids come from the block table. Runs as far ahead of the consumers as there are stages.

#include <cstdint>

#include "cuda/attention/prefill/launch.hpp"
#include "cuda/attention/prefill/pipeline.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/prefill/shape.hpp"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// One thread: requests the queries of a work tile into the stage of `state`.
template <class Shape>
__device__ __forceinline__ void load_queries(const prefill_args& a, const shared_stages<Shape>& stages,
                                             const tensor_map* map, const pipeline_state<Shape::q_stages>& state,
                                             const prefill_work_tile& work) {
  device::mbarrier_wait_parity(stages.q_empty(state.stage), state.phase ^ 1);
  const int box_bytes = a.tokens_per_warpgroup * a.packed_heads * 128;
  device::mbarrier_arrive_expect_tx(stages.q_full(state.stage), Shape::num_consumers * Shape::chunks * box_bytes);
  const int token = work.query_start + Shape::num_consumers * work.row_tile * a.tokens_per_warpgroup;
  for (int w = 0; w < Shape::num_consumers; ++w) {
    for (int c = 0; c < Shape::chunks; ++c) {
      device::tma_load_3d(stages.q(state.stage) + (w * Shape::chunks + c) * Shape::q_chunk_bytes, map,
                          stages.q_full(state.stage), c * 64, work.head, token + w * a.tokens_per_warpgroup);
    }
  }
}

template <class Shape>
class tma_producer {
  using S = Shape;

 public:
  __device__ __forceinline__ tma_producer(const prefill_args& args, const shared_stages<Shape>& stages,
                                          const tensor_map* q_map, const tensor_map* k_map, const tensor_map* v_map)
      : a_(args), stages_(stages), q_map_(q_map), k_map_(k_map), v_map_(v_map), lane_(static_cast<int>(threadIdx.x)) {}

  /// Fills the stages for all work tiles of the CTA.
  template <class Source>
  __device__ __forceinline__ void run(Source source) {
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      const int kv_head = work.head / a_.group_size;
      if (lane_ == 0) load_queries(a_, stages_, q_map_, q_state_, work);
      __syncwarp();
      q_state_.advance();

      // V of a tile is requested after K of the next one, as it is used. Table entries are loaded a tile ahead.
      boxes last;
      boxes next = load_table_entries(work, e, e.template tile_at<S>(0));
      for (int n = 0; n < e.num_tiles(); ++n) {
        const boxes here = next;
        if (n + 1 < e.num_tiles()) next = load_table_entries(work, e, e.template tile_at<S>(n + 1));
        load_k(here, kv_head);
        if (n > 0) load_v(last, kv_head);
        last = here;
      }
      load_v(last, kv_head);
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

  __device__ __forceinline__ boxes load_table_entries(const prefill_work_tile& work, const kv_range& e,
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

  __device__ __forceinline__ void load_k(const boxes& b, int kv_head) {
    load(k_map_, stages_.k(k_state_.stage), stages_.k_full(k_state_.stage), stages_.k_empty(k_state_.stage),
         k_state_.phase, b, kv_head);
    k_state_.advance();
  }
  __device__ __forceinline__ void load_v(const boxes& b, int kv_head) {
    load(v_map_, stages_.v(v_state_.stage), stages_.v_full(v_state_.stage), stages_.v_empty(v_state_.stage),
         v_state_.phase, b, kv_head);
    v_state_.advance();
  }

  __device__ __forceinline__ void load(const tensor_map* map, std::uint32_t dst, std::uint32_t full,
                                       std::uint32_t empty, int phase, const boxes& b, int kv_head) {
    device::mbarrier_wait_parity(empty, phase ^ 1);
    const int box_bytes = a_.loading.box_tokens / 8 * S::group_bytes;
    if (lane_ == 0) device::mbarrier_arrive_expect_tx(full, (b.count - b.first) * box_bytes);
    __syncwarp();
    if (lane_ >= b.first && lane_ < b.count) {
      device::tma_load_5d(dst + lane_ * box_bytes, map, full, 0, 0, kv_head * a_.loading.head_chunks,
                          kv_head * a_.loading.head_groups + b.group, b.id);
    }
    __syncwarp();
  }

  const prefill_args& a_;
  const shared_stages<Shape>& stages_;
  const tensor_map* q_map_;
  const tensor_map* k_map_;
  const tensor_map* v_map_;
  int lane_;
  pipeline_state<S::q_stages> q_state_;
  pipeline_state<S::stages> k_state_, v_state_;
};

}  // namespace bifolio::inline v0_2::cuda::prefill

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

namespace bifolio::cuda::prefill {

template <class Shape, key_order Order, bool Masked>
class tma_producer {
  using S = Shape;

 public:
  __device__ __forceinline__ tma_producer(const prefill_args& args, const shared_stages<Shape>& stages,
                                          const tensor_map* q_map, const tensor_map* k_map, const tensor_map* v_map)
      : a_(args), stages_(stages), q_map_(q_map), k_map_(k_map), v_map_(v_map), lane_(static_cast<int>(threadIdx.x)) {}

  /// Fills the stages for all work tiles of the CTA.
  __device__ __forceinline__ void run(work_source source) {
    while (source.next()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      const int kv_head = work.head / a_.group_size;
      load_queries(work);

      // V of a tile is requested after K of the next one, as it is used. Table entries are loaded a tile ahead.
      boxes last;
      boxes next = load_table_entries(work, e, e.tile_end - 1);
      for (int tile = e.tile_end - 1; tile >= e.tile_begin; --tile) {
        const boxes here = next;
        if (tile > e.tile_begin) next = load_table_entries(work, e, tile - 1);
        load_k(here, kv_head);
        if (tile + 1 < e.tile_end) load_v(last, kv_head);
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
    int offset;  // tokens into the block
  };

  __device__ __forceinline__ void load_queries(const prefill_work_tile& work) {
    if (lane_ == 0) {
      device::mbarrier_wait_parity(stages_.q_empty(q_state_.stage), q_state_.phase ^ 1);
      const int box_bytes = a_.tokens_per_half * a_.packed_heads * 128;
      device::mbarrier_arrive_expect_tx(stages_.q_full(q_state_.stage), num_consumers * S::chunks * box_bytes);
      const int token = work.query_start + 2 * work.row_tile * a_.tokens_per_half;
      for (int w = 0; w < num_consumers; ++w) {
        for (int c = 0; c < S::chunks; ++c) {
          device::tma_load_3d(stages_.q(q_state_.stage) + (w * S::chunks + c) * S::q_chunk_bytes, q_map_,
                              stages_.q_full(q_state_.stage), c * 64, work.head, token + w * a_.tokens_per_half);
        }
      }
    }
    __syncwarp();
    q_state_.advance();
  }

  __device__ __forceinline__ boxes load_table_entries(const prefill_work_tile& work, const kv_range& e,
                                                      int tile) const {
    const int first_key = tile * prefill_tile_keys;
    const int key = first_key + lane_ * a_.box_tokens;
    const int block = key / a_.block_size;
    boxes b;
    b.count = min(prefill_tile_keys, work.seq_len - first_key + a_.box_tokens - 1) / a_.box_tokens;
    b.first = Masked ? max(0, (e.begin - first_key) / a_.box_tokens) : 0;
    b.offset = key - block * a_.block_size;
    b.id = lane_ >= b.first && lane_ < b.count ? __ldg(a_.block_tables + work.seq * a_.block_table_stride + block) : 0;
    return b;
  }

  __device__ __forceinline__ void load_k(const boxes& b, int kv_head) {
    load<Order == key_order::pairs>(k_map_, stages_.k(k_state_.stage), stages_.k_full(k_state_.stage),
                                    stages_.k_empty(k_state_.stage), k_state_.phase, b, kv_head);
    k_state_.advance();
  }
  __device__ __forceinline__ void load_v(const boxes& b, int kv_head) {
    load<true>(v_map_, stages_.v(v_state_.stage), stages_.v_full(v_state_.stage), stages_.v_empty(v_state_.stage),
               v_state_.phase, b, kv_head);
    v_state_.advance();
  }

  template <bool WholeHead>
  __device__ __forceinline__ void load(const tensor_map* map, std::uint32_t dst, std::uint32_t full,
                                       std::uint32_t empty, int phase, const boxes& b, int kv_head) {
    device::mbarrier_wait_parity(empty, phase ^ 1);
    const int chunk_bytes = a_.box_tokens * 128;
    if (lane_ == 0) device::mbarrier_arrive_expect_tx(full, (b.count - b.first) * S::chunks * chunk_bytes);
    __syncwarp();
    if constexpr (WholeHead) {
      if (lane_ >= b.first && lane_ < b.count) {
        device::tma_load_5d(dst + lane_ * S::chunks * chunk_bytes, map, full, 0, b.offset, 0, kv_head, b.id);
      }
    } else {
      // Lane (box · chunks + chunk): the chunks of a block are requested next to each other (one chunk of all blocks
      // first gave 427 instead of 491 TFLOP/s).
#pragma unroll
      for (int first = 0; first < prefill_tile_keys / 8 * S::chunks; first += 32) {
        const int i = first + lane_;
        const int box = i / S::chunks;
        const int id = __shfl_sync(0xffffffffu, b.id, box & 31);
        const int offset = __shfl_sync(0xffffffffu, b.offset, box & 31);
        if (box >= b.first && box < b.count) {
          const int chunk = i % S::chunks;
          device::tma_load_5d(dst + chunk * S::kv_chunk_bytes + box * chunk_bytes, map, full, 0, offset, chunk, kv_head,
                              id);
        }
      }
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

}  // namespace bifolio::cuda::prefill

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producers of the latent kernel for records (kv_record) with few query rows. Rows come into the stages as they
/// are in the cache. Queries become operands of the records' products: their first 512 dims float16 over a power of two
/// of the row, in the order in which consumers have dims of K (few_records.cuh), the others bfloat16 as they are.

#include <bifolio/kv_layout.hpp>
#include <cstdint>

#include "cuda/attention/latent/pipeline.cuh"
#include "cuda/attention/latent/record_requests.cuh"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/query_powers.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::latent {

class few_records_producer : record_requests<few_records, 16> {
  using S = few_records;
  using base = record_requests<few_records, 16>;
  static constexpr int query_rows = S::rows / 4;  // of a warp
  static_assert(S::stages == 4);

 public:
  static constexpr int arrivals = 4;  // that fill a stage, and q: one from each warp

  __device__ __forceinline__ few_records_producer(const prefill_args& args, const shared_stages<S>& stages)
      : base(args), stages_(stages) {}

  /// Fills the stages for all work tiles of the CTA.
  template <class Source>
  __device__ __forceinline__ void run(Source source) {
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const prefill::kv_range e = prefill::kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      const int num_tiles = e.tile_end - e.tile_begin;
      // Entries of the block table are on their way while the tile before is requested.
      std::uint32_t next = find_token(work, e, 0, num_tiles);
      for (int n = 0; n < num_tiles; ++n) {
        const token_rows rows = rows_of(next);
        next = find_token(work, e, n + 1, num_tiles);
        request(tiles_ + n, rows);
        if (n == 0) store_queries(load_queries(work));
      }
      tiles_ += num_tiles;
    }
  }

 private:
  // Requests the rows of tile `count` when its stage is free.
  __device__ __forceinline__ void request(int count, const token_rows& rows) const {
    const int stage = count % S::stages;
    device::mbarrier_wait_parity(stages_.empty(stage), (count / S::stages & 1) ^ 1);
    if (lane_ == 0) device::mbarrier_arrive_expect_tx(stages_.full(stage), tokens * record_bytes);
    __syncwarp();
    load(rows, stages_.kv(stage) + (warp_ * tokens + lane_ % tokens) * record_bytes, stages_.full(stage));
  }

  // Of the warp's rows of q a lane has 16 dims of those that become float16, and of one row 8 of the others.
  struct query_rows_of_warp {
    uint4 latent[query_rows][2];
    uint4 rotated;
  };
  [[nodiscard]] __device__ __forceinline__ int rotated_row() const { return warp_ * query_rows + lane_ / 8; }
  [[nodiscard]] __device__ __forceinline__ query_rows_of_warp load_queries(const prefill_work_tile& work) const {
    const int first_token = work.row_tile * a_.tokens_per_warpgroup;
    const int num_rows = min(a_.tokens_per_warpgroup, work.query_len - first_token) * a_.packed_heads;
    query_rows_of_warp q = {};
#pragma unroll
    for (int i = 0; i < query_rows; ++i) {
      const int row = warp_ * query_rows + i;
      if (row >= num_rows) continue;
      const uint4* const from = row_of_queries(work, first_token, row) + 2 * lane_;
      q.latent[i][0] = __ldg(from);
      q.latent[i][1] = __ldg(from + 1);
    }
    if (rotated_row() < num_rows) {
      q.rotated = __ldg(row_of_queries(work, first_token, rotated_row()) + latent_v_dims / 8 + lane_ % 8);
    }
    return q;
  }
  // When the place of queries is free.
  __device__ __forceinline__ void store_queries(const query_rows_of_warp& q) {
    device::mbarrier_wait_parity(stages_.q_empty(), q_phase_ ^ 1);
    q_phase_ ^= 1;
    const std::uint32_t chunk = stages_.q() + lane_ / 4 * S::q_chunk_bytes;
#pragma unroll
    for (int i = 0; i < query_rows; ++i) {
      const int row = warp_ * query_rows + i;
      const uint4* const vectors = q.latent[i];
      const std::uint32_t words[8] = {vectors[0].x, vectors[0].y, vectors[0].z, vectors[0].w,
                                      vectors[1].x, vectors[1].y, vectors[1].z, vectors[1].w};
      std::uint32_t largest = 0;
#pragma unroll
      for (const std::uint32_t pair : words) largest = larger_magnitude(largest, pair);
      const query_power power(__reduce_max_sync(0xffffffffu, largest));
      // Of 16 dims consumers have 4j, 4j + 1 where operands have 2j, 2j + 1, and the next two where those have
      // 8 + 2j, 9 + 2j.
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        device::store_shared_16(chunk + row * 128 + ((lane_ % 4 * 2 + half) ^ (row & 7)) * 16,
                                make_uint4(power.divide(words[half]), power.divide(words[2 + half]),
                                           power.divide(words[4 + half]), power.divide(words[6 + half])));
      }
      if (lane_ == 0) device::store_shared_4(stages_.powers() + row * 4, __float_as_uint(power.value()));
    }
    device::store_shared_16(stages_.q() + latent_v_dims / 64 * S::q_chunk_bytes + rotated_row() * 128 +
                                ((lane_ % 8) ^ (rotated_row() & 7)) * 16,
                            q.rotated);
    device::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) device::mbarrier_arrive(stages_.q_full());
  }
  [[nodiscard]] __device__ __forceinline__ const uint4* row_of_queries(const prefill_work_tile& work, int first_token,
                                                                       int row) const {
    const int token = row / a_.packed_heads;
    const int head = work.head + row - token * a_.packed_heads;
    const std::int64_t position = work.query_start + first_token + token;
    return reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(a_.q) + position * a_.q_token_stride +
                                          head * a_.q_head_stride);
  }

  const shared_stages<S>& stages_;
  int q_phase_ = 0;
  int tiles_ = 0;  // of the work tiles before
};

}  // namespace bifolio::inline v0_2::cuda::latent

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producers of the latent kernel for records (kv_record) with many query rows. Each of their warps has 16 tokens
/// of a tile, as two groups of 8. Rows arrive in the stage itself, when it is free. The warp reads a group into
/// registers, scales the codes into bfloat16 and stores the group as TMA would store K. What is outside the sequence or
/// the window becomes zero. Queries come by TMA as everywhere.

#include <bifolio/kv_layout.hpp>
#include <cstdint>

#include "cuda/attention/latent/pipeline.cuh"
#include "cuda/attention/latent/producer.cuh"
#include "cuda/attention/latent/record_requests.cuh"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/device/record_vectors.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::latent {

class record_producer : record_requests<many_rows, 8> {
  using S = many_rows;
  using base = record_requests<many_rows, 8>;
  static constexpr int code_chunks = kv_record::v_head_dim / 64;
  static_assert(S::stages == 2);

 public:
  static constexpr int arrivals = 4;  // that fill a stage, one from each warp

  __device__ __forceinline__ record_producer(const prefill_args& args, const shared_stages<S>& stages,
                                             const tensor_map* q_map)
      : base(args), stages_(stages), q_map_(q_map) {}

  /// One thread; a barrier of the CTA must follow. Each phase of these barriers is waited for once, by the warp that
  /// requested its rows.
  __device__ __forceinline__ static void init_barriers(const shared_stages<S>& stages) {
    for (int i = 0; i < S::stages * S::tile_keys / 8; ++i) {
      device::mbarrier_init(stages.base() + record_parts.arrived + 8 * i, 1);
    }
    device::mbarrier_init_fence();
  }

  /// Fills the stages for all work tiles of the CTA.
  template <class Source>
  __device__ __forceinline__ void run(Source source) {
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const prefill::kv_range e = prefill::kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      const int num_tiles = e.tile_end - e.tile_begin;
      const token_rows rows = rows_of(find_token(work, e, 0, num_tiles));
      wait_until_free(tiles_);
      request(tiles_, rows);
      const std::uint32_t second = find_token(work, e, 1, num_tiles);
      if (threadIdx.x == 0) load_queries(a_, stages_, q_map_, q_phase_, work);
      __syncwarp();
      q_phase_ ^= 1;
      token_rows next = rows_of(second);
      for (int n = 0; n < num_tiles; ++n) {
        // The entry of the block table is on its way while the tile is filled.
        const std::uint32_t after = find_token(work, e, n + 2, num_tiles);
        fill(tiles_ + n, next, n + 1 == num_tiles);
        next = rows_of(after);
      }
      tiles_ += num_tiles;
    }
  }

 private:
  // Where a group of 8 tokens is in its stage, as it arrives and when it is widened; `group`: of the warp, 0 or 1.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t place_of(int count, int group) const {
    return stages_.kv(count & 1) + (warp_ * 2 + group) * S::group_bytes;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t arrived(int count, int group) const {
    return stages_.base() + record_parts.arrived + 8 * ((count & 1) * (S::tile_keys / 8) + warp_ * 2 + group);
  }

  // Requests the rows of tile `count`. All lanes must have read what was in the same place before, with a __syncwarp
  // after.
  __device__ __forceinline__ void request(int count, const token_rows& rows) const {
    const int group = lane_ / 8 & 1;
    if (lane_ == 0 || lane_ == 8) device::mbarrier_arrive_expect_tx(arrived(count, group), 8 * record_bytes);
    __syncwarp();
    load(rows, place_of(count, group) + lane_ % 8 * record_bytes, arrived(count, group));
  }
  // Brings rows into the L2.
  __device__ __forceinline__ void prefetch(const token_rows& rows) const {
    if (rows.bytes > 0) device::bulk_prefetch_l2(rows.from, rows.bytes);
    __syncwarp();
  }

  // Free: the consumers are done with the tile that was in the stage of tile `count` before.
  __device__ __forceinline__ void wait_until_free(int count) const {
    device::mbarrier_wait_parity(stages_.empty(count & 1), (count >> 1 & 1) ^ 1);
  }
  [[nodiscard]] __device__ __forceinline__ bool is_free(int count) const {
    return __all_sync(0xffffffffu, device::mbarrier_test_parity(stages_.empty(count & 1), (count >> 1 & 1) ^ 1)) != 0;
  }

  // Widens tile `count` of this CTA, whose rows are requested. The next tile is requested when its stage is seen to be
  // free; before that its rows are brought into the L2.
  __device__ __forceinline__ void fill(int count, const token_rows& next, bool is_last) const {
    bool is_requested = is_last;
#pragma unroll 1
    for (int group = 0; group < 2; ++group) {
      if (!is_requested && is_free(count + 1)) {
        request(count + 1, next);
        is_requested = true;
      }
      if (!is_requested && group == 0) prefetch(next);
      device::mbarrier_wait_parity(arrived(count, group), count >> 1 & 1);
      widen(place_of(count, group));
    }
    device::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) device::mbarrier_arrive(stages_.full(count & 1));
    if (is_requested) return;
    wait_until_free(count + 1);
    request(count + 1, next);
  }

  // A lane has token lane % 8 of a group, of each chunk of 64 dims the 16 from 16 · (lane / 8) on, of the rotated ones
  // two vectors of 8. Lanes of eight tokens read the same bytes of their rows, which are in different banks, since a
  // row is 41 times 16 bytes, and write the same vector of their rows, which the swizzle puts into different banks.
  [[nodiscard]] __device__ __forceinline__ uint4 load_codes(std::uint32_t rows, int chunk) const {
    return device::load_shared_16(rows + (lane_ & 7) * record_bytes + lane_ / 8 * 16 + chunk * 64);
  }
  [[nodiscard]] __device__ __forceinline__ float4 load_scales(std::uint32_t rows) const {
    return device::load_shared_f32x4(rows + (lane_ & 7) * record_bytes + static_cast<int>(kv_record::scales_offset));
  }
  [[nodiscard]] __device__ __forceinline__ uint4 load_rotated(std::uint32_t rows, int half) const {
    return load_codes(rows + static_cast<int>(kv_record::rotated_offset), half);
  }
  // `to`: of the group in its stage.
  __device__ __forceinline__ void store_codes(std::uint32_t to, int chunk, const uint4& codes,
                                              const float4& scales) const {
    constexpr int chunks_per_scale = kv_record::dims_per_scale / 64;
    const float of_chunk[] = {scales.x, scales.y, scales.z, scales.w};
    uint4 elements[2];
    device::scale_record_codes(codes, of_chunk[chunk / chunks_per_scale], elements);
    const std::uint32_t first = to + (lane_ & 7) * 128 + (lane_ / 8 * 2 ^ (lane_ & 7)) * 16;
    device::store_shared_16(first + chunk * 1024, elements[0]);
    device::store_shared_16((first ^ 16) + chunk * 1024, elements[1]);
  }
  __device__ __forceinline__ void store_rotated(std::uint32_t to, int half, const uint4& elements) const {
    const std::uint32_t first = to + (lane_ & 7) * 128 + (lane_ / 8 ^ (lane_ & 7)) * 16;
    device::store_shared_16((first ^ half * 64) + code_chunks * 1024, elements);
  }

  // Widens a group in place. The chunks from `below` on overwrite no codes or scales, only rotated dims, and those are
  // in registers first: so the codes of the lower chunks need registers only when those chunks are stored.
  __device__ __forceinline__ void widen(std::uint32_t group) const {
    constexpr int below = 5;
    static_assert(7 * record_bytes + kv_record::scales_offset + 16 <= below * 1024);
    const float4 scales = load_scales(group);
    uint4 codes[below];
#pragma unroll
    for (int i = below; i < code_chunks; ++i) codes[i - below] = load_codes(group, i);
    const uint4 rotated[2] = {load_rotated(group, 0), load_rotated(group, 1)};
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) store_rotated(group, half, rotated[half]);
#pragma unroll
    for (int i = below; i < code_chunks; ++i) store_codes(group, i, codes[i - below], scales);
#pragma unroll
    for (int i = 0; i < below; ++i) codes[i] = load_codes(group, i);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < below; ++i) store_codes(group, i, codes[i], scales);
  }

  const shared_stages<S>& stages_;
  const tensor_map* q_map_;
  int q_phase_ = 0;
  int tiles_ = 0;  // of the work tiles before
};

}  // namespace bifolio::inline v0_2::cuda::latent

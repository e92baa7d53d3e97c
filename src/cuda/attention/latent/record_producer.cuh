// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producers of the latent kernels for records (kv_record). Each of their warps has 16 tokens of a tile, as two
/// groups of 8, and needs no other warp. Bulk copies bring the rows of 656 bytes into shared memory as they are, one
/// copy for rows of a group that are consecutive in memory. The warp reads a group into registers, scales the codes
/// into bfloat16 and stores the group in a stage as TMA would store K. Where rows arrive in memory of their own, the
/// next group is requested as soon as this one is in registers; where they arrive in place, the next tile is requested
/// as soon as its stage is free. What is outside the sequence or the window becomes zero. Queries come by TMA as
/// everywhere.

#include <bifolio/kv_layout.hpp>
#include <cstdint>

#include "cuda/attention/latent/pipeline.cuh"
#include "cuda/attention/latent/producer.cuh"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/record_vectors.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::latent {

/// Where the rows of a group of 8 tokens arrive, and the barrier that counts their bytes. Each phase of such a barrier
/// has one arrival, with the number of bytes that are requested, which may be 0, and is waited for once by the warp
/// that requested them. In place each group has a barrier, with a phase for each tile of its stage. Elsewhere the two
/// groups of a warp take turns with one place and one barrier, so that each tile of the warp has two phases.
template <class R>
class arriving_records {
  using S = typename R::tile_shape;
  static constexpr record_layout parts = record_parts<R>;
  static constexpr int num_barriers = record_layout::warps * (R::in_place ? 2 : 1);

 public:
  __device__ __forceinline__ explicit arriving_records(const shared_stages<S>& stages) : base_(stages.base()) {}

  /// One thread; a barrier of the CTA must follow.
  __device__ __forceinline__ void init_barriers() const {
    for (int i = 0; i < num_barriers; ++i) device::mbarrier_init(base_ + parts.arrived + 8 * i, 1);
    device::mbarrier_init_fence();
  }

  /// `group`: of the warp, 0 or 1.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t rows(int stage, int warp, int group) const {
    if constexpr (R::in_place) return stage_group(stage, warp, group);
    return base_ + parts.rows + (stage * 4 + warp) * record_layout::group_bytes;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t arrived(int stage, int warp, int group) const {
    const int number = stage * 4 + warp;
    return base_ + parts.arrived + 8 * (R::in_place ? number * 2 + group : number);
  }
  /// What `arrived` is waited for with. `count`: of the tile, counted from the CTA's first.
  [[nodiscard]] __device__ __forceinline__ static int parity(int count, int group) {
    return R::in_place ? count >> 1 & 1 : group;
  }
  /// Where the group is in its stage.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t stage_group(int stage, int warp, int group) const {
    return base_ + shared_parts<S>.kv + stage * S::kv_bytes + (warp * 2 + group) * S::group_bytes;
  }

 private:
  std::uint32_t base_;
};

template <class R>
class record_producer {
  using S = typename R::tile_shape;
  static constexpr int tokens = 16;  // of a warp in a tile
  static constexpr int record_bytes = static_cast<int>(kv_record::bytes);
  static constexpr int code_chunks = kv_record::v_head_dim / 64;
  static_assert(S::tile_keys == 4 * tokens && S::stages == 2);
  static_assert(R::in_place == (R::num_producers == 1));  // with two, each has the tiles of one stage

 public:
  static constexpr int arrivals = 4;  // that fill a stage, one from each warp

  __device__ __forceinline__ record_producer(const prefill_args& args, const shared_stages<S>& stages,
                                             const tensor_map* q_map, int producer)
      : a_(args),
        stages_(stages),
        arriving_(stages),
        q_map_(q_map),
        producer_(producer),
        warp_(prefill::uniform(static_cast<int>(threadIdx.x) / 32) & 3),
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
      token_rows rows = rows_of(find_token(work, e, n, num_tiles));
      if (n < num_tiles) request_first(tiles_ + n, rows);
      const std::uint32_t second = find_token(work, e, n + R::num_producers, num_tiles);
      if (threadIdx.x == 0) load_queries(a_, stages_, q_map_, q_phase_, work);
      __syncwarp();
      q_phase_ ^= 1;
      token_rows next = rows_of(second);
      for (; n < num_tiles; n += R::num_producers) {
        // The entry of the block table is on its way while the tile is filled.
        const std::uint32_t after = find_token(work, e, n + 2 * R::num_producers, num_tiles);
        const bool is_last = n + R::num_producers >= num_tiles;
        if constexpr (R::in_place) {
          fill_in_place(tiles_ + n, next, is_last);
        } else {
          fill_from_own(tiles_ + n, rows, next, is_last);
        }
        rows = next;
        next = rows_of(after);
      }
      tiles_ += num_tiles;
    }
  }

 private:
  static constexpr std::uint32_t outside = 0xffffffffu;
  static constexpr std::uint32_t both_groups = (1u << tokens) - 1;
  [[nodiscard]] __device__ __forceinline__ static constexpr std::uint32_t group_tokens(int group) {
    return 0xffu << group * 8;
  }

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
    return static_cast<const char*>(a_.k) + std::uint64_t{token} * 16;
  }

  // A lane's token of a tile. Rows of a group that follow each other in memory are a run.
  struct token_rows {
    std::uint32_t token;
    int run_bytes;         // of the run that begins with the token; 0: none does
    std::uint32_t inside;  // which of the warp's tokens are not outside, a bit for each
  };
  [[nodiscard]] __device__ __forceinline__ token_rows rows_of(std::uint32_t token) const {
    const bool is_inside = lane_ < tokens && token != outside;
    const std::uint32_t inside = __ballot_sync(0xffffffffu, is_inside);
    const std::uint32_t before = __shfl_up_sync(0xffffffffu, token, 1);
    const bool follows = is_inside && lane_ % 8 != 0 && before != outside && token - before == record_bytes / 16;
    const std::uint32_t ends = ~__ballot_sync(0xffffffffu, follows) >> 1;
    // Lane 16 and those after begin nothing, so that every run has an end.
    return {token, is_inside && !follows ? __ffs(static_cast<int>(ends >> lane_)) * record_bytes : 0, inside};
  }

  // Requests the rows of some groups of tile `count` (`among`: their tokens, a bit for each), and writes zeros for
  // tokens that are outside. All lanes must have read what was in the same place before, with a __syncwarp after.
  __device__ __forceinline__ void request(int count, const token_rows& rows, std::uint32_t among) const {
    constexpr std::uint32_t firsts = 0x0101u;  // of the groups
    const int stage = count & 1;
    const int group = lane_ / 8;
    const std::uint32_t arrived = arriving_.arrived(stage, warp_, group);
    if (has_bit(among & firsts)) {
      const std::uint32_t of_group = rows.inside >> lane_ & 0xffu;
      device::mbarrier_arrive_expect_tx(arrived, __popc(static_cast<int>(of_group)) * record_bytes);
    }
    __syncwarp();
    const std::uint32_t row = arriving_.rows(stage, warp_, group) + lane_ % 8 * record_bytes;
    if (rows.run_bytes > 0 && (R::in_place || has_bit(among))) {
      device::bulk_load(row, row_of(rows.token), rows.run_bytes, arrived);
    }
    __syncwarp();
    const std::uint32_t zeros = among & ~rows.inside;
    if (zeros == 0) return;
    if (has_bit(zeros)) {
#pragma unroll 1
      for (int at = 0; at < record_bytes; at += 16) device::store_shared_zeros_16(row + at);
      device::fence_async_proxy();  // later copies overwrite the zeros
    }
    __syncwarp();
  }
  [[nodiscard]] __device__ __forceinline__ bool has_bit(std::uint32_t lanes) const { return (lanes >> lane_ & 1) != 0; }
  // Requests the first groups of a work tile.
  __device__ __forceinline__ void request_first(int count, const token_rows& rows) const {
    if constexpr (R::in_place) {
      wait_until_free(count);
      request(count, rows, both_groups);
    } else {
      request(count, rows, group_tokens(0));
      prefetch(rows);
    }
  }

  // Brings rows into the L2.
  __device__ __forceinline__ void prefetch(const token_rows& rows) const {
    if (rows.run_bytes > 0) device::bulk_prefetch_l2(row_of(rows.token), rows.run_bytes);
    __syncwarp();
  }

  __device__ __forceinline__ void wait_for_rows(int count, int group) const {
    device::mbarrier_wait_parity(arriving_.arrived(count & 1, warp_, group), arriving_.parity(count, group));
  }
  // Free: the consumers are done with the tile that was in the stage of tile `count` before.
  __device__ __forceinline__ void wait_until_free(int count) const {
    device::mbarrier_wait_parity(stages_.empty(count & 1), (count >> 1 & 1) ^ 1);
  }
  [[nodiscard]] __device__ __forceinline__ bool is_free(int count) const {
    return __all_sync(0xffffffffu, device::mbarrier_test_parity(stages_.empty(count & 1), (count >> 1 & 1) ^ 1)) != 0;
  }

  // The warp's part of the stage is written.
  __device__ __forceinline__ void hand_over(int count) const {
    device::fence_async_proxy();
    __syncwarp();
    if (lane_ == 0) device::mbarrier_arrive(stages_.full(count & 1));
  }

  // Both store tile `count` of this CTA, whose first rows are requested, and request the first rows of the next tile
  // unless this is the last one of the work tile.
  __device__ __forceinline__ void fill_from_own(int count, const token_rows& rows, const token_rows& next,
                                                bool is_last) const {
    const std::uint32_t from = arriving_.rows(count & 1, warp_, 0);
    prefetch(next);
#pragma unroll 1
    for (int group = 0; group < 2; ++group) {
      wait_for_rows(count, group);
      const float4 scales = load_scales(from);
      const uint4 rotated[2] = {load_rotated(from, 0), load_rotated(from, 1)};
      uint4 codes[code_chunks];
#pragma unroll
      for (int i = 0; i < code_chunks; ++i) codes[i] = load_codes(from, i);
      device::fence_async_proxy();  // a copy is not ordered after loads that are on their way
      __syncwarp();                 // all lanes have read: the next rows may come
      if (group == 0) {
        request(count, rows, group_tokens(1));
        wait_until_free(count);
      } else if (!is_last) {
        request(count + R::num_producers, next, group_tokens(0));
      }
      const std::uint32_t to = arriving_.stage_group(count & 1, warp_, group);
#pragma unroll
      for (int half = 0; half < 2; ++half) store_rotated(to, half, rotated[half]);
#pragma unroll
      for (int i = 0; i < code_chunks; ++i) store_codes(to, i, codes[i], scales);
    }
    hand_over(count);
  }

  // The next tile is requested when its stage is seen to be free; before that its rows are brought into the L2.
  __device__ __forceinline__ void fill_in_place(int count, const token_rows& next, bool is_last) const {
    bool is_requested = is_last;
#pragma unroll 1
    for (int group = 0; group < 2; ++group) {
      if (!is_requested && is_free(count + 1)) {
        request(count + 1, next, both_groups);
        is_requested = true;
      }
      if (!is_requested && group == 0) prefetch(next);
      wait_for_rows(count, group);
      widen_in_place(arriving_.rows(count & 1, warp_, group));
    }
    hand_over(count);
    if (is_requested) return;
    wait_until_free(count + 1);
    request(count + 1, next, both_groups);
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
  __device__ __forceinline__ void widen_in_place(std::uint32_t group) const {
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

  const prefill_args& a_;
  const shared_stages<S>& stages_;
  arriving_records<R> arriving_;
  const tensor_map* q_map_;
  int producer_;
  int warp_, lane_;
  int q_phase_ = 0;
  int tiles_ = 0;  // of the work tiles before
};

}  // namespace bifolio::inline v0_2::cuda::latent

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// How warps of producers of the latent kernels bring records (kv_record) into shared memory as they are: each warp has
/// 16 tokens of a tile and needs no other warp, and rows that are consecutive in memory come in one bulk copy.

#include <bifolio/kv_layout.hpp>
#include <cstdint>

#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::latent {

/// What comes for a token that is outside the sequence or the window.
static __device__ const uint4 zero_record[kv_record::bytes / 16] = {};

/// `RunTokens`: the rows of so many tokens are next to each other in shared memory.
template <class Shape, int RunTokens>
class record_requests {
  using S = Shape;

 protected:
  static constexpr int tokens = 16;  // of a warp in a tile
  static constexpr int record_bytes = static_cast<int>(kv_record::bytes);
  static constexpr std::uint32_t outside = 0xffffffffu;
  static_assert(S::tile_keys == 4 * tokens);

  __device__ __forceinline__ explicit record_requests(const prefill_args& args)
      : a_(args),
        warp_(prefill::uniform(static_cast<int>(threadIdx.x) / 32) & 3),
        lane_(static_cast<int>(threadIdx.x) & 31) {}

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
  // What a lane copies of a tile: the run of rows that begins with its token, in memory and in shared memory.
  struct token_rows {
    const char* from;
    int bytes;  // 0: no run begins there
  };
  [[nodiscard]] __device__ __forceinline__ token_rows rows_of(std::uint32_t token) const {
    const std::uint32_t before = __shfl_up_sync(0xffffffffu, token, 1);
    const bool follows = lane_ < tokens && lane_ % RunTokens != 0 && token != outside && before != outside &&
                         token - before == record_bytes / 16;
    const std::uint32_t ends = ~__ballot_sync(0xffffffffu, follows) >> 1;
    // Lane 16 and those after begin nothing, so that every run has an end.
    const bool begins = lane_ < tokens && !follows;
    return {token == outside ? reinterpret_cast<const char*>(zero_record)
                             : static_cast<const char*>(a_.k) + std::uint64_t{token} * 16,
            begins ? __ffs(static_cast<int>(ends >> lane_)) * record_bytes : 0};
  }
  // Requests it to where the lane's token has its place. Its bytes are counted on `barrier`.
  __device__ __forceinline__ void load(const token_rows& rows, std::uint32_t place, std::uint32_t barrier) const {
    if (rows.bytes > 0) device::bulk_load(place, rows.from, rows.bytes, barrier);
    __syncwarp();
  }

  const prefill_args& a_;
  int warp_, lane_;
};

}  // namespace bifolio::inline v0_2::cuda::latent

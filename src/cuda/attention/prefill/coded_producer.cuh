// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producer warpgroup of prefill for caches of codes. Each thread requests pieces of 16 bytes by cp.async into a
/// place of its own, one plane of a tile ahead, and stores what has come as 16 elements of the type that the tensor
/// cores multiply, in which every code is exact. Scales are the consumers'. What is outside the sequence, the window or
/// head_dim becomes zero. Queries come by TMA as everywhere.

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

/// Lanes 4j … 4j + 3 take the 64 bytes of one token and chunk of 64 dims; in each pass the warpgroup takes 32 tokens.
template <class T, class Shape>
class coded_producer {
  using S = Shape;
  static_assert(S::tile_keys % 32 == 0);
  static constexpr int passes = S::tile_keys / 32;
  static constexpr int pieces = passes * S::chunks;  // of 16 bytes, that a thread takes of a plane of a tile
  static_assert(2 * pieces * 128 * 16 == S::raw_bytes);

 public:
  __device__ __forceinline__ coded_producer(const prefill_args& args, const shared_stages<Shape>& stages,
                                            const tensor_map* q_map)
      : a_(args),
        stages_(stages),
        q_map_(q_map),
        thread_(static_cast<int>(threadIdx.x)),
        raw_(stages.raw() + static_cast<std::uint32_t>(thread_) * 16) {}

  /// Fills the stages for all work tiles of the CTA.
  template <class Source>
  __device__ __forceinline__ void run(Source source) {
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      if (thread_ == 0) load_queries(a_, stages_, q_map_, q_state_, work);
      __syncwarp();
      q_state_.advance();

      // Planes of tiles as they are used: K of the last tile, K of the one before, V of the last, and so on.
      const int kv_head = work.head / a_.group_size;
      const int num_tiles = e.tile_end - e.tile_begin;
      const int num_planes = 2 * num_tiles;
      for (int n = -1; n < num_planes; ++n) {
        if (n + 1 < num_planes) request(work, e, kv_head, plane_at(n + 1, num_tiles), n + 1);
        device::cp_async_commit_group();
        if (n < 0) continue;
        device::cp_async_wait_group<1>();
        store(plane_at(n, num_tiles).is_k, n);
      }
    }
  }

 private:
  // K or V, and which tile, counted from the last one.
  struct plane_of_tile {
    bool is_k;
    int tile;
  };
  [[nodiscard]] __device__ __forceinline__ static plane_of_tile plane_at(int n, int num_tiles) {
    if (n == 0) return {true, 0};
    if (n == 2 * num_tiles - 1) return {false, num_tiles - 1};
    return {n % 2 == 1, n % 2 == 1 ? (n + 1) / 2 : n / 2 - 1};
  }

  [[nodiscard]] __device__ __forceinline__ int token_of(int pass) const { return pass * 32 + thread_ / 4; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t raw_place(int n, int piece) const {
    return raw_ + static_cast<std::uint32_t>((n & 1) * pieces + piece) * (128 * 16);
  }

  __device__ __forceinline__ void request(const prefill_work_tile& work, const kv_range& e, int kv_head,
                                          const plane_of_tile& which, int n) {
    const int first_key = (e.tile_end - 1 - which.tile) * S::tile_keys;
    const char* const plane = static_cast<const char*>(which.is_k ? a_.k : a_.v);
    const int first_dim = (thread_ & 3) * 16;
#pragma unroll
    for (int pass = 0; pass < passes; ++pass) {
      const int key = first_key + token_of(pass);
      bool valid = key < work.seq_len && key >= e.begin;
      std::int64_t offset = 0;
      if (valid) {
        const int block = key / a_.block_size;
        const std::int64_t id = __ldg(a_.block_tables + work.seq * a_.block_table_stride + block);
        valid = id >= 0 && id < a_.num_blocks;  // tables of a call are not checked
        offset = id * a_.k_strides.block + kv_head * a_.k_strides.head +
                 (key - block * a_.block_size) * a_.k_strides.token + first_dim;
      }
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) {
        const bool there = valid && c * 64 + first_dim < a_.head_dim;
        device::cp_async_16(raw_place(n, pass * S::chunks + c), there ? plane + offset + c * 64 : plane, there);
      }
    }
  }

  // What has come of plane n, which is K or V, to a stage.
  __device__ __forceinline__ void store(bool is_k, int n) {
    const int stage = is_k ? k_state_.stage : v_state_.stage;
    const std::uint32_t dst = is_k ? stages_.k(stage) : stages_.v(stage);
    const std::uint32_t full = is_k ? stages_.k_full(stage) : stages_.v_full(stage);
    device::mbarrier_wait_parity(is_k ? stages_.k_empty(stage) : stages_.v_empty(stage),
                                 (is_k ? k_state_.phase : v_state_.phase) ^ 1);
    if (is_k) {
      k_state_.advance();
    } else {
      v_state_.advance();
    }
    const int vector = (thread_ & 3) * 2;  // of 16 bytes in the 128 of a token and chunk
    device::visit_code_vectors<T>(is_k ? a_.k_type : a_.v_type, [&](const auto& widen) {
#pragma unroll 2
      for (int piece = 0; piece < pieces; ++piece) {
        const int token = token_of(piece / S::chunks);
        const std::uint32_t row = dst + token / 8 * S::group_bytes + piece % S::chunks * 1024 + token % 8 * 128;
        uint4 elements[2];
        widen(device::load_shared_16(raw_place(n, piece)), elements);
        device::store_shared_16(row + ((vector ^ (token & 7)) << 4), elements[0]);
        device::store_shared_16(row + (((vector + 1) ^ (token & 7)) << 4), elements[1]);
      }
    });
    device::fence_async_proxy();
    device::mbarrier_arrive(full);
  }

  const prefill_args& a_;
  const shared_stages<Shape>& stages_;
  const tensor_map* q_map_;
  int thread_;
  std::uint32_t raw_;
  pipeline_state<S::q_stages> q_state_;
  pipeline_state<S::stages> k_state_, v_state_;
};

}  // namespace bifolio::inline v0_2::cuda::prefill

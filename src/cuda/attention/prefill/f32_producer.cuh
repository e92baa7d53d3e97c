// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producer warpgroup of float32's prefill: loads tiles of K and V by vectors of 16 bytes, splits each element into
/// two TensorFloat-32 numbers, and stores them as f32_shape.hpp says. What is outside the sequence, the window or
/// head_dim becomes zero.

#include <cstdint>

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/f32_shape.hpp"
#include "cuda/attention/prefill/pipeline.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// Addresses in shared memory: the ring of stages and the queries.
template <class Shape>
class f32_ring {
 public:
  __device__ __forceinline__ explicit f32_ring(const char* shared)
      : base_((device::shared_address(shared) + 1023) & ~1023u) {}

  /// One thread; a barrier of the CTA must follow.
  __device__ __forceinline__ void init_barriers() const {
    for (int s = 0; s < Shape::stages; ++s) {
      device::mbarrier_init(full(s), 128);                        // threads of the producer
      device::mbarrier_init(empty(s), 4 * Shape::num_consumers);  // warps of the consumers
    }
    device::mbarrier_init_fence();
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t stage(int s) const { return base_ + s * Shape::stage_bytes; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t full(int s) const { return base_ + Shape::barriers + 8 * s; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t empty(int s) const {
    return base_ + Shape::barriers + 8 * (Shape::stages + s);
  }
  /// Of a consumer thread: the first of its vectors, one for each 8 dims, 2048 bytes apart.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t queries(int warpgroup, int thread) const {
    return base_ + Shape::queries + warpgroup * prefill_warpgroup_rows * Shape::tile_dims * 4 + thread * 16;
  }
  /// Of a row of warpgroup 1.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t sums(int row) const { return base_ + Shape::sums + row * 8; }

 private:
  std::uint32_t base_;
};

template <class Shape>
class f32_producer {
  using S = Shape;
  static_assert(S::tile_keys == 32, "a lane looks up one key, a warp stores 8 of K");
  static constexpr int vectors_of_k = 2 * S::chunks;    // of a thread
  static constexpr int quads_of_v = S::tile_dims / 64;  // of dims, of a thread, which has four keys

 public:
  __device__ __forceinline__ f32_producer(const prefill_args& args, const f32_ring<Shape>& ring)
      : a_(args), ring_(ring), warp_(static_cast<int>(threadIdx.x) / 32), lane_(static_cast<int>(threadIdx.x) & 31) {}

  /// Fills the stages for all work tiles of the CTA. While one tile is stored, the next is loaded, and the one
  /// `ahead` tiles later is on its way to L2.
  template <class Source>
  __device__ __forceinline__ void run(Source source) {
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      const int kv_head = work.head / a_.group_size;
      std::int64_t tokens[ahead + 1];  // of the tile that is loaded and those after it
#pragma unroll
      for (int i = 0; i <= ahead; ++i) {
        const int tile = e.tile_end - 1 - i;
        tokens[i] = token_of(kv_head, tile, look_up(work, e, tile));
      }
      int block = look_up(work, e, e.tile_end - 2 - ahead);  // of the tile after those
#pragma unroll
      for (int i = 1; i < ahead; ++i) prefetch(tokens[i]);
      uint4 k[vectors_of_k];
      uint4 v[quads_of_v][4];
      load_k(tokens[0], k);
      for (int tile = e.tile_end - 1; tile >= e.tile_begin; --tile) {
        load_v(tokens[0], v);
        prefetch(tokens[ahead]);
        store_k(k);
#pragma unroll
        for (int i = 0; i < ahead; ++i) tokens[i] = tokens[i + 1];
        tokens[ahead] = token_of(kv_head, tile - 1 - ahead, block);
        block = look_up(work, e, tile - 2 - ahead);
        if (tile > e.tile_begin) load_k(tokens[0], k);
        store_v(v);
      }
    }
  }

 private:
  static constexpr std::int64_t outside = -1;
  static constexpr int ahead = 3;  // tiles

  // The block of this lane's key of a tile, or no block.
  [[nodiscard]] __device__ __forceinline__ int look_up(const prefill_work_tile& work, const kv_range& e,
                                                       int tile) const {
    const int key = tile * S::tile_keys + lane_;
    if (tile < e.tile_begin || key >= work.seq_len || key < e.begin) return -1;
    return __ldg(a_.block_tables + work.seq * a_.block_table_stride + key / a_.block_size);
  }
  // Elements from the beginning of either plane to the key.
  [[nodiscard]] __device__ __forceinline__ std::int64_t token_of(int kv_head, int tile, int block) const {
    if (block < 0 || block >= a_.num_blocks) return outside;  // tables of a call are not checked
    const int key = tile * S::tile_keys + lane_;
    return block * a_.k_strides.block + kv_head * a_.k_strides.head + key % a_.block_size * a_.k_strides.token;
  }
  [[nodiscard]] __device__ __forceinline__ static std::int64_t of_lane(std::int64_t token, int lane) {
    return __shfl_sync(0xffffffffu, token, lane);
  }
  [[nodiscard]] __device__ __forceinline__ uint4 load(const void* plane, std::int64_t token, int dim) const {
    const bool valid = token != outside && dim < a_.head_dim;
    return load_16_if(static_cast<const float*>(plane) + (valid ? token + dim : 0), valid);
  }

  // To L2: four lanes take a key of the warp's eight, 128 bytes each.
  __device__ __forceinline__ void prefetch(std::int64_t token) const {
    const std::int64_t from = of_lane(token, warp_ * 8 + lane_ / 4);
    const int dim = (lane_ & 3) * 32;
    if (from == outside || dim >= a_.head_dim) return;
    device::prefetch_l2(static_cast<const float*>(a_.k) + from + dim);
    device::prefetch_l2(static_cast<const float*>(a_.v) + from + dim);
  }

  // Eight lanes take 128 bytes of a key of the warp's eight.
  __device__ __forceinline__ void load_k(std::int64_t token, uint4 (&x)[vectors_of_k]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::int64_t from = of_lane(token, warp_ * 8 + i * 4 + lane_ / 8);
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) x[i * S::chunks + c] = load(a_.k, from, c * 32 + (lane_ & 7) * 4);
    }
  }
  __device__ __forceinline__ void store_k(const uint4 (&x)[vectors_of_k]) {
    const std::uint32_t stage = begin_stage();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = i * 4 + lane_ / 8;
      const std::uint32_t to = stage + warp_ * 1024 + key * 128 + (((lane_ & 7) ^ key) * 16);
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) store_parts(to + c * S::chunk_bytes, x[i * S::chunks + c]);
    }
    end_stage();
  }

  // Eight lanes take the eight vectors of a row of V transposed: lane c keys 8 · (c / 2) + c % 2, and 2, 4 and 6 after
  // it. They do for four dims at once, which are those from 16 · (warp + 4 · i) + 4 · (lane / 8).
  __device__ __forceinline__ void load_v(std::int64_t token, uint4 (&x)[quads_of_v][4]) const {
    const int first_key = (lane_ & 6) * 4 + (lane_ & 1);
#pragma unroll
    for (int key = 0; key < 4; ++key) {
      const std::int64_t from = of_lane(token, first_key + 2 * key);
#pragma unroll
      for (int i = 0; i < quads_of_v; ++i) x[i][key] = load(a_.v, from, first_dim(i));
    }
  }
  __device__ __forceinline__ void store_v(const uint4 (&x)[quads_of_v][4]) {
    const std::uint32_t stage = begin_stage();
#pragma unroll
    for (int i = 0; i < quads_of_v; ++i) {
      const std::uint32_t group = stage + first_dim(i) / 8 * 1024;
      const int row = first_dim(i) & 7;
      const auto store_row = [&](int n, const uint4& keys) {
        store_parts(group + (row + n) * 128 + (((lane_ & 7) ^ (row + n)) * 16), keys);
      };
      store_row(0, make_uint4(x[i][0].x, x[i][1].x, x[i][2].x, x[i][3].x));
      store_row(1, make_uint4(x[i][0].y, x[i][1].y, x[i][2].y, x[i][3].y));
      store_row(2, make_uint4(x[i][0].z, x[i][1].z, x[i][2].z, x[i][3].z));
      store_row(3, make_uint4(x[i][0].w, x[i][1].w, x[i][2].w, x[i][3].w));
    }
    end_stage();
  }
  [[nodiscard]] __device__ __forceinline__ int first_dim(int i) const { return 16 * (warp_ + 4 * i) + lane_ / 8 * 4; }

  __device__ __forceinline__ static void store_parts(std::uint32_t to, const uint4& x) {
    const device::tf32_pair p[4] = {split(x.x), split(x.y), split(x.z), split(x.w)};
    device::store_shared_16(to, make_uint4(p[0].large, p[1].large, p[2].large, p[3].large));
    device::store_shared_16(to + S::part_bytes, make_uint4(p[0].small, p[1].small, p[2].small, p[3].small));
  }
  [[nodiscard]] __device__ __forceinline__ static device::tf32_pair split(std::uint32_t bits) {
    return device::split_tf32(__uint_as_float(bits));
  }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t begin_stage() const {
    device::mbarrier_wait_parity(ring_.empty(state_.stage), state_.phase ^ 1);
    return ring_.stage(state_.stage);
  }
  // Tensor cores read through another proxy than these stores went through.
  __device__ __forceinline__ void end_stage() {
    device::fence_async_proxy();
    device::mbarrier_arrive(ring_.full(state_.stage));
    state_.advance();
  }

  const prefill_args& a_;
  const f32_ring<Shape>& ring_;
  int warp_, lane_;
  pipeline_state<S::stages> state_;
};

}  // namespace bifolio::inline v0_2::cuda::prefill

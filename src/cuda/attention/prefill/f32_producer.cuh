// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The producer warpgroup of float32's prefill: requests tiles of K and V by cp.async in vectors of 16 bytes, splits
/// each element into two TensorFloat-32 numbers, and stores them as f32_shape.hpp says. What is outside the sequence,
/// the window or head_dim becomes zero.

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
  /// Where vectors of the producer come before they are split.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t raw() const { return base_ + Shape::raw; }
  /// Of a row of warpgroup 1.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t sums(int row) const { return base_ + Shape::sums + row * 8; }

 private:
  std::uint32_t base_;
};

/// A thread takes K and V of a tile in units of four vectors. It requests them by cp.async into places of its own and
/// splits them a tile later; the places of a unit are filled again as soon as it is stored. In registers the vectors of
/// a tile were not in flight together: ptxas makes a load under a condition wait for the one before it (7,240 cycles
/// for a tile of 128 dims), and has too few registers for K and V of the next tile.
template <class Shape>
class f32_producer {
  using S = Shape;
  static_assert(S::tile_keys == 32, "a lane looks up one key, a warp stores 8 of K");
  static constexpr int units = S::tile_dims / 64;  // of K, and of V
  static constexpr int place_bytes = 128 * 16;     // of one vector of each thread
  static_assert(2 * units * 4 * place_bytes == S::raw_bytes);

 public:
  __device__ __forceinline__ f32_producer(const prefill_args& args, const f32_ring<Shape>& ring)
      : a_(args),
        ring_(ring),
        warp_(static_cast<int>(threadIdx.x) / 32),
        lane_(static_cast<int>(threadIdx.x) & 31),
        entries_per_tile_(S::tile_keys / args.block_size),
        slots_per_tile_(S::tile_keys % args.block_size) {}

  /// Fills the stages for all work tiles of the CTA. While one tile is stored, the next is requested, and the one
  /// `ahead` tiles later is on its way to L2.
  template <class Source>
  __device__ __forceinline__ void run(Source source) {
    for (; source.next(); source.release()) {
      const prefill_work_tile& work = source.work();
      const kv_range e = kv_range_of<S>(a_, work);
      if (e.tile_begin >= e.tile_end) continue;
      key_lookup keys = first_lookup(work, e);
      const std::int64_t first = token_of(keys, look_up(keys));
      std::int64_t tokens[ahead];  // of the tile that is requested next and those after it
#pragma unroll
      for (std::int64_t& token : tokens) token = token_of(keys, look_up(keys));
      table_entry entry = look_up(keys);  // of the tile after those
#pragma unroll
      for (int unit = 0; unit < 2 * units; ++unit) request(unit, first);
#pragma unroll
      for (int i = 0; i + 1 < ahead; ++i) prefetch(tokens[i]);
      for (int num_tiles = e.num_tiles(); num_tiles > 0; --num_tiles) {
        prefetch(tokens[ahead - 1]);
#pragma unroll
        for (int unit = 0; unit < 2 * units; ++unit) {
          if (unit % units == 0) begin_stage();
          device::cp_async_wait_group<2 * units - 1>();
          store(unit);
          if (unit % units == units - 1) end_stage();
          request(unit, tokens[0]);
        }
#pragma unroll
        for (int i = 0; i + 1 < ahead; ++i) tokens[i] = tokens[i + 1];
        tokens[ahead - 1] = token_of(keys, entry);
        entry = look_up(keys);
      }
      device::cp_async_wait_group<0>();  // the last request was of no tile: zeros
    }
  }

 private:
  static constexpr std::int64_t outside = -1;
  static constexpr int ahead = 3;  // tiles

  // This lane's key of the tile that is looked up next; tiles go from the last to the first, with a tree the other way.
  struct key_lookup {
    const std::int32_t* entry;  // of the block table
    std::int64_t head_offset;
    int key;       // from the first that is loaded
    int num_keys;  // that are loaded
    int slot;      // in the block
  };
  struct table_entry {
    int block;  // negative: none
    int slot;
  };
  [[nodiscard]] __device__ __forceinline__ key_lookup first_lookup(const prefill_work_tile& work,
                                                                   const kv_range& e) const {
    const int begin = max(e.begin, e.tile_begin * S::tile_keys);
    const int end = S::has_tree ? min(work.seq_len, e.tile_end * S::tile_keys) : work.seq_len;
    const int key = e.template tile_at<S>(0) * S::tile_keys + lane_;
    const int entry = key / a_.block_size;
    return {a_.block_tables + work.seq * a_.block_table_stride + entry, work.head / a_.group_size * a_.k_strides.head,
            key - begin, end - begin, key - entry * a_.block_size};
  }
  [[nodiscard]] __device__ __forceinline__ table_entry look_up(key_lookup& at) const {
    const bool valid = static_cast<unsigned>(at.key) < static_cast<unsigned>(at.num_keys);
    const table_entry entry = {valid ? __ldg(at.entry) : -1, at.slot};
    if constexpr (S::has_tree) {
      at.key += S::tile_keys;
      at.entry += entries_per_tile_;
      at.slot += slots_per_tile_;
      if (at.slot >= a_.block_size) {
        at.slot -= a_.block_size;
        ++at.entry;
      }
    } else {
      at.key -= S::tile_keys;
      at.entry -= entries_per_tile_;
      at.slot -= slots_per_tile_;
      if (at.slot < 0) {
        at.slot += a_.block_size;
        --at.entry;
      }
    }
    return entry;
  }
  // Elements from the beginning of either plane to the key.
  [[nodiscard]] __device__ __forceinline__ std::int64_t token_of(const key_lookup& keys,
                                                                 const table_entry& entry) const {
    if (entry.block < 0 || entry.block >= a_.num_blocks) return outside;  // tables of a call are not checked
    return keys.head_offset + entry.block * a_.k_strides.block + entry.slot * a_.k_strides.token;
  }
  template <class T>
  [[nodiscard]] __device__ __forceinline__ static T of_lane(T value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
  }

  // To L2: four lanes take a key of the warp's eight, 128 bytes each.
  __device__ __forceinline__ void prefetch(std::int64_t token) const {
    const std::int64_t from = of_lane(token, warp_ * 8 + lane_ / 4);
    const int dim = (lane_ & 3) * 32;
    if (from == outside || dim >= a_.head_dim) return;
    device::prefetch_l2(static_cast<const float*>(a_.k) + from + dim);
    device::prefetch_l2(static_cast<const float*>(a_.v) + from + dim);
  }

  // Units of K come first, then those of V. Commits a group.
  __device__ __forceinline__ void request(int unit, std::int64_t token) const {
    const std::uint32_t valid_keys = __ballot_sync(0xffffffffu, token != outside);
    const auto* const plane = static_cast<const float*>(unit < units ? a_.k : a_.v);
    const auto row = reinterpret_cast<std::uintptr_t>(plane + (token != outside ? token : 0));  // of this lane's key
    if (unit < units) {
      request_k(unit, row, valid_keys);
    } else {
      request_v(unit - units, row, valid_keys);
    }
    device::cp_async_commit_group();
  }
  __device__ __forceinline__ void store(int unit) const {
    uint4 x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = device::load_shared_16(place(unit, n));
    if (unit < units) {
      store_k(unit, x);
    } else {
      store_v(unit - units, x);
    }
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t place(int unit, int n) const {
    return ring_.raw() + threadIdx.x * 16 + (unit * 4 + n) * place_bytes;
  }
  // Nothing is read, and the vector becomes zero, where not valid.
  __device__ __forceinline__ static void copy(std::uint32_t to, std::uintptr_t row, int dim, bool valid) {
    device::cp_async_16(to, reinterpret_cast<const float*>(row) + dim, valid);
  }

  // Eight lanes take 128 bytes of a key of the warp's eight.
  __device__ __forceinline__ void request_k(int unit, std::uintptr_t row, std::uint32_t valid_keys) const {
    const int dim = (lane_ & 7) * 4;
#pragma unroll
    for (int i = 0; i < rows_of_k; ++i) {
      const int key = warp_ * 8 + (unit * rows_of_k + i) * 4 + lane_ / 8;
      const std::uintptr_t from = of_lane(row, key);
      const bool key_valid = (valid_keys >> key & 1) != 0;
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) {
        const bool dims_valid = c * 32 < S::min_dims || dim + c * 32 < a_.head_dim;
        copy(place(unit, i * S::chunks + c), from, dim + c * 32, key_valid && dims_valid);
      }
    }
  }
  __device__ __forceinline__ void store_k(int unit, const uint4 (&x)[4]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int key = (unit * rows_of_k + n / S::chunks) * 4 + lane_ / 8;
      const std::uint32_t to = stage() + warp_ * 1024 + key * 128 + (((lane_ & 7) ^ key) * 16);
      store_parts(to + n % S::chunks * S::chunk_bytes, x[n]);
    }
  }
  static constexpr int rows_of_k = 4 / S::chunks;  // of a thread, in a unit

  // Vector c of the eight of a row of V transposed has keys 8 · (c / 2) + c % 2, and 2, 4 and 6 after it. Four lanes
  // take four vectors of four dims at once, a warp those of 32 dims.
  __device__ __forceinline__ void request_v(int unit, std::uintptr_t row, std::uint32_t valid_keys) const {
    const int vector = vector_of_v(unit);
    const int first_key = (vector & 6) * 4 + (vector & 1);
    const std::uint32_t valid = dim_of_v() < a_.head_dim ? valid_keys >> first_key : 0;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      copy(place(units + unit, n), of_lane(row, first_key + 2 * n), dim_of_v(), (valid >> 2 * n & 1) != 0);
    }
  }
  __device__ __forceinline__ void store_v(int unit, const uint4 (&x)[4]) const {
    const auto store_row = [&](int n, const uint4& keys) {
      const int row = (dim_of_v() & 7) + n;
      store_parts(stage() + dim_of_v() / 8 * 1024 + row * 128 + ((vector_of_v(unit) ^ row) * 16), keys);
    };
    store_row(0, make_uint4(x[0].x, x[1].x, x[2].x, x[3].x));
    store_row(1, make_uint4(x[0].y, x[1].y, x[2].y, x[3].y));
    store_row(2, make_uint4(x[0].z, x[1].z, x[2].z, x[3].z));
    store_row(3, make_uint4(x[0].w, x[1].w, x[2].w, x[3].w));
  }
  [[nodiscard]] __device__ __forceinline__ int vector_of_v(int unit) const {
    return (units == 1 ? warp_ / 2 : unit) * 4 + (lane_ & 3);
  }
  [[nodiscard]] __device__ __forceinline__ int dim_of_v() const {
    return (units == 1 ? warp_ & 1 : warp_) * 32 + lane_ / 4 * 4;
  }

  __device__ __forceinline__ static void store_parts(std::uint32_t to, const uint4& x) {
    const device::tf32_pair p[4] = {split(x.x), split(x.y), split(x.z), split(x.w)};
    device::store_shared_16(to, make_uint4(p[0].large, p[1].large, p[2].large, p[3].large));
    device::store_shared_16(to + S::part_bytes, make_uint4(p[0].small, p[1].small, p[2].small, p[3].small));
  }
  [[nodiscard]] __device__ __forceinline__ static device::tf32_pair split(std::uint32_t bits) {
    return device::split_tf32(__uint_as_float(bits));
  }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t stage() const { return ring_.stage(state_.stage); }
  __device__ __forceinline__ void begin_stage() const {
    device::mbarrier_wait_parity(ring_.empty(state_.stage), state_.phase ^ 1);
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
  int entries_per_tile_, slots_per_tile_;  // the keys of a tile in whole blocks, and the rest
  pipeline_state<S::stages> state_;
};

}  // namespace bifolio::inline v0_2::cuda::prefill

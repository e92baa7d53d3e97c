// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The device side of prefill's tile scheduler (plan.hpp is the host's): the producer warp takes work tiles from the
/// counter or from the CTA's share, and hands them to the consumers through a queue in shared memory.

#include <cstdint>

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/metadata.hpp"
#include "cuda/attention/prefill/pipeline.cuh"
#include "cuda/attention/prefill/shape.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// The keys of one work tile, the same in producer and consumers.
struct kv_range {
  int tile_begin, tile_end;  // of keys
  int begin;                 // keys below it are outside every row's window; their blocks may have been freed
  // Tiles within these limits need no mask: keys that all rows attend to.
  int common_begin, common_limit;
  int seq_len;

  [[nodiscard]] __device__ __forceinline__ int num_tiles() const { return tile_end - tile_begin; }
  /// The n-th tile that is loaded and used.
  template <class Shape>
  [[nodiscard]] __device__ __forceinline__ int tile_at(int n) const {
    return Shape::has_tree ? tile_begin + n : tile_end - 1 - n;
  }
};

template <class Shape>
__device__ __forceinline__ kv_range kv_range_of(const prefill_args& a, const prefill_work_tile& work) {
  const int first_token = work.row_tile * Shape::num_consumers * a.tokens_per_warpgroup;
  const int last_token = min(work.query_len, first_token + Shape::num_consumers * a.tokens_per_warpgroup) - 1;
  const int offset = work.seq_len - work.query_len;
  kv_range e;
  e.tile_begin = work.tile_begin;
  e.tile_end = work.tile_end;
  e.seq_len = work.seq_len;
  e.common_limit = e.seq_len;
  if (a.causal) e.common_limit = min(e.common_limit, offset + first_token + 1);
  if (a.window_right >= 0) e.common_limit = min(e.common_limit, offset + first_token + a.window_right + 1);
  e.begin = a.window_left >= 0 ? max(0, offset + first_token - a.window_left) : 0;
  e.common_begin = a.window_left >= 0 ? max(0, offset + last_token - a.window_left) : 0;
  return e;
}

/// Work tiles on their way from the producer's first warp to the others, in static shared memory.
struct work_slots {
  static constexpr int num_slots = 2;  // one that is used, one that comes
  prefill_work_tile work[num_slots];
  std::uint64_t full[num_slots];   // written
  std::uint64_t empty[num_slots];  // released by every reading warp

  /// One thread; a barrier of the CTA must follow. `readers`: warps that read.
  __device__ __forceinline__ void init_barriers(int readers) {
    for (int s = 0; s < num_slots; ++s) {
      device::mbarrier_init(device::shared_address(full + s), 1);
      device::mbarrier_init(device::shared_address(empty + s), readers);
    }
    device::mbarrier_init_fence();
  }
};

/// A value that is the same in all lanes, so that the compiler knows it: what depends on it, such as the stages that
/// matrix descriptors are made from, stays in uniform registers.
[[nodiscard]] __device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffu, value, 0); }

/// The end of the producer's first warp: takes the CTA's work tiles and hands each on.
class work_source {
 public:
  __device__ __forceinline__ work_source(const prefill_args& args, work_slots& slots)
      : a_(args), slots_(slots), lane_(static_cast<int>(threadIdx.x) & 31) {
    const prefill_cta& mine = args.metadata.ctas[blockIdx.x];
    next_ = mine.next;
    end_ = mine.end;
    has_shares_ = next_ >= 0;
    if (lane_ == 0) slots_.work[0] = mine.first;
    __syncwarp();
  }

  /// Takes the next work tile, which the other warps get too. False, for them as well: there is none.
  [[nodiscard]] __device__ __forceinline__ bool next() {
    const int slot = state_.stage;
    if (!is_first_) {
      if (!has_shares_) next_ = counted();
      device::mbarrier_wait_parity(device::shared_address(slots_.empty + slot), state_.phase ^ 1);
      if (lane_ == 0) put(slots_.work[slot], next_);
      if (has_shares_) ++next_;
    }
    is_first_ = false;
    if (lane_ == 0) device::mbarrier_arrive(device::shared_address(slots_.full + slot));
    __syncwarp();
    state_.advance();
    const bool any = uniform(work().seq) >= 0;
    if (any && !has_shares_) count();
    return any;
  }
  /// The one that was taken, in shared memory, until the one after the next is.
  [[nodiscard]] __device__ __forceinline__ const prefill_work_tile& work() const {
    return slots_.work[state_.stage ^ 1];
  }
  __device__ __forceinline__ void release() const {}

 private:
  __device__ __forceinline__ void put(prefill_work_tile& to, int n) const {
    if (n >= end_) {
      to.seq = -1;
      return;
    }
    if (has_shares_) {
      to = a_.metadata.work_tiles[n];
      return;
    }
    const prefill_place place = prefill_place_of(*a_.metadata.header, n);
    to = a_.metadata.work_tiles[place.entry];
    to.head = place.head * a_.packed_heads;
  }

  // The first work tile of a CTA is that of its own number; the counter counts those after. Asked for as soon as a work
  // tile is taken, so that the answer is there when it is needed. Every work tile is followed by one question, so that
  // the last one gets num_items − 1 and sets the counter back to zero for the next launch.
  __device__ __forceinline__ void count() {
    if (lane_ == 0) before_ = atomicAdd(a_.counters, 1u);
  }
  [[nodiscard]] __device__ __forceinline__ int counted() {
    if (lane_ == 0 && before_ == static_cast<std::uint32_t>(end_ - 1)) *a_.counters = 0;
    return static_cast<int>(__shfl_sync(0xffffffffu, before_, 0) + gridDim.x);
  }

  const prefill_args& a_;
  work_slots& slots_;
  int lane_;
  int next_, end_;
  bool has_shares_;
  bool is_first_ = true;      // it is there already
  std::uint32_t before_ = 0;  // lane 0
  pipeline_state<work_slots::num_slots> state_;
};

/// The end of any other warp.
class work_queue {
 public:
  __device__ __forceinline__ explicit work_queue(work_slots& slots) : slots_(slots) {}

  /// Waits for the next work tile. False: there is none.
  [[nodiscard]] __device__ __forceinline__ bool next() {
    device::mbarrier_wait_parity(device::shared_address(slots_.full + state_.stage), state_.phase);
    return uniform(slots_.work[state_.stage].seq) >= 0;
  }
  [[nodiscard]] __device__ __forceinline__ prefill_work_tile work() const {
    prefill_work_tile work = slots_.work[state_.stage];
    for (std::int32_t* const field : {&work.seq, &work.seq_len, &work.query_start, &work.query_len, &work.row_tile,
                                      &work.head, &work.tile_begin, &work.tile_end, &work.partial}) {
      *field = uniform(*field);
    }
    return work;
  }
  /// The warp is done with it.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) device::mbarrier_arrive(device::shared_address(slots_.empty + state_.stage));
    state_.advance();
  }

 private:
  work_slots& slots_;
  pipeline_state<work_slots::num_slots> state_;
};

}  // namespace bifolio::inline v0_2::cuda::prefill

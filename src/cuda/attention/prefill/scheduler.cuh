// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The device side of prefill's tile scheduler (plan.hpp is the host's): the producer warp takes work tiles from the
/// counter or from the CTA's share, and hands them to the consumers through a queue in shared memory.

#include <cstdint>

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/pipeline.cuh"
#include "cuda/attention/prefill/plan.hpp"
#include "cuda/attention/prefill/shape.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::cuda::prefill {

/// The keys of one work tile, the same in producer and consumers.
struct kv_range {
  int tile_begin, tile_end;  // of keys
  int begin;                 // keys below it are outside every row's window; their blocks may have been freed
  int common_limit;          // keys below it are visible to all rows, as far as causality goes
};

__device__ __forceinline__ kv_range kv_range_of(const prefill_args& a, const prefill_work_tile& work) {
  const int first_token = work.row_tile * 2 * a.tokens_per_half;
  const int offset = work.seq_len - work.query_len;
  kv_range e;
  e.tile_begin = work.tile_begin;
  e.tile_end = work.tile_end;
  e.begin = a.window_left >= 0 ? max(0, offset + first_token - a.window_left) : 0;
  e.common_limit = a.causal ? min(work.seq_len, offset + first_token + 1) : work.seq_len;
  return e;
}

/// Work tiles on their way from the producer warp to the consumer warps, in static shared memory.
struct work_slots {
  static constexpr int num_slots = 2;  // one that is used, one that comes
  prefill_work_tile work[num_slots];
  std::uint64_t full[num_slots];   // written by the producer
  std::uint64_t empty[num_slots];  // read by every consumer warp

  /// One thread; a barrier of the CTA must follow.
  __device__ __forceinline__ void init_barriers() {
    for (int s = 0; s < num_slots; ++s) {
      device::mbarrier_init(device::shared_address(full + s), 1);
      device::mbarrier_init(device::shared_address(empty + s), num_consumers * 4);
    }
    device::mbarrier_init_fence();
  }
};

/// The producer warp's end: takes the CTA's work tiles and hands each on.
class work_source {
 public:
  __device__ __forceinline__ work_source(const prefill_args& args, work_slots& slots)
      : a_(args),
        slots_(slots),
        lane_(static_cast<int>(threadIdx.x) & 31),
        has_shares_(args.metadata.header->heads_in_group == 0) {
    if (has_shares_) {
      next_ = args.metadata.shares[blockIdx.x];
      end_ = args.metadata.shares[blockIdx.x + 1];
    } else {
      next_ = static_cast<int>(blockIdx.x);
      end_ = args.metadata.header->num_items;
    }
  }

  /// Takes the next work tile, which the consumers get too. False, for them as well: there is none.
  [[nodiscard]] __device__ __forceinline__ bool next() {
    if (next_ < 0) next_ = counted();
    const bool any = next_ < end_;
    const int slot = state_.stage;
    device::mbarrier_wait_parity(device::shared_address(slots_.empty + slot), state_.phase ^ 1);
    if (lane_ == 0) {
      if (any) {
        put(slots_.work[slot], next_);
      } else {
        slots_.work[slot].seq = -1;
      }
      device::mbarrier_arrive(device::shared_address(slots_.full + slot));
    }
    __syncwarp();
    state_.advance();
    if (has_shares_) {
      ++next_;
    } else if (any) {
      count();
      next_ = -1;
    }
    return any;
  }
  /// The one that was taken, in shared memory.
  [[nodiscard]] __device__ __forceinline__ const prefill_work_tile& work() const {
    return slots_.work[state_.stage ^ 1];
  }

 private:
  // Each entry of the list stands for all heads: groups of heads, in each entry after entry, for each the heads of the
  // group.
  __device__ __forceinline__ void put(prefill_work_tile& to, int n) const {
    int entry = n;
    int head = -1;
    if (!has_shares_) {
      const prefill_header header = *a_.metadata.header;
      const int group_items = header.num_work_tiles * header.heads_in_group;
      const int group = n / group_items;
      const int rest = n - group * group_items;
      entry = rest / header.heads_in_group;
      head = (group * header.heads_in_group + rest - entry * header.heads_in_group) * a_.packed_heads;
    }
    to = a_.metadata.work_tiles[entry];
    if (head >= 0) to.head = head;
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
  bool has_shares_;
  int next_, end_;            // next_ < 0: the counter says
  std::uint32_t before_ = 0;  // lane 0
  pipeline_state<work_slots::num_slots> state_;
};

/// A consumer warp's end. Work tiles stay in shared memory, because registers are short.
class work_queue {
 public:
  __device__ __forceinline__ explicit work_queue(work_slots& slots) : slots_(slots) {}

  /// Waits for the next work tile. False: there is none.
  [[nodiscard]] __device__ __forceinline__ bool next() {
    device::mbarrier_wait_parity(device::shared_address(slots_.full + state_.stage), state_.phase);
    return work().seq >= 0;
  }
  [[nodiscard]] __device__ __forceinline__ const prefill_work_tile& work() const { return slots_.work[state_.stage]; }
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

}  // namespace bifolio::cuda::prefill

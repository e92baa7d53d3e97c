// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The device side of prefill's tile scheduler (plan.hpp is the host's): the work tiles of a CTA, and the keys of each.

#include <cstdint>

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/plan.hpp"

namespace bifolio::cuda::prefill {

/// The keys of one work tile, the same in producer and consumers.
struct kv_range {
  int tile_begin, tile_end;  // of keys
  int begin;                 // keys below it are outside every row's window; their blocks may have been freed
  // Tiles within these limits need no mask: keys that all rows attend to.
  int common_begin, common_limit;
};

template <int TileKeys>
__device__ __forceinline__ kv_range kv_range_of(const prefill_args& a, const prefill_work_tile& work) {
  const int first_token = work.row_tile * prefill_tile_rows / a.packed_heads;
  const int last_token = min(work.query_len - 1, ((work.row_tile + 1) * prefill_tile_rows - 1) / a.packed_heads);
  const int offset = work.seq_len - work.query_len;
  kv_range e;
  int end = work.seq_len;
  e.common_limit = work.seq_len;
  if (a.causal) {
    end = min(end, offset + last_token + 1);
    e.common_limit = min(e.common_limit, offset + first_token + 1);
  }
  if (a.window_right >= 0) {
    end = min(end, offset + last_token + a.window_right + 1);
    e.common_limit = min(e.common_limit, offset + first_token + a.window_right + 1);
  }
  e.begin = a.window_left >= 0 ? max(0, offset + first_token - a.window_left) : 0;
  e.common_begin = a.window_left >= 0 ? max(0, offset + last_token - a.window_left) : 0;
  e.tile_begin = e.begin / TileKeys;
  e.tile_end = end > e.begin ? (end + TileKeys - 1) / TileKeys : e.tile_begin;
  return e;
}

/// Hands this CTA its work tiles; producer and consumers have one each, and go through the same list.
class tile_scheduler {
 public:
  __device__ __forceinline__ explicit tile_scheduler(const prefill_args& args)
      : num_work_tiles_(args.metadata.header->num_work_tiles), work_tiles_(args.metadata.work_tiles) {}

  [[nodiscard]] __device__ __forceinline__ bool has_work() const { return index() < num_work_tiles_; }
  [[nodiscard]] __device__ __forceinline__ prefill_work_tile work() const { return work_tiles_[index()]; }
  __device__ __forceinline__ void advance() { ++n_; }

 private:
  // Of the n-th work tile of this CTA: serpentine order through the list.
  [[nodiscard]] __device__ __forceinline__ int index() const {
    const int width = static_cast<int>(gridDim.x);
    const int column = static_cast<int>(blockIdx.x);
    return n_ * width + ((n_ & 1) != 0 ? width - 1 - column : column);
  }

  int num_work_tiles_;
  const prefill_work_tile* work_tiles_;
  int n_ = 0;
};

}  // namespace bifolio::cuda::prefill

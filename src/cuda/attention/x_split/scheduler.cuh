// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Which rows a CTA of decode on x_split computes, up to max_heads query heads of one KV head over the keys of one
/// sequence, and which partitions of the keys are visible. Scheduler, mainloop and epilogue are layers of one object:
/// as three objects that refer to each other they cost registers (head_dim 64: 112 instead of 92 spill instructions).

#include <cstdint>

#include "common/attention/visibility.hpp"
#include "cuda/attention/x_split/args.hpp"
#include "cuda/attention/x_split/shape.cuh"

namespace bifolio::inline v0_2::cuda::x_split {

/// The visible part of a partition, counted from its base; empty where first >= end.
struct key_range {
  std::int32_t first;
  std::int32_t end;
  std::int32_t from_own;  ///< of the partition's base, counted from the row's own position
};

template <class Shape>
class scheduler {
  using product = typename Shape::product;

 public:
  __device__ __forceinline__ explicit scheduler(const x_split_args& args) : args_(args) {
    const attention_kernel_args& call = args.call;
    const auto head_tiles = static_cast<unsigned>(x_split_head_tiles(call.group_size, product::on_tensor_cores));
    const unsigned of_kv_head = blockIdx.x / head_tiles;
    const auto tile = static_cast<std::int32_t>(blockIdx.x - of_kv_head * head_tiles);
    seq_ = static_cast<std::int32_t>(of_kv_head / static_cast<unsigned>(call.num_kv_heads));
    kv_head_ =
        static_cast<std::int32_t>(of_kv_head - static_cast<unsigned>(seq_) * static_cast<unsigned>(call.num_kv_heads));
    first_head_ = kv_head_ * call.group_size + tile * Shape::max_heads;
    num_heads_ = min(Shape::max_heads, call.group_size - tile * Shape::max_heads);
    token_ = call.query_start_loc[seq_];
    is_decode_ = call.query_start_loc[seq_ + 1] - token_ == 1;
    end_ = call.seq_lens[seq_];  // the row is the last position: nothing is right of it
    own_position_ = end_ - 1;
    begin_ = static_cast<std::int32_t>(attn::window_of(call).of(own_position_, end_).begin);
  }

  /// Whether the sequence has one new token; others are another kernel's.
  [[nodiscard]] __device__ __forceinline__ bool is_decode() const { return is_decode_; }

  /// The first partition that is not outside the window.
  [[nodiscard]] __device__ __forceinline__ std::int32_t first_partition() const { return begin_ / x_split_positions; }
  [[nodiscard]] __device__ __forceinline__ std::int32_t end_partition() const { return x_split_partitions(end_); }
  /// Of a partition before `end_partition`.
  [[nodiscard]] __device__ __forceinline__ key_range visible_part(std::int32_t partition) const {
    const std::int32_t base = partition * x_split_positions;
    return {max(begin_ - base, 0), min(end_ - base, x_split_positions), base - own_position_};
  }

 protected:
  const x_split_args& args_;
  std::int32_t seq_;
  std::int32_t kv_head_;
  std::int32_t first_head_;
  std::int32_t num_heads_;
  std::int64_t token_;  ///< row of q and the output
  std::int32_t own_position_;
  std::int32_t begin_;
  std::int32_t end_;
  bool is_decode_;
};

}  // namespace bifolio::inline v0_2::cuda::x_split

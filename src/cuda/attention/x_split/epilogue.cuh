// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The epilogue of decode on x_split: in v1 a CTA combines its partitions as it goes and writes finished rows, in v2 it
/// leaves a partial result per partition, which x_split_reduce combines in the same order with the same instructions.

#include <cstdint>

#include "cuda/attention/x_split/args.hpp"
#include "cuda/attention/x_split/mainloop.cuh"
#include "cuda/attention/x_split/scheduler.cuh"
#include "cuda/attention/x_split/shape.cuh"
#include "cuda/device/convert.cuh"
#include "cuda/device/softmax.cuh"

namespace bifolio::inline v0_2::cuda::x_split {

/// The partitions combined so far: states of this lane's heads, and values.
template <class Shape>
struct row_totals {
  head_state states[Shape::head_tiles][2];
  row_values<Shape> values;
};

template <class Shape>
class epilogue : public mainloop<Shape> {
  using base = mainloop<Shape>;
  using base::args_, base::seq_, base::first_head_, base::num_heads_, base::token_, base::state_of;

 public:
  using base::base;

  [[nodiscard]] static __device__ __forceinline__ row_totals<Shape> nothing() {
    row_totals<Shape> totals = {};
#pragma unroll
    for (int n = 0; n < Shape::head_tiles; ++n) totals.states[n][0].m = totals.states[n][1].m = minus_infinity();
    return totals;
  }

  /// The partial result of a partition outside the window.
  __device__ __forceinline__ void write_empty_partial(std::int32_t partition) const {
    if (thread() >= num_heads_) return;
    float* const to = partial(thread(), partition);
    to[0] = minus_infinity();
    to[1] = 0.0f;
  }
  /// The partial result of the current partition.
  __device__ __forceinline__ void write_partial(std::int32_t partition, const row_values<Shape>& values) const {
    if (thread() < num_heads_) {
      const head_state state = state_of(thread());
      float* const to = partial(thread(), partition);
      to[0] = state.m;
      to[1] = state.l;
    }
#pragma unroll
    for (int n = 0; n < Shape::head_tiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int head = n * product_heads + 2 * lane_chunk() + e % 2;
        if (head >= num_heads_) continue;
        float* const to = partial(head, partition) + 2;
#pragma unroll
        for (int d = 0; d < Shape::dim_tiles; ++d) to[dim_of<Shape>(d, e / 2)] = values.at[d][n][e];
      }
    }
  }
  /// Combines the current partition with the partitions before it.
  __device__ __forceinline__ void combine(row_totals<Shape>& totals, const row_values<Shape>& own) const {
#pragma unroll
    for (int n = 0; n < Shape::head_tiles; ++n) {
      if (n * product_heads >= num_heads_) break;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        head_state& total = totals.states[n][c];
        const head_state state = state_of(n * product_heads + 2 * lane_chunk() + c);
        const attn::combine_weights<float> w = attn::combine_any_state<device_math>(total.m, total.l, state.m, state.l);
#pragma unroll
        for (int d = 0; d < Shape::dim_tiles; ++d) {
#pragma unroll
          for (int e = c; e < 4; e += 2) {
            totals.values.at[d][n][e] = attn::combine_value<device_math>(w, totals.values.at[d][n][e], own.at[d][n][e]);
          }
        }
      }
    }
  }
  /// Output and LSE of all rows, from what was combined.
  __device__ __forceinline__ void write_rows(const row_totals<Shape>& totals) const {
    const attention_kernel_args& call = args_.call;
#pragma unroll
    for (int n = 0; n < Shape::head_tiles; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = n * product_heads + 2 * lane_chunk() + c;
        if (row >= num_heads_) continue;
        const std::int32_t head = first_head_ + row;
        const bool has_sink = call.sinks != nullptr;
        const head_state& total = totals.states[n][c];
        const auto finish =
            attn::finish_row<device_math>(total.m, total.l, has_sink, has_sink ? call.sinks[head] : 0.0f);
        if (warp() == 0 && lane_row() == 0 && call.lse != nullptr) {
          call.lse[token_ * call.num_q_heads + head] = finish.lse;
        }
        const std::int64_t to = token_ * call.out_token_stride + head * call.out_head_stride;
#pragma unroll
        for (int d = 0; d < Shape::dim_tiles; ++d) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            store_from_float(call.out, to + dim_of<Shape>(d, r), call.out_type,
                             attn::output_of<device_math>(finish, totals.values.at[d][n][2 * r + c]));
          }
        }
      }
    }
  }

 private:
  [[nodiscard]] __device__ __forceinline__ float* partial(int head, std::int32_t partition) const {
    const std::int64_t row = static_cast<std::int64_t>(seq_) * args_.call.num_q_heads + first_head_ + head;
    return x_split_partial(args_, row, partition);
  }
};

}  // namespace bifolio::inline v0_2::cuda::x_split

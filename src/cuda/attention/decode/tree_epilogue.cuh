// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The epilogue of shapes of 16-bit types, which split dims: a work tile's rows go through a free stage, so that each
/// thread stores runs of 8 columns, to the output or, where other CTAs have a part of the output tile, to the
/// workspace.

#include <cstdint>

#include "cuda/attention/decode/combine.cuh"
#include "cuda/attention/decode/output.cuh"
#include "cuda/attention/decode/scheduler.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/attention/decode/tree_mainloop.cuh"

namespace bifolio::inline v0_2::cuda::decode {

template <class T, class Shape, class Scheduler>
class tree_epilogue {
  using S = Shape;
  static constexpr int row_threads = S::threads / decode_tile_rows;
  static constexpr int column_runs = (S::head_dim + row_threads * 8 - 1) / (row_threads * 8);

 public:
  __device__ __forceinline__ tree_epilogue(const decode_args& args, const Scheduler& scheduler, char* shared)
      : a_(args),
        scheduler_(scheduler),
        combine_(args, scheduler, shared),
        partials_(args.workspace, scheduler.workspace_partials()),
        shared_(shared),
        row_sums_(reinterpret_cast<float2*>(shared + S::shared.row_sums)) {}

  /// Takes all leaves of w.
  __device__ void store(const work_tile& w, const decode_seq& s, const tree_rows<S>& tree, int free_stage) {
    const output_rows<T, Shape> rows(a_, w, s);
    __syncthreads();  // every warp has read the last tile
    share(tree, free_stage);
    __syncthreads();
    const int row = static_cast<int>(threadIdx.x) / row_threads;
    const int row_thread = static_cast<int>(threadIdx.x) % row_threads;
    const bool is_whole = scheduler_.is_whole(w, s);
    const int partial = is_whole ? 0 : scheduler_.own_partial(w, s);
    if (row < rows.num_rows()) {
      const auto [max, sum] = row_sums_[row];
      const auto place = rows.place_of(row);
      const float factor = is_whole ? rows.finish(place, max, sum, row_thread == 0) : 0;
#pragma unroll
      for (int run = 0; run < column_runs; ++run) {
        const int column = (run * row_threads + row_thread) * 8;
        if (column >= S::row_dims(a_)) break;
        const auto* const from = reinterpret_cast<const float4*>(place_of(free_stage, row, column));
        if (is_whole) {
          rows.store(place, column, from[0], from[1], factor);
        } else {
          auto* const to = reinterpret_cast<float4*>(partials_.row(partial, row) + column);
          __stcg(to, from[0]);
          __stcg(to + 1, from[1]);
        }
      }
      if (!is_whole && row_thread == 0) {
        __stcg(partials_.sums + partial * decode_tile_rows + row, make_float2(max, sum));
        if (row == 0) __stcg(partials_.nodes + partial, w.node);
      }
    }
    // Where nothing arrives the next tile's barrier comes before the stage and the row sums are written again.
    if (!is_whole && scheduler_.arrives(w)) combine_.arrive(w, s, rows);
  }

 private:
  [[nodiscard]] __device__ __forceinline__ float* place_of(int stage, int row, int column) const {
    return reinterpret_cast<float*>(shared_ + S::shared.stages + stage * S::stage_bytes) + row * S::reduced_row +
           (S::reduced_swizzled ? column ^ ((row & 7) * 8) : column);
  }

  __device__ __forceinline__ void share(const tree_rows<S>& tree, int stage) {
    const int lane = static_cast<int>(threadIdx.x) & 31;
    const int warp = static_cast<int>(threadIdx.x) >> 5;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane / 4 + 8 * i;
      if (warp == 0 && (lane & 3) == 0) row_sums_[row] = make_float2(tree.max[i], tree.sum[i]);
#pragma unroll
      for (int n = 0; n < tree_rows<S>::n_tiles; ++n) {
        const int column = (warp * tree_rows<S>::n_tiles + n) * 8 + (lane & 3) * 2;
        if (S::n_tiles % (2 * S::warps) != 0 && column >= S::head_dim) break;
        *reinterpret_cast<float2*>(place_of(stage, row, column)) =
            make_float2(tree.out[n][2 * i], tree.out[n][2 * i + 1]);
      }
    }
  }

  const decode_args& a_;
  const Scheduler& scheduler_;
  split_combine<T, Shape, Scheduler> combine_;
  partial_results<Shape> partials_;
  char* shared_;
  float2* row_sums_;
};

}  // namespace bifolio::inline v0_2::cuda::decode

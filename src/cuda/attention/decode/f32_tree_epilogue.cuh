// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The epilogue of float32 in deterministic plans. Rows are columns of products, and go to the output or, where other
/// CTAs have a part of the output tile, to the workspace as the lanes have them, in runs of 64 bytes: no warp waits for
/// another, and a part's pieces cost little more than their stores.

#include <cstdint>

#include "cuda/attention/decode/combine.cuh"
#include "cuda/attention/decode/output.cuh"
#include "cuda/attention/decode/scheduler.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/attention/decode/tree_mainloop.cuh"

namespace bifolio::inline v0_2::cuda::decode {

template <class Shape, class Scheduler>
class f32_tree_epilogue {
  using S = Shape;
  using rows_type = output_rows<float, Shape>;
  static constexpr int dim_tiles = tree_rows<S>::dim_tiles;

 public:
  __device__ __forceinline__ f32_tree_epilogue(const decode_args& args, const Scheduler& scheduler, char* shared)
      : a_(args),
        scheduler_(scheduler),
        combine_(args, scheduler, shared),
        partials_(args.workspace, scheduler.workspace_partials()),
        lane_(static_cast<int>(threadIdx.x) & 31),
        warp_(static_cast<int>(threadIdx.x) >> 5) {}

  /// A piece of w's part of the output tile, or all of the output tile.
  __device__ __forceinline__ void store(const work_tile& w, const decode_seq& s, const tree_rows<S>& tree) const {
    const rows_type rows(a_, w, s);
    const bool is_whole = scheduler_.is_whole(w, s);
    const int partial = is_whole ? 0 : scheduler_.own_partial(w, s);
#pragma unroll
    for (int c = 0; c < S::tree_columns; ++c) store(rows, tree.columns[c], c * decode_few_rows, is_whole, partial);
    if (!is_whole && threadIdx.x == 0) __stcg(partials_.nodes + partial, w.node);
  }
  /// After the last piece. Not where pieces are stored: what the next tile needs would be live in the combine.
  __device__ __forceinline__ void arrive(const work_tile& w, const decode_seq& s) {
    if (!scheduler_.is_whole(w, s)) combine_.arrive(w, s, rows_type(a_, w, s));
  }

 private:
  // Eight lanes have 16 dims of a row.
  __device__ __forceinline__ void store(const rows_type& rows, const typename tree_rows<S>::group& tree, int first_row,
                                        bool is_whole, int partial) const {
    const bool has_sums = warp_ == 0 && lane_ < 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + (lane_ & 3) * 2 + i;
      if (row >= rows.num_rows()) break;
      const auto place = rows.place_of(row);
      const float factor = is_whole ? rows.finish(place, tree.max[i], tree.sum[i], has_sums) : 0;
      if (!is_whole && has_sums) {
        __stcg(partials_.sums + partial * decode_tile_rows + row, make_float2(tree.max[i], tree.sum[i]));
      }
#pragma unroll
      for (int n = 0; n < dim_tiles; ++n) {
        const int column = (warp_ * dim_tiles + n) * 16 + (lane_ >> 2) * 2;
        if (column >= S::row_dims(a_)) break;
        const float2 x = make_float2(tree.out[n][i], tree.out[n][2 + i]);
        if (is_whole) {
          rows.store(place, column, x, factor);
        } else {
          __stcg(reinterpret_cast<float2*>(partials_.row(partial, row) + column), x);
        }
      }
    }
  }

  const decode_args& a_;
  const Scheduler& scheduler_;
  split_combine<float, Shape, Scheduler> combine_;
  partial_results<Shape> partials_;
  int lane_, warp_;
};

}  // namespace bifolio::inline v0_2::cuda::decode

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The epilogue of decode: reduces the accumulators over the warps of the CTA and writes rows that are complete to the
/// output, others as a partial result to the workspace, for the combine. With a fixed combine tree a CTA may have
/// several leaves of an output tile. It then combines each with the running result of its node, and complete nodes into
/// that of the root.

#include <cstdint>
#include <type_traits>

#include "cuda/attention/decode/coded_mainloop.cuh"
#include "cuda/attention/decode/combine.cuh"
#include "cuda/attention/decode/mainloop.cuh"
#include "cuda/attention/decode/output.cuh"
#include "cuda/attention/decode/scheduler.cuh"
#include "cuda/attention/decode/shape.hpp"

namespace bifolio::inline v0_2::cuda::decode {

/// What a leaf that ends before KV tile `next_tile` is in the combine tree, for a CTA that combines several.
struct leaf_place {
  bool begins_node = true;  // of the leaves that this CTA has
  bool ends_node = true;
  bool begins_root = true;

  leaf_place() = default;
  __device__ __forceinline__ leaf_place(const work_tile& w, int next_tile, bool is_last) {
    const int leaf = (next_tile - 1) / decode_leaf_tiles;
    const int first_leaf = w.tile / decode_leaf_tiles;
    begins_node = leaf % decode_combine_fan_in == 0 || leaf == first_leaf;
    ends_node = leaf % decode_combine_fan_in == decode_combine_fan_in - 1 || is_last;
    begins_root = leaf / decode_combine_fan_in == first_leaf / decode_combine_fan_in;
  }
};

template <class Shape>
using accumulators_of = std::conditional_t<Shape::is_coded, coded_accumulators<Shape>, accumulators<Shape>>;

template <class T, class Shape, class Scheduler>
class epilogue {
  using S = Shape;
  static constexpr int row_groups = accumulators_of<S>::row_groups;

 public:
  __device__ __forceinline__ epilogue(const decode_args& args, const Scheduler& scheduler, char* shared)
      : a_(args),
        scheduler_(scheduler),
        combine_(args, scheduler, shared),
        partials_(args.workspace, scheduler.workspace_partials()),
        shared_(shared),
        row_sums_(reinterpret_cast<float2*>(shared + S::shared.row_sums)),
        lane_(static_cast<int>(threadIdx.x) & 31),
        warp_(static_cast<int>(threadIdx.x) >> 5) {}

  /// Takes what the warps have accumulated of w up to KV tile `next_tile`, nothing if `any` is false. `free_stage`: of
  /// the mainloop, for the reduction.
  __device__ void store(const work_tile& w, const decode_seq& s, accumulators_of<S>& acc, int next_tile, bool any,
                        int free_stage) {
    const output_rows<T, Shape> rows(a_, w, s);
    share_row_sums(acc, rows.num_rows());
    __syncthreads();  // also: every warp has read the last tile
    if (any) share_outputs(acc, 0, rows.num_rows(), free_stage);

    // From here a thread has one row and some runs of 8 columns.
    constexpr int row_threads = S::threads / decode_tile_rows;
    constexpr int column_runs = (S::head_dim + row_threads * 8 - 1) / (row_threads * 8);
    const int row = static_cast<int>(threadIdx.x) / row_threads;
    const int row_thread = static_cast<int>(threadIdx.x) % row_threads;
    float m = -INFINITY;
#pragma unroll
    for (int v = 0; v < S::warps; ++v) m = fmaxf(m, row_sums_[v * decode_tile_rows + row].x);
    float l = 0;
#pragma unroll
    for (int v = 0; v < S::warps; ++v) {
      const float2 part = row_sums_[v * decode_tile_rows + row];
      // Without a maximum the sum is 0, or NaN where every score is.
      l += part.x == -INFINITY ? part.y : part.y * device::exp2_fast(part.x - m);
    }
    const bool is_last = !Scheduler::has_fixed_tree || next_tile >= w.tile_end;
    const bool is_whole = scheduler_.is_whole(w, s);
    const int partial = is_whole ? 0 : scheduler_.own_partial(w, s);
    const auto place = rows.place_of(row);

    leaf_place leaf;
    combination with_node(-INFINITY, m);
    combination with_root = with_node;
    float* running_node = nullptr;
    float* running_root = nullptr;
    if constexpr (Scheduler::has_fixed_tree) {
      if (any) leaf = leaf_place(w, next_tile, is_last);
      // Running results are in the CTA's own part of the workspace, where every thread reads what it wrote itself.
      with_node = combination(leaf.begins_node ? -INFINITY : node_max_, m);
      if (!leaf.begins_node) {
        l = with_node.of(node_sum_, l);
        m = with_node.max;
      }
      node_max_ = m;
      node_sum_ = l;
      with_root = combination(leaf.begins_root ? -INFINITY : root_max_, m);
      if (leaf.ends_node) {
        if (!leaf.begins_root) {
          l = with_root.of(root_sum_, l);
          m = with_root.max;
        }
        root_max_ = m;
        root_sum_ = l;
      }
      running_node = partials_.row(scheduler_.running_partial(0), row);
      running_root = partials_.row(scheduler_.running_partial(1), row);
    }
    __syncthreads();
    // Of codes a stage holds half of the rows at once.
    for (int first_row = 0; first_row < rows.num_rows(); first_row += S::reduced_rows) {
      if (S::reduced_rows < decode_tile_rows && first_row > 0) {
        __syncthreads();  // the rows before have been read
        if (any) share_outputs(acc, first_row, rows.num_rows(), free_stage);
        __syncthreads();
      }
      if (row < first_row || row >= min(first_row + S::reduced_rows, rows.num_rows())) continue;
      const bool is_first_thread = row_thread == 0;
      const float factor = is_whole && is_last ? rows.finish(place, m, l, is_first_thread) : 0;
#pragma unroll
      for (int run = 0; run < column_runs; ++run) {
        const int column = (run * row_threads + row_thread) * 8;
        if (column >= S::row_dims(a_)) continue;
        float4 lo = make_float4(0, 0, 0, 0);
        float4 hi = lo;
        if (any) sum_over_warps(free_stage, row - first_row, column, lo, hi);
        if constexpr (Scheduler::has_fixed_tree) {
          if (!leaf.begins_node) combine_running(with_node, running_node + column, lo, hi);
          if (leaf.ends_node && !leaf.begins_root) combine_running(with_root, running_root + column, lo, hi);
        }
        if (Scheduler::has_fixed_tree && !is_last) {
          store_partial((leaf.ends_node ? running_root : running_node) + column, lo, hi);
        } else if (is_whole) {
          rows.store(place, column, lo, hi, factor);
        } else {
          store_partial(partials_.row(partial, row) + column, lo, hi);
        }
      }
      if (is_last && !is_whole && is_first_thread) {
        __stcg(partials_.sums + partial * decode_tile_rows + row, make_float2(m, l));
        if constexpr (Scheduler::has_fixed_tree) {
          if (row == 0) __stcg(partials_.nodes + partial, w.node);
        }
      }
    }
    if (is_last && !is_whole && scheduler_.arrives(w)) {
      combine_.arrive(w, s, rows);
    } else {
      __syncthreads();  // the stage and the row sums are written again
    }
  }

 private:
  // Sums over lanes; maximum and sum of this warp's rows to shared memory.
  __device__ __forceinline__ void share_row_sums(accumulators_of<S>& acc, [[maybe_unused]] int num_rows) {
    if constexpr (S::by_fma) {
      const bool wide = num_rows > 4;
      acc.sum += __shfl_xor_sync(0xffffffffu, acc.sum, 4);
      acc.sum += __shfl_xor_sync(0xffffffffu, acc.sum, 16);
      const float other = __shfl_xor_sync(0xffffffffu, acc.sum, 8);
      if (!wide) acc.sum += other;
      if ((lane_ & 20) == 0) {
        row_sums_[warp_ * decode_tile_rows + fma_row_of(lane_, wide)] = make_float2(acc.max, acc.sum);
      }
      return;
    } else {
      share_sums_of_products(acc);
    }
  }
  __device__ __forceinline__ void share_sums_of_products(accumulators_of<S>& acc) {
#pragma unroll
    for (int i = 0; i < row_groups; ++i) {
      acc.sum[i] += __shfl_xor_sync(0xffffffffu, acc.sum[i], 1);
      acc.sum[i] += __shfl_xor_sync(0xffffffffu, acc.sum[i], 2);
      if ((lane_ & 3) == 0) {
        row_sums_[warp_ * decode_tile_rows + lane_ / 4 + 8 * i] = make_float2(acc.max[i], acc.sum[i]);
      }
      if constexpr (S::is_coded) {
        if (S::has_wide_values || a_.v_type != dtype::u8) continue;
        acc.shift[i] += __shfl_xor_sync(0xffffffffu, acc.shift[i], 1);
        acc.shift[i] += __shfl_xor_sync(0xffffffffu, acc.shift[i], 2);
      }
    }
  }

  // Outputs of this warp from row `first_row` on, scaled to the maximum of all warps, to the free stage, which has room
  // for reduced_rows of four warps.
  __device__ __forceinline__ void share_outputs(const accumulators_of<S>& acc, int first_row, int num_rows, int stage) {
    if constexpr (S::by_fma) {
      // Of eight warps the last four first.
#pragma unroll
      for (int half = S::warps / 4 - 1; half >= 0; --half) {
        if (warp_ / 4 == half) share_fma_rows(acc, num_rows, stage, half != S::warps / 4 - 1);
        if (half > 0) __syncthreads();
      }
    } else {
      share_products(acc, first_row, num_rows, stage);
    }
  }

  // A warp's output by ordinary multiplications. `adds`: to what is there.
  __device__ __forceinline__ void share_fma_rows(const accumulators_of<S>& acc, int num_rows, int stage, bool adds) {
    constexpr int lanes = accumulators_of<S>::lanes;
    const int own_row = fma_row_of(lane_, num_rows > 4);
    float m = -INFINITY;
#pragma unroll
    for (int w = 0; w < S::warps; ++w) m = fmaxf(m, row_sums_[w * decode_tile_rows + own_row].x);
    const float own_weight = acc.max == -INFINITY ? 0.0f : device::exp2_fast(acc.max - m);
#pragma unroll
    for (int r = 0; r < decode_few_rows; ++r) {
      if (r >= num_rows) break;
      const float weight = __shfl_sync(0xffffffffu, own_weight, fma_lane_of(r));
      float x[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        x[c] = acc.out[r][c];
        if constexpr (lanes == 16) x[c] += __shfl_xor_sync(0xffffffffu, x[c], 16);
        x[c] *= weight;
      }
      if (lane_ >= lanes) continue;
      auto& place = *reinterpret_cast<float4*>(warp_output(stage, warp_ & 3, r, lane_ * 4));
      float4 before = make_float4(0, 0, 0, 0);
      if (adds) before = place;
      place = make_float4(before.x + x[0], before.y + x[1], before.z + x[2], before.w + x[3]);
    }
  }

  __device__ __forceinline__ void share_products(const accumulators_of<S>& acc, int first_row, int num_rows,
                                                 int stage) {
    float weight[row_groups];
#pragma unroll
    for (int i = 0; i < row_groups; ++i) {
      const int row = lane_ / 4 + 8 * i;
      float m = -INFINITY;
#pragma unroll
      for (int w = 0; w < S::warps; ++w) m = fmaxf(m, row_sums_[w * decode_tile_rows + row].x);
      weight[i] = acc.max[i] == -INFINITY ? 0.0f : device::exp2_fast(acc.max[i] - m);
    }
    // Of eight warps the last four first.
#pragma unroll
    for (int half = S::warps / 4 - 1; half >= 0; --half) {
      const bool adds = half != S::warps / 4 - 1;
      if (warp_ / 4 == half) {
        if constexpr (S::is_coded) {
#pragma unroll
          for (int g = 0; g < row_groups; ++g) {
            if (g * decode_few_rows == first_row) share_group(acc, g, weight[g], num_rows - first_row, stage, adds);
          }
        } else {
          share_rows(acc, weight, num_rows, stage, adds);
        }
      }
      if (half > 0) __syncthreads();
    }
  }

  // `adds`: to what is there.
  __device__ __forceinline__ void share_rows(const accumulators_of<S>& acc, const float (&weight)[2], int num_rows,
                                             int stage, bool adds) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane_ / 4 + 8 * i;
      if (row >= num_rows) continue;
#pragma unroll
      for (int n = 0; n < S::n_tiles; ++n) {
        float2& place = *reinterpret_cast<float2*>(warp_output(stage, warp_ & 3, row, n * 8 + (lane_ & 3) * 2));
        const float x = acc.out[n][2 * i];
        const float y = acc.out[n][2 * i + 1];
        place = adds ? make_float2(__fmaf_rn(x, weight[i], place.x), __fmaf_rn(y, weight[i], place.y))
                     : make_float2(__fmul_rn(x, weight[i]), __fmul_rn(y, weight[i]));
      }
    }
  }

  // The rows of group g of codes.
  __device__ __forceinline__ void share_group(const accumulators_of<S>& acc, int g, float weight, int num_rows,
                                              int stage, bool adds) {
    const float own_unit = weight * acc.units.unit(g);
    const float units[2] = {of_output_row(own_unit, lane_, 0), of_output_row(own_unit, lane_, 1)};
    const bool has_shifts = !S::has_wide_values && a_.v_type == dtype::u8;
    float shifts[2] = {};
    if (has_shifts) {
      const float own_shift = weight * acc.shift[g];
      for (int r = 0; r < 2; ++r) shifts[r] = of_output_row(own_shift, lane_, r);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 2 * (lane_ & 3) + r;
      if (row >= num_rows) continue;
#pragma unroll
      for (int n = 0; n < S::row_vectors; ++n) {
        const float x = acc.out[g][n][r];
        const float y = acc.out[g][n][2 + r];
        if constexpr (S::has_wide_values) {
          float& first = *warp_output(stage, warp_ & 3, row, n * 16 + lane_ / 4);
          float& second = *warp_output(stage, warp_ & 3, row, n * 16 + lane_ / 4 + 8);
          first = adds ? __fmaf_rn(x, units[r], first) : __fmul_rn(x, units[r]);
          second = adds ? __fmaf_rn(y, units[r], second) : __fmul_rn(y, units[r]);
          continue;
        }
        auto& place = *reinterpret_cast<float2*>(warp_output(stage, warp_ & 3, row, n * 16 + lane_ / 4 * 2));
        // The instructions of types of 16 bits, for the same bits.
        float2 sum = adds ? make_float2(__fmaf_rn(x, units[r], place.x), __fmaf_rn(y, units[r], place.y))
                          : make_float2(__fmul_rn(x, units[r]), __fmul_rn(y, units[r]));
        if (has_shifts) sum = make_float2(sum.x + shifts[r], sum.y + shifts[r]);
        place = sum;
      }
    }
  }

  // Where (row, column) of a warp's output is in the stage.
  [[nodiscard]] __device__ __forceinline__ float* warp_output(int stage, int warp, int row, int column) const {
    return reinterpret_cast<float*>(shared_ + S::shared.stages + stage * S::stage_bytes) +
           (warp * S::reduced_rows + row) * S::reduced_row + (S::reduced_swizzled ? column ^ ((row & 7) * 8) : column);
  }

  __device__ __forceinline__ void sum_over_warps(int stage, int row, int column, float4& lo, float4& hi) const {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const float4 a = *reinterpret_cast<const float4*>(warp_output(stage, w, row, column));
      const float4 b = *reinterpret_cast<const float4*>(warp_output(stage, w, row, column) + 4);
      lo.x += a.x, lo.y += a.y, lo.z += a.z, lo.w += a.w;
      hi.x += b.x, hi.y += b.y, hi.z += b.z, hi.w += b.w;
    }
  }

  // lo, hi ← 8 columns of a running result and those.
  __device__ __forceinline__ static void combine_running(const combination& f, const float* running, float4& lo,
                                                         float4& hi) {
    lo = f.of(__ldcg(reinterpret_cast<const float4*>(running)), lo);
    hi = f.of(__ldcg(reinterpret_cast<const float4*>(running + 4)), hi);
  }
  __device__ __forceinline__ static void store_partial(float* to, const float4& lo, const float4& hi) {
    __stcg(reinterpret_cast<float4*>(to), lo);
    __stcg(reinterpret_cast<float4*>(to + 4), hi);
  }

  const decode_args& a_;
  const Scheduler& scheduler_;
  split_combine<T, Shape, Scheduler> combine_;
  partial_results<Shape> partials_;
  char* shared_;
  float2* row_sums_;
  int lane_, warp_;
  float node_max_, node_sum_, root_max_, root_sum_;  // running, of this thread's row
};

}  // namespace bifolio::inline v0_2::cuda::decode

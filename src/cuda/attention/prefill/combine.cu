// SPDX-License-Identifier: Apache-2.0
// Combines the partial results of row tiles that were computed in parts: a warp takes 128 columns of a row, and adds
// their parts in the order of their keys; in deterministic plans from the last to the first, one after another, as
// part_mainloop.cuh does. Of few rows in many parts it takes fewer columns, and groups of its lanes share the parts.
// Launched after the kernel that wrote them; without partial results there is nothing to do.

#include <cstdint>
#include <type_traits>

#include "cuda/attention/combine_tree.cuh"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/launch.hpp"
#include "cuda/attention/prefill/results.cuh"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/host/plan_input.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {
namespace prefill {
namespace {

constexpr int combine_threads = 32 * prefill_combine_warps;
constexpr int log_combine_columns = 7;
constexpr int combine_columns = prefill_combine_columns;
static_assert(combine_columns == 1 << log_combine_columns);
constexpr int combine_batch = prefill_combine_batch;

/// Columns of one row of a row tile in parts. Of 2^log_groups groups of lanes each has all columns.
template <class T>
class row_combine {
 public:
  __device__ __forceinline__ row_combine(const prefill_args& args, const prefill_split_output& output, int row,
                                         int first_column, int log_groups)
      : a_(args),
        partials_(args),
        output_(output),
        row_(row),
        log_groups_(log_groups),
        group_((static_cast<int>(threadIdx.x) & 31) >> (5 - log_groups)),
        column_(first_column + (static_cast<int>(threadIdx.x) & ((32 >> log_groups) - 1)) * 4),
        has_columns_(column_ < args.head_dim) {
    if (!has_columns_) column_ = 0;  // the lane goes along
  }

  __device__ __forceinline__ void run(const prefill_work_tile& work) const {
    const int warpgroup = row_ / prefill_warpgroup_rows;
    const int row_of_warpgroup = row_ - warpgroup * prefill_warpgroup_rows;
    const int of_warpgroup = row_of_warpgroup / a_.packed_heads;
    const int first = (a_.tile_rows / prefill_warpgroup_rows * work.row_tile + warpgroup) * a_.tokens_per_warpgroup;
    const int token = first + of_warpgroup;
    if (of_warpgroup >= a_.tokens_per_warpgroup || token >= work.query_len) return;
    const int head = work.head + row_of_warpgroup - of_warpgroup * a_.packed_heads;

    const float* const sink = a_.sinks != nullptr ? a_.sinks + head : nullptr;
    const std::int64_t at = work.query_start + token;
    T* const out = static_cast<T*>(a_.out) + at * a_.out_token_stride + head * a_.out_head_stride;
    float4 x;
    row_sums sums = a_.deterministic ? values_in_order(x) : values(x);
    for (int lanes = 16; lanes >= 32 >> log_groups_; lanes /= 2) add_lanes(lanes, sums, x);
    if (group_ != 0 || !has_columns_) return;
    const finished_row finished(sums, sink, static_value_scale(a_, head));
    x = make_float4(x.x * finished.factor, x.y * finished.factor, x.z * finished.factor, x.w * finished.factor);
    if constexpr (std::is_same_v<T, float>) {
      *reinterpret_cast<float4*>(out + column_) = x;
    } else {
      *reinterpret_cast<uint2*>(out + column_) = make_uint2(device::pack<T>(x.x, x.y), device::pack<T>(x.z, x.w));
    }
    if (a_.lse != nullptr && column_ == 0) a_.lse[at * a_.num_q_heads + head] = finished.lse;
  }

 private:
  // A part of a row may have no key that the row attends to.
  [[nodiscard]] __device__ __forceinline__ static float weight(float max, float top) {
    return max == -INFINITY ? 0.0f : device::exp2_fast(max - top);
  }

  static __device__ __forceinline__ void add(float4& total, const float4& x, float w) {
    total.x = fmaf(x.x, w, total.x);
    total.y = fmaf(x.y, w, total.y);
    total.z = fmaf(x.z, w, total.z);
    total.w = fmaf(x.w, w, total.w);
  }
  // Adds what another lane has of the same columns.
  static __device__ __forceinline__ void add_lanes(int lanes, row_sums& row, float4& total) {
    const auto of_other = [&](float x) { return __shfl_xor_sync(0xffffffffu, x, lanes); };
    const row_sums other = {of_other(row.max), of_other(row.sum)};
    const float4 more = make_float4(of_other(total.x), of_other(total.y), of_other(total.z), of_other(total.w));
    const float top = fmaxf(row.max, other.max);
    const float keep = weight(row.max, top);
    const float w = weight(other.max, top);
    row = {top, fmaf(other.sum, w, row.sum * keep)};
    total = make_float4(total.x * keep, total.y * keep, total.z * keep, total.w * keep);
    add(total, more, w);
  }

  // Four columns of the sum of the group's parts, and their maxima and sums as one.
  [[nodiscard]] __device__ __forceinline__ row_sums values(float4& total) const {
    row_sums row = {-INFINITY, 0};
    total = make_float4(0, 0, 0, 0);
    const int share = (output_.num_partials + (1 << log_groups_) - 1) >> log_groups_;
    const int end = min((group_ + 1) * share, output_.num_partials);
    for (int base = group_ * share; base < end; base += combine_batch) {
      float2 sums[combine_batch];
      float4 o[combine_batch];
#pragma unroll
      for (int i = 0; i < combine_batch; ++i) {  // all loads of a batch are issued before the first is used
        // Past the end: the last one again, with no weight.
        const int partial = output_.first_partial + min(base + i, end - 1);
        sums[i] = __ldcg(partials_.sums(partial, row_));
        o[i] = __ldcg(reinterpret_cast<const float4*>(partials_.row(partial, row_) + column_));
      }
      float top = row.max;
#pragma unroll
      for (int i = 0; i < combine_batch; ++i) top = fmaxf(top, sums[i].x);
      const float keep = weight(row.max, top);
      row = {top, row.sum * keep};
      total = make_float4(total.x * keep, total.y * keep, total.z * keep, total.w * keep);
#pragma unroll
      for (int i = 0; i < combine_batch; ++i) {
        if (base + i >= end) continue;
        const float w = weight(sums[i].x, top);
        row.sum = fmaf(sums[i].y, w, row.sum);
        add(total, o[i], w);
      }
    }
    return row;
  }

  // The same for deterministic plans.
  [[nodiscard]] __device__ __forceinline__ row_sums values_in_order(float4& total) const {
    row_sums row = {-INFINITY, 0};
    total = make_float4(0, 0, 0, 0);
    for (int end = output_.num_partials; end > 0; end -= combine_batch) {
      float2 sums[combine_batch];
      float4 o[combine_batch];
#pragma unroll
      for (int i = 0; i < combine_batch; ++i) {
        const int partial = output_.first_partial + max(end - 1 - i, 0) * output_.partial_rows;
        sums[i] = __ldcg(partials_.sums(partial, row_));
        o[i] = __ldcg(reinterpret_cast<const float4*>(partials_.row(partial, row_) + column_));
      }
#pragma unroll
      for (int i = 0; i < combine_batch; ++i) {
        if (i >= end) continue;
        const tree::combination both(row.max, sums[i].x);
        row = {both.max, both.of(row.sum, sums[i].y)};
        total = both.of(total, o[i]);
      }
    }
    return row;
  }

  const prefill_args& a_;
  partial_results partials_;
  prefill_split_output output_;
  int row_, log_groups_, group_, column_;
  bool has_columns_;
};

// Rows of a row tile that a step can use: of each consumer warpgroup the first ones.
[[nodiscard]] __device__ __forceinline__ int used_rows(const prefill_args& a) {
  return a.tile_rows / prefill_warpgroup_rows * a.tokens_per_warpgroup * a.packed_heads;
}
[[nodiscard]] __device__ __forceinline__ int row_of(const prefill_args& a, int used_row) {
  const int of_warpgroup = a.tokens_per_warpgroup * a.packed_heads;
  const int warpgroup = used_row / of_warpgroup;
  return warpgroup * prefill_warpgroup_rows + used_row - warpgroup * of_warpgroup;
}

template <class T>
__global__ void __launch_bounds__(combine_threads) combine_kernel(const __grid_constant__ prefill_args args) {
  device::grid_dependency_launch();
  // The plan was uploaded before the kernel ahead of this one started; the partial results are that kernel's.
  const prefill_header header = *args.metadata.header;
  const int log_groups = header.log_combine_groups;
  const int columns = combine_columns >> log_groups;                                       // of a piece
  const int pieces = (args.head_dim + columns - 1) >> (log_combine_columns - log_groups);  // of a row
  const int num_warps = static_cast<int>(gridDim.x) * prefill_combine_warps;
  // Rows that no step uses are passed over where the grid has not a warp for each piece. Where it has, that is slower.
  const bool all_rows = header.num_split_outputs * args.tile_rows * pieces <= num_warps;
  const int rows = all_rows ? args.tile_rows : used_rows(args);  // of a row tile
  const int num_pieces = header.num_split_outputs * rows * pieces;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  bool waited = false;
  for (int n = static_cast<int>(blockIdx.x) + warp * static_cast<int>(gridDim.x); n < num_pieces; n += num_warps) {
    const int row = n / pieces;
    const prefill_split_output output = args.metadata.split_outputs[row / rows];
    const prefill_work_tile work = args.metadata.work_tiles[output.work_tile];
    if (!waited) device::grid_dependency_wait();
    waited = true;
    const int of_tile = all_rows ? row % rows : row_of(args, row % rows);
    row_combine<T>(args, output, of_tile, n % pieces * columns, log_groups).run(work);
  }
  if (!waited) device::grid_dependency_wait();
}

}  // namespace
}  // namespace prefill

cudaError_t launch_prefill_combine(const runtime_api& api, const prefill_args& args, const device_numbers& device,
                                   cudaStream_t stream) noexcept {
  // The same for all steps of a plan.
  const auto num_ctas = static_cast<unsigned>(prefill_combine_ctas_per_sm * device.num_sms);
  const auto kernel = args.q_type == dtype::f32   ? prefill::combine_kernel<float>
                      : args.q_type == dtype::f16 ? prefill::combine_kernel<__half>
                                                  : prefill::combine_kernel<__nv_bfloat16>;
  return launch(api, kernel, dim3(num_ctas), dim3(prefill::combine_threads), 0, stream, device.dependent_launch, args);
}

}  // namespace bifolio::inline v0_2::cuda

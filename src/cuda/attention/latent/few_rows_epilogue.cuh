// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The end of a row tile of few rows: the results of both consumer warpgroups become one in shared memory, from where
/// all threads write rows: finished ones to the output, others to the partial results.

#include <cstdint>

#include "cuda/attention/latent/column_softmax.cuh"
#include "cuda/attention/latent/pipeline.cuh"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/results.cuh"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"

namespace bifolio::inline v0_2::cuda::latent {

template <class T, class Shape>
class few_rows_epilogue {
  using S = Shape;
  using out_array = typename column_softmax<Shape>::out_array;
  static constexpr int num_threads = 128 * S::num_warpgroups;

 public:
  __device__ __forceinline__ few_rows_epilogue(const prefill_args& args, const shared_stages<Shape>& stages,
                                               int warpgroup, int thread)
      : a_(args), stages_(stages), warpgroup_(warpgroup), thread_(thread) {}

  __device__ __forceinline__ void store(const prefill_work_tile& work, const column_state& rows, out_array& o) const {
    float weight[S::columns];
    share_sums(rows, weight);
#pragma unroll
    for (int chunk = 0; chunk < S::value_chunks; ++chunk) {
#pragma unroll
      for (int j = 0; j < S::score_registers; ++j) o[chunk][j] *= weight[j / 4 * 2 + (j & 1)];
    }
#pragma unroll
    for (int pass = 0; pass < S::output_passes; ++pass) {
      if (pass > 0) device::named_barrier_sync(sums_barrier, num_threads);  // the rows of the one before are read
      if (warpgroup_ == 1) for_each_output(o, pass, [](std::uint32_t at, float x) { store_shared_f32(at, x); });
      device::named_barrier_sync(sums_barrier, num_threads);
      if (warpgroup_ == 0) {
        for_each_output(o, pass,
                        [](std::uint32_t at, float x) { store_shared_f32(at, device::load_shared_f32(at) + x); });
      }
      device::named_barrier_sync(sums_barrier, num_threads);
      write_rows(work, pass);
    }
  }

 private:
  [[nodiscard]] __device__ __forceinline__ std::uint32_t warp_sum(int warpgroup, int warp, int row) const {
    return stages_.maxima() + ((warpgroup * 4 + warp) * S::rows + row) * 4;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t maximum(int warpgroup, int row) const {
    return stages_.sums() + (warpgroup * S::rows + row) * 4;
  }
  // Maximum and sum of both warpgroups.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t total(int row) const {
    return maximum(S::num_warpgroups, 0) + row * 8;
  }

  // Makes maxima and sums those of both warpgroups. `weight`: what this one's outputs must be multiplied with.
  __device__ __forceinline__ void share_sums(const column_state& rows, float (&weight)[S::columns]) const {
    const int warp = thread_ / 32;
    const int lane = thread_ & 31;
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
      float l = rows.sum[c];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) l += __shfl_xor_sync(0xffffffffu, l, lanes);
      if (lane >= 4) continue;
      store_shared_f32(warp_sum(warpgroup_, warp, column_state::row_of(c)), l);
      if (warp == 0) store_shared_f32(maximum(warpgroup_, column_state::row_of(c)), rows.max[c]);
    }
    device::named_barrier_sync(sums_barrier, num_threads);
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
      const int row = column_state::row_of(c);
      const float top = fmaxf(rows.max[c], device::load_shared_f32(maximum(warpgroup_ ^ 1, row)));
      weight[c] = weight_of(rows.max[c], top);
      if (warpgroup_ != 0 || thread_ >= 4) continue;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < S::num_warpgroups; ++w) {
        const float of_warpgroup = weight_of(device::load_shared_f32(maximum(w, row)), top);
#pragma unroll
        for (int i = 0; i < 4; ++i) sum = fmaf(device::load_shared_f32(warp_sum(w, i, row)), of_warpgroup, sum);
      }
      store_shared_f32(total(row), top);
      store_shared_f32(total(row) + 4, sum);
    }
  }
  [[nodiscard]] __device__ __forceinline__ static float weight_of(float max, float top) {
    return max == -INFINITY ? 0.0f : device::exp2_fast(max - top);
  }

  // Calls each(address, x) for this thread's outputs of the pass.
  template <class Each>
  __device__ __forceinline__ void for_each_output(const out_array& o, int pass, const Each& each) const {
    const int first = thread_ / 32 * 16;
    const int quad = (thread_ & 31) / 4;
#pragma unroll
    for (int chunk = 0; chunk < S::pass_chunks; ++chunk) {
#pragma unroll
      for (int j = 0; j < S::score_registers; ++j) {
        const int row = column_state::row_of(j / 4 * 2 + (j & 1));
        each(stages_.outputs() + (row * S::output_stride + chunk * 64 + first + S::output_dim(quad, j)) * 4,
             o[pass * S::pass_chunks + chunk][j]);
      }
    }
  }

  __device__ __forceinline__ void write_rows(const prefill_work_tile& work, int pass) const {
    constexpr int pieces = S::pass_dims / 8;
    const int first_token = work.row_tile * a_.tokens_per_warpgroup;
    const int num_rows = min(a_.tokens_per_warpgroup, work.query_len - first_token) * a_.packed_heads;
    const prefill::partial_results partials(a_);
    for (int task = warpgroup_ * 128 + thread_; task < num_rows * pieces; task += num_threads) {
      const int row = task / pieces;
      const int in_pass = task % pieces * 8;
      const int column = pass * S::pass_dims + in_pass;
      const std::uint32_t at = stages_.outputs() + (row * S::output_stride + in_pass) * 4;
      const float4 lo = as_floats(device::load_shared_16(at));
      const float4 hi = as_floats(device::load_shared_16(at + 16));
      const float2 sums = device::load_shared_f32x2(total(row));
      if (work.partial >= 0) {
        float* const dst = partials.row(work.partial, row) + column;
        __stcg(reinterpret_cast<float4*>(dst), lo);
        __stcg(reinterpret_cast<float4*>(dst + 4), hi);
        if (column == 0) __stcg(partials.sums(work.partial, row), sums);
        continue;
      }
      const int token = row / a_.packed_heads;
      const int head = work.head + row - token * a_.packed_heads;
      const prefill::finished_row finished({sums.x, sums.y}, a_.sinks != nullptr ? a_.sinks + head : nullptr, nullptr);
      const float f = finished.factor;
      const std::int64_t position = work.query_start + first_token + token;
      if (column == 0 && a_.lse != nullptr) a_.lse[position * a_.num_q_heads + head] = finished.lse;
      T* const dst = static_cast<T*>(a_.out) + position * a_.out_token_stride + head * a_.out_head_stride + column;
      *reinterpret_cast<uint4*>(dst) =
          make_uint4(device::pack<T>(lo.x * f, lo.y * f), device::pack<T>(lo.z * f, lo.w * f),
                     device::pack<T>(hi.x * f, hi.y * f), device::pack<T>(hi.z * f, hi.w * f));
    }
  }
  [[nodiscard]] __device__ __forceinline__ static float4 as_floats(const uint4& x) {
    return make_float4(__uint_as_float(x.x), __uint_as_float(x.y), __uint_as_float(x.z), __uint_as_float(x.w));
  }

  const prefill_args& a_;
  const shared_stages<Shape>& stages_;
  int warpgroup_, thread_;
};

}  // namespace bifolio::inline v0_2::cuda::latent

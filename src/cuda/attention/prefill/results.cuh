// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What prefill makes of rows: their maxima and sums, the end of a row, and partial results in the workspace.

#include <cstdint>

#include "cuda/attention/prefill/args.hpp"
#include "cuda/device/ptx.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

inline constexpr float log2e = 1.4426950408889634f;

/// Of a row's scores, base 2.
struct row_sums {
  float max, sum;
};

/// What a row becomes when all its keys are seen: what its values must be multiplied with, and its LSE, by the same
/// instructions in epilogue and combine. `sink`: of its head, or null. `value_scale`: the static one of V and the head,
/// or null.
struct finished_row {
  float factor, lse;

  __device__ __forceinline__ finished_row(row_sums row, const float* sink, const float* value_scale) {
    constexpr float ln2 = 0.6931471805599453f;
    float scale = 1.0f;
    if (sink != nullptr) {
      const float sink_2 = *sink * log2e;
      const float top = fmaxf(row.max, sink_2);
      if (top != -INFINITY) {
        scale = row.max == -INFINITY ? 0.0f : device::exp2_fast(row.max - top);
        row.sum = __fmaf_rn(row.sum, scale, device::exp2_fast(sink_2 - top));
        row.max = top;
      }
    }
    factor = row.sum != 0 ? scale / row.sum : 0.0f;  // NaN stays NaN
    if (value_scale != nullptr) factor *= __ldg(value_scale);
    lse = row.sum != 0 ? __fmaf_rn(row.max, ln2, logf(row.sum)) : -INFINITY;
  }
};

/// Of a query head: V's static scale, or null.
[[nodiscard]] __device__ __forceinline__ const float* static_value_scale(const prefill_args& a, int head) {
  const code_scales& v = a.v_scales;
  return v.static_scales == nullptr ? nullptr : v.static_scales + head / a.group_size * v.static_step;
}

/// The workspace: outputs of the rows of a tile, and the sums of each row, per partial result. In deterministic plans
/// the number of a partial result is that of its first row, and it has the rows that it needs.
class partial_results {
 public:
  __device__ __forceinline__ explicit partial_results(const prefill_args& a)
      : out_(a.workspace),
        sums_(reinterpret_cast<float2*>(a.workspace + std::int64_t{a.max_partials} * a.tile_rows * a.head_dim)),
        head_dim_(a.head_dim),
        step_(a.deterministic ? 1 : a.tile_rows) {}

  [[nodiscard]] __device__ __forceinline__ float* row(int partial, int row) const {
    return out_ + (std::int64_t{partial} * step_ + row) * head_dim_;
  }
  /// Maximum and sum.
  [[nodiscard]] __device__ __forceinline__ float2* sums(int partial, int row) const {
    return sums_ + std::int64_t{partial} * step_ + row;
  }

 private:
  float* out_;
  float2* sums_;
  int head_dim_;
  int step_;  // rows from a partial result to the next number
};

}  // namespace bifolio::inline v0_2::cuda::prefill

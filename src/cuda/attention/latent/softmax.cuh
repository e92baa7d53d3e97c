// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Masks and the online softmax of one tile of scores, as a consumer thread of the latent kernel holds them: two rows,
/// of each every eighth pair of keys.

#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/prefill/softmax.cuh"
#include "cuda/device/ptx.cuh"

namespace bifolio::inline v0_2::cuda::latent {

using score_array = float[many_rows::score_registers];

/// The key of score register j, from the tile's first, for the thread's first column.
[[nodiscard]] __device__ __forceinline__ constexpr int key_of(int j) { return (j >> 2) * 8 + (j & 1); }

/// Scores of keys that a row does not attend to become −inf, in tiles where there are any. The same as attn::attends
/// and is_in_window. `column`: the thread's first key of the tile, counted from position 0.
__device__ __forceinline__ void mask(score_array& s, int tile, int column, const prefill_args& a,
                                     const prefill::kv_range& e, const prefill::row_state& rows) {
  const bool ends = (tile + 1) * many_rows::tile_keys > e.common_limit;
  const bool begins = tile * many_rows::tile_keys < e.common_begin;
  if (!ends && !begins) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int end = a.causal ? min(e.seq_len, rows.position[i] + 1) : e.seq_len;
    if (a.window_right >= 0) end = min(end, rows.position[i] + a.window_right + 1);
    const int begin = a.window_left >= 0 ? rows.position[i] - a.window_left : 0;
#pragma unroll
    for (int j = 2 * i; j < many_rows::score_registers; j += 4) {
      if (column + key_of(j) >= end || column + key_of(j) < begin) s[j] = -INFINITY;
      if (column + key_of(j + 1) >= end || column + key_of(j + 1) < begin) s[j + 1] = -INFINITY;
    }
  }
}

/// Scores become probabilities against the running maximum; `rescale` is what older results must be multiplied with.
/// The maximum follows only where a score is more than max_slack above it, as in prefill. `scale`: of scores, base 2.
__device__ __forceinline__ void softmax(score_array& s, float scale, prefill::row_state& rows, float (&rescale)[2]) {
  float m[2] = {-INFINITY, -INFINITY};  // of this lane
#pragma unroll
  for (int j = 0; j < many_rows::score_registers; j += 4) {
    m[0] = fmaxf(m[0], fmaxf(s[j], s[j + 1]));
    m[1] = fmaxf(m[1], fmaxf(s[j + 2], s[j + 3]));
  }
  rescale[0] = rescale[1] = 1.0f;
  const bool rises =
      (m[0] - rows.max[0]) * scale > prefill::max_slack || (m[1] - rows.max[1]) * scale > prefill::max_slack;
  if (__any_sync(0xffffffffu, rises)) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      m[i] = fmaxf(m[i], __shfl_xor_sync(0xffffffffu, m[i], 1));
      m[i] = fmaxf(m[i], __shfl_xor_sync(0xffffffffu, m[i], 2));
      if ((m[i] - rows.max[i]) * scale > prefill::max_slack) {
        rescale[i] = device::exp2_fast((rows.max[i] - m[i]) * scale);
        rows.max[i] = m[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float shift = rows.max[i] == -INFINITY ? 0.0f : rows.max[i] * scale;
    float sum = 0;
#pragma unroll
    for (int j = 2 * i; j < many_rows::score_registers; j += 4) {
      s[j] = device::exp2_fast(fmaf(s[j], scale, -shift));
      s[j + 1] = device::exp2_fast(fmaf(s[j + 1], scale, -shift));
      sum += s[j] + s[j + 1];
    }
    rows.sum[i] = rows.sum[i] * rescale[i] + sum;
  }
}

}  // namespace bifolio::inline v0_2::cuda::latent

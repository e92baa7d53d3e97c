// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Partial results of a prefill consumer thread's rows in deterministic plans, and how later ones are added to earlier
/// ones, in the order that combine_tree.cuh says.

#include "cuda/attention/combine_tree.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// Of this thread's two rows: maxima of base-2 logits, sums over all lanes of a row.
struct tree_sums {
  float max[2] = {-INFINITY, -INFINITY};
  float sum[2] = {0, 0};
  bool empty = true;  // nothing was added: outputs are not kept
};

/// o, sums ← what is earlier, whose outputs `load` gives, four at a time, and those.
template <int Registers, class Load>
__device__ __forceinline__ void add_earlier(float (&o)[Registers], tree_sums& sums, const tree_sums& earlier,
                                            Load load) {
  const tree::combination both[2] = {{earlier.max[0], sums.max[0]}, {earlier.max[1], sums.max[1]}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sums.max[i] = both[i].max;
    sums.sum[i] = both[i].of(earlier.sum[i], sums.sum[i]);
  }
  if (earlier.empty) {  // zeros, which are not loaded
#pragma unroll
    for (int j = 0; j < Registers; ++j) o[j] = both[(j >> 1) & 1].of(0.0f, o[j]);
    return;
  }
  // Where the earlier maxima stay, multiplying with 1 is left out.
  const bool keeps = __all_sync(0xffffffffu, both[0].a == 1.0f && both[1].a == 1.0f);
  if (keeps) {
#pragma unroll
    for (int i = 0; i < Registers / 4; ++i) {
      const float4 before = load(i);
      o[4 * i] = __fmaf_rn(o[4 * i], both[0].b, before.x);
      o[4 * i + 1] = __fmaf_rn(o[4 * i + 1], both[0].b, before.y);
      o[4 * i + 2] = __fmaf_rn(o[4 * i + 2], both[1].b, before.z);
      o[4 * i + 3] = __fmaf_rn(o[4 * i + 3], both[1].b, before.w);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < Registers / 4; ++i) {
    const float4 before = load(i);
    o[4 * i] = both[0].of(before.x, o[4 * i]);
    o[4 * i + 1] = both[0].of(before.y, o[4 * i + 1]);
    o[4 * i + 2] = both[1].of(before.z, o[4 * i + 2]);
    o[4 * i + 3] = both[1].of(before.w, o[4 * i + 3]);
  }
}

}  // namespace bifolio::inline v0_2::cuda::prefill

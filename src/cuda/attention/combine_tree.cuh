// SPDX-License-Identifier: Apache-2.0
#pragma once

/// How deterministic plans sum, wherever decode and prefill both compute (`decode::shape::splits_dims`): the same
/// numbers in the same order, so that a row has the same bits from either. Products of 16-bit types by mma.sync and by
/// wgmma have the same bits on Hopper, whatever the order of the 16 that one instruction adds.
///
/// Keys are taken in runs of 64, counted from position 0. A run's scores are sums over all dims, in order. A row's
/// maximum follows the run's where that is more than `max_slack` above it. Probabilities are rounded and their products
/// with V added to the row's output, 16 keys at a time. Four runs are a leaf, which begins with a fresh maximum, sum
/// and output. Leaves are combined one after another into nodes, nodes into the root. Keys that a row does not attend
/// to change none of its bits, and neither do leaves without any key that it attends to.
///
/// Probabilities are summed, before they are rounded, in sixteen sums of a leaf: of keys 16w … 16w + 15 of every run,
/// those whose number, modulo 8, is 2q or 2q + 1. They are added up over w, then over q in pairs.
///
/// Float32 differs in this. Its products are three of TensorFloat-32, m16n8k8 and m64nNk8, which have the same bits as
/// well. A run has 32 keys. A score is the sum over all dims of the products of larger parts, plus that of the others:
/// of each 8 dims smaller · larger, then larger · smaller. Of a run's products with V those with a smaller part come
/// first, 8 keys at a time, in a new sum, which an ordinary addition adds to the row's output. Of each 8 keys 0, 2, 4,
/// 6 are the first of a product and 1, 3, 5, 7 the others. Probabilities have four sums of a leaf, by the number of the
/// key modulo 8 as above, to which a run's are added in one; they are added up in pairs.

#include <cstdint>

#include "cuda/device/ptx.cuh"

namespace bifolio::inline v0_2::cuda::tree {

inline constexpr int run_keys = 64;
inline constexpr int leaf_keys = 256;
inline constexpr int node_leaves = 16;
inline constexpr int group_keys = 16;  // whose products with V one instruction adds
inline constexpr int run_groups = run_keys / group_keys;
inline constexpr int f32_run_keys = 32;

/// How far a row's maximum may stay below its scores, in base 2.
inline constexpr float max_slack = 8.0f;

/// Two partial results a and b as one: its maximum, and the weights of their sums. Base 2.
struct combination {
  float max, a, b;
  __device__ __forceinline__ combination(float max_a, float max_b) {
    max = fmaxf(max_a, max_b);
    a = max_a == -INFINITY ? 0.0f : device::exp2_fast(max_a - max);
    b = max_b == -INFINITY ? 0.0f : device::exp2_fast(max_b - max);
  }
  /// The same instructions wherever results are combined.
  [[nodiscard]] __device__ __forceinline__ float of(float sum_a, float sum_b) const {
    return __fmaf_rn(sum_b, b, __fmul_rn(sum_a, a));
  }
  [[nodiscard]] __device__ __forceinline__ float4 of(const float4& x, const float4& y) const {
    return make_float4(of(x.x, y.x), of(x.y, y.y), of(x.z, y.z), of(x.w, y.w));
  }
};

/// From products to probabilities. Without options a score is the product, and the exponential scales it; with a soft
/// cap, ALiBi or a scale that is not positive it is the base-2 logit.
struct scoring {
  bool has_options;
  float unit;  // of a score, in base 2
  float
      product_factor;  // with options: from a product to its base-2 logit or, with a soft cap, to the argument of tanh
  float cap_log2;
  bool capped;

  __device__ __forceinline__ scoring(float scale, float soft_cap, bool has_slopes)
      : has_options(!(scale > 0) || soft_cap > 0 || has_slopes), capped(soft_cap > 0) {
    constexpr float log2e = 1.4426950408889634f;
    product_factor = capped ? __fdiv_rn(scale, soft_cap) : __fmul_rn(scale, log2e);
    cap_log2 = __fmul_rn(soft_cap, log2e);
    unit = has_options ? 1.0f : product_factor;
  }
  /// With options. `slope`: in base 2, 0 without ALiBi; `distance` from the row's position to the key.
  [[nodiscard]] __device__ __forceinline__ float logit(float product, float slope, float distance) const {
    float x = __fmul_rn(product, product_factor);
    if (capped) x = __fmul_rn(cap_log2, device::tanh_fast(x));
    return __fmaf_rn(slope, distance, x);
  }
  /// What exponents are lowered by for a row with this maximum.
  [[nodiscard]] __device__ __forceinline__ float shift_of(float max) const {
    return max == -INFINITY ? 0.0f : __fmul_rn(max, unit);
  }
  [[nodiscard]] __device__ __forceinline__ float probability(float score, float shift) const {
    return device::exp2_fast(__fmaf_rn(score, unit, -shift));
  }
  [[nodiscard]] __device__ __forceinline__ bool rises(float max_of_run, float max) const {
    return __fmul_rn(__fsub_rn(max_of_run, max), unit) > max_slack;
  }
  /// What older results are multiplied with where the maximum rises.
  [[nodiscard]] __device__ __forceinline__ float weight_of_older(float max, float risen) const {
    return device::exp2_fast(__fmul_rn(__fsub_rn(max, risen), unit));
  }
  /// A maximum of scores in base 2.
  [[nodiscard]] __device__ __forceinline__ float in_base_2(float max) const { return __fmul_rn(max, unit); }
};

/// One group's probabilities of a lane, added to its sum of them: two of the first 8 keys and two of the others, each
/// two added up. `weight`: of the sum.
[[nodiscard]] __device__ __forceinline__ float add_group(float sum, float weight, float of_8, float of_other_8) {
  return __fmaf_rn(sum, weight, __fadd_rn(of_8, of_other_8));
}
/// Over the four lanes of a row.
[[nodiscard]] __device__ __forceinline__ float sum_over_lanes(float sum) {
  sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
  return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
}
/// The sum of a row, whose four lanes have these sums of their groups.
[[nodiscard]] __device__ __forceinline__ float sum_of_row(const float (&of_groups)[run_groups]) {
  float sum = of_groups[0];
#pragma unroll
  for (int w = 1; w < run_groups; ++w) sum = __fadd_rn(sum, of_groups[w]);
  return sum_over_lanes(sum);
}

}  // namespace bifolio::inline v0_2::cuda::tree

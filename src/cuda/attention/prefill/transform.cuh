// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The logits transform of the prefill mainloop (common/attention/logits.hpp defines it). Scores are kept in a unit of
/// their own, so that most of it costs nothing: logit = unit · score, where the unit is the scale, the soft cap, or 1.

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/results.cuh"
#include "cuda/device/ptx.cuh"

namespace bifolio::cuda::prefill {

/// tanh(y) for |y| ≤ 1 as y · P(y²), within 1.6 · 2^-23 of its value (minimax, evaluated in float32 at 2·10^5 points).
[[nodiscard]] __device__ __forceinline__ float tanh_polynomial(float y) {
  const float z = y * y;
  float p = fmaf(0x1.10e592p-10f, z, -0x1.968b3ap-8f);
  p = fmaf(p, z, 0x1.4c6e4ap-6f);
  p = fmaf(p, z, -0x1.b5eb80p-5f);
  p = fmaf(p, z, 0x1.10e672p-3f);
  p = fmaf(p, z, -0x1.55540ap-2f);
  p = fmaf(p, z, 0x1.fffffep-1f);
  return p * y;
}

/// tanh(y) for all y, within 2^-21: 1 − 2 / (exp(2y) + 1).
[[nodiscard]] __device__ __forceinline__ float tanh_by_exp2(float y) {
  return 1.0f - __fdividef(2.0f, device::exp2_fast(y * (2 * log2e)) + 1.0f);
}

template <bool Transform>
struct logits_transform;

/// A positive scale, and nothing else.
template <>
struct logits_transform<false> {
  float scale_log2;  ///< the unit in base 2
  __device__ __forceinline__ explicit logits_transform(const prefill_args& a) : scale_log2(a.scale * log2e) {}
};

/// Soft cap, ALiBi, a scale that is not positive.
template <>
struct logits_transform<true> {
  float scale_log2;
  float factor;        ///< a product becomes the argument of tanh, or a score; 1: leave it
  float alibi_factor;  ///< a slope in the unit of scores
  bool capped;

  __device__ __forceinline__ explicit logits_transform(const prefill_args& a) : capped(a.soft_cap > 0) {
    // A scale that slopes can be divided by is the unit itself.
    const bool scale_is_unit = !capped && a.scale >= 0x1p-40f;
    factor = capped ? a.scale / a.soft_cap : scale_is_unit ? 1.0f : a.scale;
    const float unit = capped ? a.soft_cap : scale_is_unit ? a.scale : 1.0f;
    scale_log2 = unit * log2e;
    alibi_factor = 1.0f / unit;
  }

  /// Scale and soft cap. The polynomial is shorter than tanh by exp2 and leaves the exponential unit alone, which the
  /// softmax needs; arguments above 1 are rare where a cap is a safeguard.
  template <int N>
  __device__ __forceinline__ void apply(float (&s)[N]) const {
    if (!capped && factor == 1.0f) return;
    float largest = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      s[j] *= factor;
      largest = fmaxf(largest, fabsf(s[j]));
    }
    if (!capped) return;
    if (__any_sync(0xffffffffu, largest > 1.0f)) {
#pragma unroll
      for (int j = 0; j < N; ++j) s[j] = tanh_by_exp2(s[j]);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) s[j] = tanh_polynomial(s[j]);
    }
  }
};

}  // namespace bifolio::cuda::prefill

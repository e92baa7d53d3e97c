// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The logits transform of the prefill mainloop (common/attention/logits.hpp defines it). Scores are kept in a unit of
/// their own, so that most of it costs nothing: logit = unit · score, where the unit is the scale, ln 2, or 1.

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/results.cuh"
#include "cuda/device/ptx.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// tanh(y) for all y, within 2^-21: 1 − 2 / (exp(2y) + 1).
[[nodiscard]] __device__ __forceinline__ float tanh_by_exp2(float y) {
  return 1.0f - __fdividef(2.0f, device::exp2_fast(y * (2 * log2e)) + 1.0f);
}

/// What a transform is made from. A static scale of K, that of the head, is a part of the scale.
struct transform_options {
  float scale;
  float soft_cap;
  const float* alibi_slopes;

  __device__ __forceinline__ explicit transform_options(const prefill_args& a, int kv_head = 0)
      : scale(a.k_scales.static_scales == nullptr
                  ? a.scale
                  : a.scale * __ldg(a.k_scales.static_scales + kv_head * a.k_scales.static_step)),
        soft_cap(a.soft_cap),
        alibi_slopes(a.alibi_slopes) {}
};

template <bool Transform>
struct logits_transform;

/// A positive scale, and nothing else.
template <>
struct logits_transform<false> {
  float scale_log2;  ///< the unit in base 2
  __device__ __forceinline__ explicit logits_transform(const transform_options& a) : scale_log2(a.scale * log2e) {}
};

/// Soft cap, ALiBi, a scale that is not positive. With a soft cap the unit is that of base-2 logits.
template <>
struct logits_transform<true> {
  float scale_log2;
  float factor;        ///< a product becomes a score; 1: leave it. With a soft cap, the argument of tanh
  float alibi_factor;  ///< a slope in the unit of scores
  bool capped;
  bool rising;        ///< capped logits rise with the products, and nothing is added to them
  float short_limit;  ///< products up to which the polynomial serves; negative: none
  float short_terms[3];
  float cap_log2;

  __device__ __forceinline__ explicit logits_transform(const transform_options& a)
      : capped(a.soft_cap > 0), cap_log2(a.soft_cap * log2e) {
    // A scale that slopes can be divided by is the unit itself.
    const bool scale_is_unit = !capped && a.scale >= 0x1p-40f;
    factor = capped ? a.scale / a.soft_cap : scale_is_unit ? 1.0f : a.scale;
    const float unit = scale_is_unit ? a.scale : 1.0f;
    scale_log2 = capped ? 1.0f : unit * log2e;
    alibi_factor = capped ? log2e : 1.0f / unit;
    rising = capped && factor > 0 && a.alibi_slopes == nullptr;
    // tanh(y) for |y| ≤ 0.33 as y · P(y²), within 2^-20.5, and within 2^-18.8 of its value (minimax, float32 at 4·10^5
    // points). Cap and factor are in the terms, which must be normal numbers.
    const float size = fabsf(factor);
    const bool is_normal =
        size >= 0x1p-24f && size <= 0x1p24f && fabsf(a.scale) >= 0x1p-20f && fabsf(a.scale) <= 0x1p20f;
    short_limit = is_normal ? 0.33f / size : -1.0f;
    const float square = factor * factor;
    const float linear = a.scale * log2e;
    short_terms[0] = 0x1.ffffbcp-1f * linear;
    short_terms[1] = -0x1.54fd86p-2f * linear * square;
    short_terms[2] = 0x1.ffdbc8p-4f * linear * square * square;
  }

  // A product's capped logit is the product times this, if it is small.
  [[nodiscard]] __device__ __forceinline__ float short_ratio(float product) const {
    const float z = product * product;
    return fmaf(fmaf(short_terms[2], z, short_terms[1]), z, short_terms[0]);
  }
  [[nodiscard]] __device__ __forceinline__ bool is_short(float product) const { return fabsf(product) <= short_limit; }

  /// The capped logit of a product, minus `shift`. Which of two formulas gives it depends on the product alone, so that
  /// a row's bits do not depend on the rows and keys next to it.
  [[nodiscard]] __device__ __forceinline__ float capped_logit(float product, float shift) const {
    const float large = fmaf(cap_log2, tanh_by_exp2(product * factor), -shift);
    // Without a branch for each score: NaN and what is above the limit take the second.
    float logit;
    asm("slct.f32.f32 %0, %1, %2, %3;"
        : "=f"(logit)
        : "f"(short_logit(product, shift)), "f"(large), "f"(short_limit - fabsf(product)));
    return logit;
  }
  /// The same of a product that is short.
  [[nodiscard]] __device__ __forceinline__ float short_logit(float product, float shift) const {
    return fmaf(product, short_ratio(product), -shift);
  }

  /// Whether products are scores as they are.
  [[nodiscard]] __device__ __forceinline__ bool keeps_products() const { return !capped && factor == 1.0f; }

  /// Scale and soft cap.
  template <int N>
  __device__ __forceinline__ void apply(float (&s)[N]) const {
    if (keeps_products()) return;
    if (!capped) {
#pragma unroll
      for (int j = 0; j < N; ++j) s[j] *= factor;
      return;
    }
    float largest = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) largest = fmaxf(largest, fabsf(s[j]));
    if (__all_sync(0xffffffffu, is_short(largest))) {
#pragma unroll
      for (int j = 0; j < N; ++j) s[j] = short_logit(s[j], 0.0f);
    } else {
#pragma unroll
      for (int j = 0; j < N; ++j) s[j] = capped_logit(s[j], 0.0f);
    }
  }
};

}  // namespace bifolio::inline v0_2::cuda::prefill

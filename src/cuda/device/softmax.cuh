// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The algebra of partial softmaxes (Milakov & Gimelshein 2018; FlashInfer's attention states): a running maximum m, a
/// sum l of exp(s − m), an accumulator of exp(s − m)·v. Nothing seen is m = −inf, l = 0, and weighs nothing: its
/// accumulator is selected away, never multiplied by zero, because it may hold NaN. Every step is spelled in single
/// roundings, so that all kernels that fold the same partials in the same order get the same bits.

#include <cstdint>

namespace bifolio::cuda {

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

/// A maximum that can be subtracted: 0 in the place of −inf.
__device__ __forceinline__ float finite_max(float m) { return m == minus_infinity() ? 0.0f : m; }

/// Weights with which a partial (m, l) joins a total, and the total's new m and l.
struct fold_weights {
  float total;    ///< factor of what was there
  float partial;  ///< factor of what is added
  bool skip;      ///< nothing is added
};
__device__ __forceinline__ fold_weights fold_into(float& total_m, float& total_l, float m, float l) {
  if (m == minus_infinity() && l == 0.0f) return {1.0f, 0.0f, true};
  const float joint = fmaxf(total_m, m);
  const float base = finite_max(joint);
  const fold_weights w{expf(__fsub_rn(total_m, base)), expf(__fsub_rn(m, base)), false};
  total_l = __fmaf_rn(l, w.partial, __fmul_rn(total_l, w.total));
  total_m = joint;
  return w;
}
__device__ __forceinline__ float fold_value(const fold_weights& w, float total, float partial) {
  return w.skip ? total : __fmaf_rn(partial, w.partial, __fmul_rn(total, w.total));
}

/// Factors that finish a row: output = accumulator · value, LSE = lse. A sink is one more key without a value.
struct row_finish {
  float numerator;    ///< factor of the accumulator before the division
  float denominator;  ///< 0 where nothing was seen: the output is 0
  float lse;
};
__device__ __forceinline__ row_finish finish_row(float m, float l, bool has_sink, float sink) {
  if (!has_sink) return {1.0f, l, l == 0.0f ? minus_infinity() : m + logf(l)};
  const float joint = fmaxf(m, sink);
  if (joint == minus_infinity() && l == 0.0f) return {1.0f, 0.0f, minus_infinity()};
  const float base = finite_max(joint);
  const float factor = expf(__fsub_rn(m, base));
  const float sum = __fmaf_rn(l, factor, expf(__fsub_rn(sink, base)));
  return {l == 0.0f ? 0.0f : factor, sum, base + logf(sum)};
}
__device__ __forceinline__ float finish_value(const row_finish& f, float accumulated) {
  return f.denominator == 0.0f ? 0.0f : __fdiv_rn(__fmul_rn(accumulated, f.numerator), f.denominator);
}

/// Weights of two states that are normalised already, by their LSEs.
struct state_weights {
  float a;
  float b;
  float lse;
};
__device__ __forceinline__ state_weights weights_of(float a_lse, float b_lse) {
  const float joint = fmaxf(a_lse, b_lse);
  if (a_lse == minus_infinity() && b_lse == minus_infinity()) return {0.0f, 0.0f, minus_infinity()};
  const float a = a_lse == minus_infinity() ? 0.0f : expf(__fsub_rn(a_lse, joint));
  const float b = b_lse == minus_infinity() ? 0.0f : expf(__fsub_rn(b_lse, joint));
  const float sum = __fadd_rn(a, b);
  return {__fdiv_rn(a, sum), __fdiv_rn(b, sum), joint + logf(sum)};
}
/// The joint value of one element; a state without weight is not looked at.
__device__ __forceinline__ float combine(const state_weights& w, float a, float b) {
  if (w.a == 0.0f) return w.b == 0.0f ? 0.0f : __fmul_rn(w.b, b);
  if (w.b == 0.0f) return __fmul_rn(w.a, a);
  return __fadd_rn(__fmul_rn(w.a, a), __fmul_rn(w.b, b));  // commutes, which a fused one would not
}

}  // namespace bifolio::cuda

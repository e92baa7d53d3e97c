// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The arithmetic with which these kernels use the definitions of common/attention: scalars for what a row has one of,
/// vectors for its logits and accumulators. Nothing is fused that does not say so.

#include "cpu/kernels/simd/simd.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

struct scalar_math {
  BIFOLIO_INLINE static float add(float a, float b) noexcept { return a + b; }
  BIFOLIO_INLINE static float sub(float a, float b) noexcept { return a - b; }
  BIFOLIO_INLINE static float mul(float a, float b) noexcept { return a * b; }
  BIFOLIO_INLINE static float div(float a, float b) noexcept { return a / b; }
  BIFOLIO_INLINE static float mul_add(float a, float b, float c) noexcept { return a * b + c; }
  BIFOLIO_INLINE static float max(float a, float b) noexcept { return b > a ? b : a; }
  BIFOLIO_INLINE static float log_plus(float base, float x) noexcept { return base + __builtin_logf(x); }
  /// The bits of a vector's lane.
  BIFOLIO_INLINE static float exp(float x) noexcept {
    float values[lanes];
    store(values, BIFOLIO_ISA::exp(vf(x)));
    return values[0];
  }
};

struct vector_math {
  BIFOLIO_INLINE static vf add(vf a, vf b) noexcept { return a + b; }
  BIFOLIO_INLINE static vf mul(vf a, vf b) noexcept { return a * b; }
  BIFOLIO_INLINE static vf div(vf a, vf b) noexcept { return a / b; }
  BIFOLIO_INLINE static vf fma(vf a, vf b, vf c) noexcept { return BIFOLIO_ISA::fma(a, b, c); }
  BIFOLIO_INLINE static vf mul_add(vf a, vf b, vf c) noexcept { return BIFOLIO_ISA::fma(a, b, c); }
  BIFOLIO_INLINE static vf tanh(vf x) noexcept { return BIFOLIO_ISA::tanh(x); }
};

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

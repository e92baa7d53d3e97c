// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The arithmetic with which the kernels on CUDA cores use the definitions of common/attention. Every step is spelled
/// in single roundings, so that all kernels that combine the same partial states in the same order get the same bits.

#include <cstdint>

#include "common/attention/logits.hpp"
#include "common/attention/states.hpp"

namespace bifolio::inline v0_2::cuda {

struct device_math {
  static __device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
  static __device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
  static __device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
  static __device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }
  static __device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  static __device__ __forceinline__ float mul_add(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  static __device__ __forceinline__ float max(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float exp(float x) { return expf(x); }
  static __device__ __forceinline__ float tanh(float x) { return tanhf(x); }
  /// May be fused with the last step of the logarithm.
  static __device__ __forceinline__ float log_plus(float base, float x) { return base + logf(x); }
};

__device__ __forceinline__ float minus_infinity() { return attn::minus_infinity<float>(); }

}  // namespace bifolio::inline v0_2::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What differs between the two 16-bit types of the tensor cores, __nv_bfloat16 and __half.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace bifolio::inline v0_2::cuda::device {

/// Two values rounded to T, the first in the low 16 bits.
template <class T>
[[nodiscard]] __device__ __forceinline__ std::uint32_t pack(float lo, float hi) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  } else {
    static_assert(std::is_same_v<T, __half>);
    const __half2 pair = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
}

// An instruction's text for type T: `statement("bf16")` or `statement("f16")`. The string of an inline assembly
// statement cannot depend on a template parameter in CUDA 12.0.
#define BIFOLIO_FOR_16_BIT_TYPE(T, statement)       \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) { \
    statement("bf16");                              \
  } else {                                          \
    static_assert(std::is_same_v<T, __half>);       \
    statement("f16");                               \
  }

// The same with further arguments: `statement("bf16", …)` or `statement("f16", …)`.
#define BIFOLIO_FOR_16_BIT_TYPE_WITH(T, statement, ...) \
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {     \
    statement("bf16", __VA_ARGS__);                     \
  } else {                                              \
    static_assert(std::is_same_v<T, __half>);           \
    statement("f16", __VA_ARGS__);                      \
  }

}  // namespace bifolio::inline v0_2::cuda::device

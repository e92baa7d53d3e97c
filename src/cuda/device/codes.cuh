// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Elements of codes in device code: sizes, runs of them, and values from codes and scales.

#include <bifolio/dtype.hpp>
#include <cstddef>
#include <cstdint>

#include "common/base/kv_code.hpp"
#include "cuda/device/convert.cuh"

namespace bifolio::inline v0_2::cuda {

__device__ __forceinline__ std::size_t element_bytes(dtype type) {
  return visit_dtype(type, [](auto traits) { return sizeof(typename decltype(traits)::storage); });
}

/// value = code · scale + zero, NaN as 0x7fc00000.
__device__ __forceinline__ float decoded(float code, const detail::scale_pair& scales, bool has_zero) {
  const float product = __fmul_rn(code, scales.scale);
  const float value = has_zero ? __fadd_rn(product, scales.zero) : product;
  return (__float_as_uint(value) & 0x7fffffffu) > 0x7f800000u ? __uint_as_float(0x7fc00000u) : value;
}

/// Reads `Count` elements, aligned as `packed`, in accesses of 16 or 8 bytes.
template <int Count, class T>
__device__ __forceinline__ packed<T, Count> load_run(const T* from) {
  if constexpr (sizeof(T) * Count == 8) {
    packed<T, Count> result;
    *reinterpret_cast<uint2*>(&result) = *reinterpret_cast<const uint2*>(from);
    return result;
  } else {
    return load_packed<Count>(from);
  }
}

}  // namespace bifolio::inline v0_2::cuda

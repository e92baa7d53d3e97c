// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Conversions between storage types in device code, bit for bit those of dtype.hpp: narrowing rounds to nearest even,
/// saturates finite values, keeps infinities, and turns every NaN into the quiet one without payload.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bifolio/dtype.hpp>
#include <cstddef>
#include <cstdint>

namespace bifolio::cuda {

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(bfloat16 value) {
  return __uint_as_float(static_cast<std::uint32_t>(value.bits) << 16);
}
/// Any NaN may come out as another one; `convert` keeps them.
__device__ __forceinline__ float widen(float16 value) { return __half2float(__ushort_as_half(value.bits)); }

template <class T>
__device__ __forceinline__ T narrow(float value);

template <>
__device__ __forceinline__ float narrow<float>(float value) {
  return value;
}

template <>
__device__ __forceinline__ bfloat16 narrow<bfloat16>(float value) {
  const std::uint32_t source = __float_as_uint(value);
  const std::uint32_t magnitude = source & 0x7fffffffu;
  const std::uint32_t sign = (source >> 16) & 0x8000u;
  std::uint32_t bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
  if (magnitude > 0x7f800000u) {
    bits = sign | 0x7fc0u;
  } else if ((bits & 0x7fffu) == 0x7f80u && magnitude != 0x7f800000u) {
    bits = sign | 0x7f7fu;
  }
  return {static_cast<std::uint16_t>(bits)};
}

template <>
__device__ __forceinline__ float16 narrow<float16>(float value) {
  const std::uint32_t source = __float_as_uint(value);
  const std::uint32_t magnitude = source & 0x7fffffffu;
  const std::uint32_t sign = (source >> 16) & 0x8000u;
  std::uint32_t bits = __half_as_ushort(__float2half_rn(value));
  if (magnitude > 0x7f800000u) {
    bits = sign | 0x7e00u;
  } else if ((bits & 0x7fffu) == 0x7c00u && magnitude != 0x7f800000u) {
    bits = sign | 0x7bffu;
  }
  return {static_cast<std::uint16_t>(bits)};
}

/// One stored element to another type.
template <class Dst, class Src>
struct converter {
  static __device__ __forceinline__ Dst apply(Src value) { return narrow<Dst>(widen(value)); }
};
template <class T>
struct converter<T, T> {
  static __device__ __forceinline__ T apply(T value) { return value; }
};
template <>
struct converter<float, float16> {
  /// The hardware forgets sign and payload of a NaN, which dtype.hpp keeps.
  static __device__ __forceinline__ float apply(float16 value) {
    return (value.bits & 0x7fffu) > 0x7c00u ? to_float(value) : widen(value);
  }
};
template <>
struct converter<bfloat16, float16> {
  static __device__ __forceinline__ bfloat16 apply(float16 value) {
    return narrow<bfloat16>(converter<float, float16>::apply(value));
  }
};
template <class Dst, class Src>
__device__ __forceinline__ Dst convert(Src value) {
  return converter<Dst, Src>::apply(value);
}

/// `Count` elements that travel as one access of up to 16 bytes, or several.
template <class T, int Count>
struct alignas(sizeof(T) * Count < 16 ? sizeof(T) * Count : 16) packed {
  T values[Count];
};

/// Reads `Count` elements, aligned as `packed`, in accesses of 16 bytes. Through a reference to `packed` the compiler
/// would read them one by one.
template <int Count, class T>
__device__ __forceinline__ packed<T, Count> load_packed(const T* from) {
  packed<T, Count> result;
  if constexpr (sizeof(result) % 16 == 0) {
#pragma unroll
    for (std::size_t i = 0; i < sizeof(result) / 16; ++i) {
      reinterpret_cast<uint4*>(&result)[i] = reinterpret_cast<const uint4*>(from)[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) result.values[i] = from[i];
  }
  return result;
}

template <class Dst, class Src, int Count>
__device__ __forceinline__ packed<Dst, Count> convert(const packed<Src, Count>& source) {
  packed<Dst, Count> result;
#pragma unroll
  for (int i = 0; i < Count; ++i) result.values[i] = convert<Dst>(source.values[i]);
  return result;
}

/// An element of a tensor whose dtype is known at run time.
__device__ __forceinline__ float load_as_float(const void* data, std::int64_t index, dtype type) {
  return visit_dtype(
      type, [&](auto traits) { return widen(static_cast<const typename decltype(traits)::storage*>(data)[index]); });
}
__device__ __forceinline__ void store_from_float(void* data, std::int64_t index, dtype type, float value) {
  visit_dtype(type, [&](auto traits) {
    using element = typename decltype(traits)::storage;
    static_cast<element*>(data)[index] = narrow<element>(value);
  });
}

}  // namespace bifolio::cuda

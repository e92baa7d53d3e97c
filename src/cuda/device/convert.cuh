// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Conversions between storage types in device code, bit for bit those of dtype.hpp: narrowing rounds to nearest even,
/// saturates, and does with infinities and NaN what dtype.hpp says for each type.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bifolio/dtype.hpp>
#include <cstddef>
#include <cstdint>

namespace bifolio::inline v0_2::cuda {

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(bfloat16 value) {
  return __uint_as_float(static_cast<std::uint32_t>(value.bits) << 16);
}
/// Any NaN may come out as another one; `convert` keeps them.
__device__ __forceinline__ float widen(float16 value) { return __half2float(__ushort_as_half(value.bits)); }

/// As float16, whose range e4m3 shares but for a factor of 2^8; the bits of a NaN are dtype.hpp's.
__device__ __forceinline__ float widen(float8_e4m3 value) {
  const unsigned bits = value.bits;
  const float wide = __fmul_rn(
      __half2float(__ushort_as_half(static_cast<unsigned short>((bits & 0x80u) << 8 | (bits & 0x7fu) << 7))), 256.0f);
  return (bits & 0x7fu) == 0x7fu ? __uint_as_float((bits & 0x80u) << 24 | 0x7fc00000u) : wide;
}
/// Any NaN may come out as another one; `convert` keeps them.
__device__ __forceinline__ float widen(float8_e5m2 value) {
  return widen(float16{static_cast<std::uint16_t>(value.bits << 8)});
}
__device__ __forceinline__ float widen(std::int8_t value) { return static_cast<float>(value); }
__device__ __forceinline__ float widen(std::uint8_t value) { return static_cast<float>(value); }

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

template <>
__device__ __forceinline__ float8_e4m3 narrow<float8_e4m3>(float value) {
#if __CUDA_ARCH__ >= 890
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;\n" : "=h"(pair) : "f"(0.0f), "f"(value));
  const bool is_nan = (__float_as_uint(value) & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<std::uint8_t>(is_nan ? 0x7f : pair)};
#else
  return from_float<float8_e4m3>(value);
#endif
}

template <>
__device__ __forceinline__ float8_e5m2 narrow<float8_e5m2>(float value) {
#if __CUDA_ARCH__ >= 890
  std::uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;\n" : "=h"(pair) : "f"(0.0f), "f"(value));
  const bool is_nan = (__float_as_uint(value) & 0x7fffffffu) > 0x7f800000u;
  return {static_cast<std::uint8_t>(is_nan ? 0x7f : pair)};
#else
  return from_float<float8_e5m2>(value);
#endif
}

/// NaN becomes the larger of the two bounds in fmaxf, and is put right.
template <>
__device__ __forceinline__ std::int8_t narrow<std::int8_t>(float value) {
  const float clamped = fminf(fmaxf(value, -127.0f), 127.0f);
  return static_cast<std::int8_t>(value != value ? 0 : __float2int_rn(clamped));
}

template <>
__device__ __forceinline__ std::uint8_t narrow<std::uint8_t>(float value) {
  const float clamped = fminf(fmaxf(value, 0.0f), 255.0f);
  return static_cast<std::uint8_t>(value != value ? 0 : __float2int_rn(clamped));
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
struct converter<float, float8_e5m2> {
  static __device__ __forceinline__ float apply(float8_e5m2 value) {
    return converter<float, float16>::apply(float16{static_cast<std::uint16_t>(value.bits << 8)});
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
  return visit_tensor_dtype(
      type, [&](auto traits) { return widen(static_cast<const typename decltype(traits)::storage*>(data)[index]); });
}
__device__ __forceinline__ void store_from_float(void* data, std::int64_t index, dtype type, float value) {
  visit_tensor_dtype(type, [&](auto traits) {
    using element = typename decltype(traits)::storage;
    static_cast<element*>(data)[index] = narrow<element>(value);
  });
}

}  // namespace bifolio::inline v0_2::cuda

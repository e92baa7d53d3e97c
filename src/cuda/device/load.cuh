// SPDX-License-Identifier: Apache-2.0
#pragma once

/// 16-byte loads that may be left out. A plain `if (valid) value = *pointer` becomes a branch whose load is waited for
/// before the next one is issued: eight such loads cost eight latencies (measured: 11 µs for a tile instead of 2).

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bifolio/dtype.hpp>
#include <cstdint>

#include "cuda/device/convert.cuh"

namespace bifolio::inline v0_2::cuda {

/// 16 bytes at `pointer` (aligned, read-only for the whole launch), or zeros without touching memory.
__device__ __forceinline__ uint4 load_16_if(const void* pointer, bool valid) {
  uint4 value;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@p ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
      : "l"(pointer), "r"(static_cast<int>(valid)));
  return value;
}

/// The same without a place in L1, which is small beside 227 KB of shared memory, and holds what the compiler spills.
__device__ __forceinline__ uint4 load_16_past_l1_if(const void* pointer, bool valid) {
  uint4 value;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
      : "l"(pointer), "r"(static_cast<int>(valid)));
  return value;
}

/// The same as the first for data that is read once: L1 does not keep it, L2 evicts it first.
__device__ __forceinline__ uint4 load_16_once_if(const void* pointer, bool valid) {
  uint4 value;
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %5, 0;\n"
      "mov.b32 %0, 0;\n"
      "mov.b32 %1, 0;\n"
      "mov.b32 %2, 0;\n"
      "mov.b32 %3, 0;\n"
      "@p ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %6;\n"
      "}\n"
      : "=&r"(value.x), "=&r"(value.y), "=&r"(value.z), "=&r"(value.w)
      : "l"(pointer), "r"(static_cast<int>(valid)), "l"(policy));
  return value;
}

/// 16 bytes as float32s.
template <class T>
struct unpacked;  // of one byte: below
template <>
struct unpacked<float> {
  float values[4];
  __device__ __forceinline__ explicit unpacked(const uint4& bits) {
    values[0] = __uint_as_float(bits.x);
    values[1] = __uint_as_float(bits.y);
    values[2] = __uint_as_float(bits.z);
    values[3] = __uint_as_float(bits.w);
  }
};
template <>
struct unpacked<bfloat16> {
  float values[8];
  __device__ __forceinline__ explicit unpacked(const uint4& bits) {
    const std::uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
};
template <>
struct unpacked<float16> {
  float values[8];
  __device__ __forceinline__ explicit unpacked(const uint4& bits) {
    const std::uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = widen(float16{static_cast<std::uint16_t>(words[i] & 0xffffu)});
      values[2 * i + 1] = widen(float16{static_cast<std::uint16_t>(words[i] >> 16)});
    }
  }
};

/// Elements of one byte.
template <class T>
struct unpacked {
  static_assert(sizeof(T) == 1);
  float values[16];
  __device__ __forceinline__ explicit unpacked(const uint4& bits) {
    const std::uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      values[i] = widen(__builtin_bit_cast(T, static_cast<std::uint8_t>(words[i / 4] >> (8 * (i % 4)))));
    }
  }
};

}  // namespace bifolio::inline v0_2::cuda

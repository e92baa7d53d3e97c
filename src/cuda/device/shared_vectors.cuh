// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Vectors in shared memory by address, and single words copied there.

#include <cstdint>

namespace bifolio::inline v0_2::cuda::device {

[[nodiscard]] __device__ __forceinline__ uint4 load_shared_16(std::uint32_t address) {
  uint4 value;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
[[nodiscard]] __device__ __forceinline__ float2 load_shared_f32x2(std::uint32_t address) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];\n" : "=f"(value.x), "=f"(value.y) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_16(std::uint32_t address, const uint4& value) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}

[[nodiscard]] __device__ __forceinline__ std::uint32_t load_shared_4(std::uint32_t address) {
  std::uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];\n" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_4(std::uint32_t address, std::uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;\n" ::"r"(address), "r"(value) : "memory");
}
[[nodiscard]] __device__ __forceinline__ float4 load_shared_f32x4(std::uint32_t address) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];\n"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(address)
               : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_f32x2(std::uint32_t address, const float2& value) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};\n" ::"r"(address), "f"(value.x), "f"(value.y) : "memory");
}
__device__ __forceinline__ void store_shared_f32x4(std::uint32_t address, const float4& value) {
  asm volatile("st.shared.v4.f32 [%0], {%1,%2,%3,%4};\n" ::"r"(address), "f"(value.x), "f"(value.y), "f"(value.z),
               "f"(value.w)
               : "memory");
}

/// 4 bytes global → shared, asynchronously and through L1. With `valid` false they become zero and nothing is read.
__device__ __forceinline__ void cp_async_4(std::uint32_t dst, const void* src, bool valid) {
  const int size = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(dst), "l"(src), "r"(size) : "memory");
}

__device__ __forceinline__ void cp_async_4(std::uint32_t dst, const void* src) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(dst), "l"(src) : "memory");
}

}  // namespace bifolio::inline v0_2::cuda::device

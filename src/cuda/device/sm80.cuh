// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Thin functions over the PTX that sm_80 brought: cp.async, ldmatrix and the 16-bit mma.sync products (PTX ISA 8.x,
/// sections 9.7.9 and 9.7.15).

#include <cstdint>

#include "cuda/device/float16_types.cuh"

namespace bifolio::inline v0_2::cuda::device {

/// 16 bytes global → shared, past L1. With `valid` false the 16 bytes become zero and nothing is read.
__device__ __forceinline__ void cp_async_16(std::uint32_t dst, const void* src, bool valid) {
  const int size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src), "r"(size) : "memory");
}
__device__ __forceinline__ void cp_async_16(std::uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n" ::"r"(dst), "l"(src) : "memory");
}
/// The same for data that is read once: L2 evicts it first.
__device__ __forceinline__ void cp_async_16_evict_first(std::uint32_t dst, const void* src, bool valid) {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  const int size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;\n" ::"r"(dst), "l"(src),
               "r"(size), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void cp_async_16_evict_first(std::uint32_t dst, const void* src) {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src),
               "l"(policy)
               : "memory");
}

/// The same with the policy as a number, the one that createpolicy gives in code for sm_90: one in registers is moved
/// to uniform ones for every copy.
__device__ __forceinline__ void cp_async_16_read_once(std::uint32_t dst, const void* src) {
  constexpr std::uint64_t evict_first = 0x12f0000000000000;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src),
               "l"(evict_first)
               : "memory");
}

__device__ __forceinline__ void cp_async_16_read_once(std::uint32_t dst, const void* src, bool valid) {
  constexpr std::uint64_t evict_first = 0x12f0000000000000;
  const int size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;\n" ::"r"(dst), "l"(src),
               "r"(size), "l"(evict_first)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

/// Waits until at most `Pending` of this thread's latest groups are in flight.
template <int Pending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

/// Four 8 × 8 matrices of 16-bit elements; lane l gives the row address of matrix l / 8, row l % 8.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(std::uint32_t& r0, std::uint32_t& r1, std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];\n"
               : "=r"(r0), "=r"(r1)
               : "r"(address)
               : "memory");
}

/// acc[16 × 8] += a[16 × 16] · b[16 × 8]
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&acc)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
#define BIFOLIO_MMA(type)                                                     \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type         \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n" \
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
  BIFOLIO_FOR_16_BIT_TYPE(T, BIFOLIO_MMA)
#undef BIFOLIO_MMA
}

/// A float32 as the sum of two TensorFloat-32 numbers. The smaller one is exact to 2^−23 of the larger one; the
/// hardware looks at its upper bits alone.
struct tf32_pair {
  std::uint32_t large;
  std::uint32_t small;
};
[[nodiscard]] __device__ __forceinline__ tf32_pair split_tf32(float x) {
  const std::uint32_t large = (__float_as_uint(x) + 0x1000u) & 0xffffe000u;
  return {large, __float_as_uint(x - __uint_as_float(large))};
}
/// acc[16 × 8] += a[16 × 8] · b[8 × 8], of TensorFloat-32.
__device__ __forceinline__ void mma_m16n8k8_tf32(float (&acc)[4], const uint4& a, std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
      : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}
/// large[16 × 8] += the product of the larger parts of a[16 × 8] and b[8 × 8], small[16 × 8] += the two mixed products,
/// first. They may be one array.
__device__ __forceinline__ void mma_tf32x3(float (&large)[4], float (&small)[4], const tf32_pair (&a)[4],
                                           const tf32_pair& b0, const tf32_pair& b1) {
  const uint4 larger = make_uint4(a[0].large, a[1].large, a[2].large, a[3].large);
  const uint4 smaller = make_uint4(a[0].small, a[1].small, a[2].small, a[3].small);
  mma_m16n8k8_tf32(small, smaller, b0.large, b1.large);
  mma_m16n8k8_tf32(small, larger, b0.small, b1.small);
  mma_m16n8k8_tf32(large, larger, b0.large, b1.large);
}

/// acc[16 × 8] += a[16 × 8] · b[8 × 8]
template <class T>
__device__ __forceinline__ void mma_m16n8k8(float (&acc)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b) {
#define BIFOLIO_MMA(type)                                               \
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32." type "." type    \
               ".f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"    \
               : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]) \
               : "r"(a0), "r"(a1), "r"(b))
  BIFOLIO_FOR_16_BIT_TYPE(T, BIFOLIO_MMA)
#undef BIFOLIO_MMA
}

}  // namespace bifolio::inline v0_2::cuda::device

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The tensor-core vocabulary of sm_80 and later: asynchronous copies into shared memory, 8 × 8 matrix loads and the
/// m16n8k16 product, as thin functions over PTX (PTX ISA 8.x, sections 9.7.9 and 9.7.15).

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace bifolio::cuda::device {

[[nodiscard]] __device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

/// 16 bytes global → shared, past L1. With `valid` false the 16 bytes become zero and nothing is read.
__device__ __forceinline__ void copy_async_16(std::uint32_t dst, const void* src, bool valid) {
  const int size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;\n" ::"r"(dst), "l"(src), "r"(size) : "memory");
}
/// The same for what is read once: it leaves the L2 cache before everything else.
__device__ __forceinline__ void copy_async_16_once(std::uint32_t dst, const void* src, bool valid) {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;\n" : "=l"(policy));
  const int size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;\n" ::"r"(dst), "l"(src),
               "r"(size), "l"(policy)
               : "memory");
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

/// Waits until at most `Pending` of this thread's latest groups are still on their way.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(Pending) : "memory");
}

/// Four 8 × 8 matrices of 16-bit elements; lane l gives the row address of matrix l / 8, row l % 8.
__device__ __forceinline__ void load_matrix_x4(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrix_x4_trans(std::uint32_t (&r)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

/// What differs between the two 16-bit types.
template <class T>
struct half_traits;

template <>
struct half_traits<__nv_bfloat16> {
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t pack(float lo, float hi) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(lo, hi);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  /// acc[16 × 8] += a[16 × 16] · b[16 × 8]
  static __device__ __forceinline__ void mma(float (&acc)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  /// The same over 8 instead of 16.
  static __device__ __forceinline__ void mma_8(float (&acc)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a0), "r"(a1), "r"(b));
  }
};

template <>
struct half_traits<__half> {
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t pack(float lo, float hi) {
    const __half2 pair = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
  static __device__ __forceinline__ void mma(float (&acc)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
  /// The same over 8 instead of 16.
  static __device__ __forceinline__ void mma_8(float (&acc)[4], std::uint32_t a0, std::uint32_t a1, std::uint32_t b) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\n"
                 : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
                 : "r"(a0), "r"(a1), "r"(b));
  }
};

/// Programmatic dependent launch (sm_90; nothing before): lets the next kernel of the stream start its prologue, and
/// waits for everything the kernels before this one have written.
__device__ __forceinline__ void grid_dependency_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;\n" ::: "memory");
#endif
}

/// Asks for the line of `pointer` in the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(pointer));
}

/// Adds and returns what was there. Releases what this thread knows to be written, by others too if a barrier is in
/// between, and acquires what other adders have released.
[[nodiscard]] __device__ __forceinline__ std::uint32_t add_acquire_release(std::uint32_t* counter,
                                                                           std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;\n" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}

/// 2^x, with 2^−inf = 0.
[[nodiscard]] __device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace bifolio::cuda::device

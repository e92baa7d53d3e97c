// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Thin functions over the PTX of sm_90a: wgmma, TMA loads, mbarriers with transaction counts, setmaxnreg (PTX ISA 8.x,
/// sections 9.7.8.27, 9.7.13.15 and 9.7.15.5).

#include <cstdint>

#include "cuda/device/float16_types.cuh"

namespace bifolio::cuda::device {

/// Shared-memory matrix descriptor for rows of 128 bytes in the 128-byte swizzle. `leading_bytes`: between chunks of 64
/// elements along a contiguous M/N dimension (ignored where K is contiguous); `stride_bytes`: between groups of 8 rows.
[[nodiscard]] __device__ __forceinline__ std::uint64_t wgmma_descriptor(std::uint32_t address, int leading_bytes,
                                                                        int stride_bytes) {
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) | (static_cast<std::uint64_t>(leading_bytes >> 4) << 16) |
         (static_cast<std::uint64_t>(stride_bytes >> 4) << 32) | (std::uint64_t{1} << 62);
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
}

/// Keeps the compiler from moving uses of an accumulator across the asynchronous product that owns it.
template <int N>
__device__ __forceinline__ void wgmma_fence_operands(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// Operand lists of the products below: registers d[i …] as outputs, and their names in the instruction.
// clang-format off
#define BIFOLIO_REGISTERS_8(i) \
  "+f"(d[(i) + 0]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), \
  "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define BIFOLIO_REGISTERS_32(i) \
  BIFOLIO_REGISTERS_8(i), BIFOLIO_REGISTERS_8((i) + 8), BIFOLIO_REGISTERS_8((i) + 16), BIFOLIO_REGISTERS_8((i) + 24)
#define BIFOLIO_REGISTERS_64(i) BIFOLIO_REGISTERS_32(i), BIFOLIO_REGISTERS_32((i) + 32)
#define BIFOLIO_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BIFOLIO_NAMES_64 \
  BIFOLIO_NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
// clang-format on

/// The 32 registers of d from First: d[64 × 64] (+)= a[64 × 16] · b[16 × 64], a and b from shared memory, K contiguous
/// in both. Asynchronous, like all products here: between wgmma_fence and wgmma_wait_group nothing else touches d.
template <class T, int First, int N>
__device__ __forceinline__ void wgmma_m64n64k16(float (&d)[N], std::uint64_t a, std::uint64_t b, bool accumulate) {
#define BIFOLIO_WGMMA(type)                                                             \
  asm volatile(                                                                         \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                      \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" BIFOLIO_NAMES_32 \
      "}, %32, %33, p, 1, 1, 0, 0;\n}\n"                                                \
      : BIFOLIO_REGISTERS_32(First)                                                     \
      : "l"(a), "l"(b), "r"(accumulate ? 1 : 0))
  BIFOLIO_FOR_16_BIT_TYPE(T, BIFOLIO_WGMMA)
#undef BIFOLIO_WGMMA
}

/// The 64 registers of d from First: d[64 × 128] (+)= a[64 × 16] · b[16 × 128], likewise.
template <class T, int First, int N>
__device__ __forceinline__ void wgmma_m64n128k16(float (&d)[N], std::uint64_t a, std::uint64_t b, bool accumulate) {
#define BIFOLIO_WGMMA(type)                                                              \
  asm volatile(                                                                          \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                       \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" BIFOLIO_NAMES_64 \
      "}, %64, %65, p, 1, 1, 0, 0;\n}\n"                                                 \
      : BIFOLIO_REGISTERS_64(First)                                                      \
      : "l"(a), "l"(b), "r"(accumulate ? 1 : 0))
  BIFOLIO_FOR_16_BIT_TYPE(T, BIFOLIO_WGMMA)
#undef BIFOLIO_WGMMA
}

/// d[64 × N] += a[64 × 16] · b[16 × N], a from registers, b from shared memory with N contiguous; N = 64 or 128, twice
/// the accumulators of a thread.
template <class T>
__device__ __forceinline__ void wgmma_m64k16_rs(float (&d)[32], const std::uint32_t (&a)[4], std::uint64_t b) {
#define BIFOLIO_WGMMA(type)                                                                      \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" BIFOLIO_NAMES_32 \
               "}, {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n"                                     \
               : BIFOLIO_REGISTERS_32(0)                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
  BIFOLIO_FOR_16_BIT_TYPE(T, BIFOLIO_WGMMA)
#undef BIFOLIO_WGMMA
}
template <class T>
__device__ __forceinline__ void wgmma_m64k16_rs(float (&d)[64], const std::uint32_t (&a)[4], std::uint64_t b){
#define BIFOLIO_WGMMA(type)                                                                       \
  asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" BIFOLIO_NAMES_64 \
               "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"                                      \
               : BIFOLIO_REGISTERS_64(0)                                                          \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))
    BIFOLIO_FOR_16_BIT_TYPE(T, BIFOLIO_WGMMA)
#undef BIFOLIO_WGMMA
}

#undef BIFOLIO_REGISTERS_8
#undef BIFOLIO_REGISTERS_32
#undef BIFOLIO_REGISTERS_64
#undef BIFOLIO_NAMES_32
#undef BIFOLIO_NAMES_64

__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(std::uint32_t barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(num_bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_wait_parity(std::uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni DONE;\nbra.uni WAIT;\nDONE:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// One box of a tensor map into shared memory by TMA; its bytes are counted on `barrier`.
__device__ __forceinline__ void tma_load_5d(std::uint32_t dst, const void* map, std::uint32_t barrier, int c0, int c1,
                                            int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];\n" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
__device__ __forceinline__ void tma_load_3d(std::uint32_t dst, const void* map, std::uint32_t barrier, int c0, int c1,
                                            int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];\n" ::
          "r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
/// Makes this thread's ordinary shared-memory writes visible to TMA and the tensor cores.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

__device__ __forceinline__ void named_barrier_sync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(num_threads) : "memory");
}

template <int Registers>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Registers));
}

}  // namespace bifolio::cuda::device

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Thin functions over the PTX of sm_90a: wgmma, TMA loads, mbarriers with transaction counts, setmaxnreg (PTX ISA 8.x,
/// sections 9.7.8.27, 9.7.13.15 and 9.7.15.5).

#include <cstdint>

#include "cuda/device/float16_types.cuh"

namespace bifolio::inline v0_2::cuda::device {

/// Shared-memory matrix descriptor for rows of 128 bytes in the 128-byte swizzle. `leading_bytes`: between chunks of 64
/// elements along a contiguous M/N dimension (ignored where K is contiguous); `stride_bytes`: between groups of 8 rows.
[[nodiscard]] __device__ __forceinline__ std::uint64_t wgmma_descriptor(std::uint32_t address, int leading_bytes,
                                                                        int stride_bytes) {
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) | (static_cast<std::uint64_t>(leading_bytes >> 4) << 16) |
         (static_cast<std::uint64_t>(stride_bytes >> 4) << 32) | (std::uint64_t{1} << 62);
}

/// The same matrix `bytes` further on: an addition to the low word, which holds the address.
[[nodiscard]] __device__ __forceinline__ std::uint64_t wgmma_descriptor_after(std::uint64_t descriptor, int bytes) {
  const auto low = static_cast<std::uint32_t>(descriptor) + static_cast<std::uint32_t>(bytes >> 4);
  return (descriptor & 0xffffffff00000000u) | low;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}
template <int Pending>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
}

/// Waits for all groups once `value`, which is not negative, is known. Without that, ptxas moves the wait up past
/// arithmetic that should overlap with the products; the sleep, which never happens, is the dependency that it
/// respects.
__device__ __forceinline__ void wgmma_wait_all_after(float value) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p nanosleep.u32 0;\nwgmma.wait_group.sync.aligned 0;\n}\n" ::
          "f"(value)
      : "memory");
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
#define BIFOLIO_REGISTERS_16(i) BIFOLIO_REGISTERS_8(i), BIFOLIO_REGISTERS_8((i) + 8)
#define BIFOLIO_REGISTERS_32(i) BIFOLIO_REGISTERS_16(i), BIFOLIO_REGISTERS_16((i) + 16)
#define BIFOLIO_OPERANDS_16 BIFOLIO_REGISTERS_16(0)
#define BIFOLIO_OPERANDS_32 BIFOLIO_REGISTERS_32(0)
#define BIFOLIO_OPERANDS_40 BIFOLIO_OPERANDS_32, BIFOLIO_REGISTERS_8(32)
#define BIFOLIO_OPERANDS_48 BIFOLIO_OPERANDS_32, BIFOLIO_REGISTERS_16(32)
#define BIFOLIO_OPERANDS_64 BIFOLIO_OPERANDS_32, BIFOLIO_REGISTERS_32(32)
#define BIFOLIO_OPERANDS_96 BIFOLIO_OPERANDS_64, BIFOLIO_REGISTERS_32(64)
#define BIFOLIO_OPERANDS_128 BIFOLIO_OPERANDS_96, BIFOLIO_REGISTERS_32(96)
#define BIFOLIO_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define BIFOLIO_NAMES_32 \
  BIFOLIO_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define BIFOLIO_NAMES_40 BIFOLIO_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define BIFOLIO_NAMES_48 BIFOLIO_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define BIFOLIO_NAMES_64 BIFOLIO_NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define BIFOLIO_NAMES_96 BIFOLIO_NAMES_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define BIFOLIO_NAMES_128 BIFOLIO_NAMES_96 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
// clang-format on

/// d[64 × N] (+)= a[64 × 16] · b[16 × N], a and b from shared memory, K contiguous in both; N is twice the accumulators
/// of a thread. Asynchronous, like all products here: between wgmma_fence and wgmma_wait_group nothing else touches d.
#define BIFOLIO_DEFINE_WGMMA(num_registers, columns, a_name, b_name, accumulate_name)                       \
  template <class T>                                                                                        \
  __device__ __forceinline__ void wgmma_m64k16(float(&d)[num_registers], std::uint64_t a, std::uint64_t b,  \
                                               bool accumulate) {                                           \
    BIFOLIO_FOR_16_BIT_TYPE_WITH(T, BIFOLIO_WGMMA, num_registers, columns, a_name, b_name, accumulate_name) \
  }
#define BIFOLIO_WGMMA(type, num_registers, columns, a_name, b_name, accumulate_name)                                   \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_name                                                     \
               ", 0;\n"                                                                                                \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" BIFOLIO_NAMES_##num_registers \
               "}, " a_name ", " b_name ", p, 1, 1, 0, 0;\n}\n"                                                        \
               : BIFOLIO_OPERANDS_##num_registers                                                                      \
               : "l"(a), "l"(b), "r"(accumulate ? 1 : 0))
BIFOLIO_DEFINE_WGMMA(16, "32", "%16", "%17", "%18")
BIFOLIO_DEFINE_WGMMA(32, "64", "%32", "%33", "%34")
BIFOLIO_DEFINE_WGMMA(40, "80", "%40", "%41", "%42")
BIFOLIO_DEFINE_WGMMA(48, "96", "%48", "%49", "%50")
BIFOLIO_DEFINE_WGMMA(64, "128", "%64", "%65", "%66")
#undef BIFOLIO_WGMMA
#undef BIFOLIO_DEFINE_WGMMA

/// d[64 × N] (+)= a[64 × 16] · b[16 × N], a from registers, b from shared memory with N contiguous; likewise.
#define BIFOLIO_DEFINE_WGMMA(num_registers, columns, a0, a1, a2, a3, b_name, accumulate_name)                       \
  template <class T>                                                                                                \
  __device__ __forceinline__ void wgmma_m64k16_rs(float(&d)[num_registers], const std::uint32_t(&a)[4],             \
                                                  std::uint64_t b, bool accumulate = true) {                        \
    BIFOLIO_FOR_16_BIT_TYPE_WITH(T, BIFOLIO_WGMMA, num_registers, columns, a0, a1, a2, a3, b_name, accumulate_name) \
  }
#define BIFOLIO_WGMMA(type, num_registers, columns, a0, a1, a2, a3, b_name, accumulate_name)                           \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_name                                                     \
               ", 0;\n"                                                                                                \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" BIFOLIO_NAMES_##num_registers \
               "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b_name ", p, 1, 1, 1;\n}\n"                                     \
               : BIFOLIO_OPERANDS_##num_registers                                                                      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate ? 1 : 0))
BIFOLIO_DEFINE_WGMMA(32, "64", "%32", "%33", "%34", "%35", "%36", "%37")
BIFOLIO_DEFINE_WGMMA(48, "96", "%48", "%49", "%50", "%51", "%52", "%53")
BIFOLIO_DEFINE_WGMMA(64, "128", "%64", "%65", "%66", "%67", "%68", "%69")
BIFOLIO_DEFINE_WGMMA(96, "192", "%96", "%97", "%98", "%99", "%100", "%101")
BIFOLIO_DEFINE_WGMMA(128, "256", "%128", "%129", "%130", "%131", "%132", "%133")
#undef BIFOLIO_WGMMA
#undef BIFOLIO_DEFINE_WGMMA

/// d[64 × N] (+)= a[64 × 8] · b[8 × N] of TensorFloat-32, a from registers, b from shared memory with K contiguous;
/// likewise. The products begin new sums where `accumulate` is false.
#define BIFOLIO_DEFINE_WGMMA(num_registers, columns, a0, a1, a2, a3, b_name, accumulate_name)                   \
  __device__ __forceinline__ void wgmma_m64k8_tf32_rs(float(&d)[num_registers], const std::uint32_t(&a)[4],     \
                                                      std::uint64_t b, bool accumulate = true) {                \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " accumulate_name                                            \
                 ", 0;\n"                                                                                       \
                 "wgmma.mma_async.sync.aligned.m64n" columns "k8.f32.tf32.tf32 {" BIFOLIO_NAMES_##num_registers \
                 "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b_name ", p, 1, 1;\n}\n"                               \
                 : BIFOLIO_OPERANDS_##num_registers                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate ? 1 : 0));                \
  }
BIFOLIO_DEFINE_WGMMA(16, "32", "%16", "%17", "%18", "%19", "%20", "%21")
BIFOLIO_DEFINE_WGMMA(32, "64", "%32", "%33", "%34", "%35", "%36", "%37")
BIFOLIO_DEFINE_WGMMA(64, "128", "%64", "%65", "%66", "%67", "%68", "%69")
#undef BIFOLIO_DEFINE_WGMMA

#undef BIFOLIO_REGISTERS_8
#undef BIFOLIO_REGISTERS_16
#undef BIFOLIO_REGISTERS_32
#undef BIFOLIO_OPERANDS_16
#undef BIFOLIO_OPERANDS_32
#undef BIFOLIO_OPERANDS_40
#undef BIFOLIO_OPERANDS_48
#undef BIFOLIO_OPERANDS_64
#undef BIFOLIO_OPERANDS_96
#undef BIFOLIO_OPERANDS_128
#undef BIFOLIO_NAMES_16
#undef BIFOLIO_NAMES_32
#undef BIFOLIO_NAMES_40
#undef BIFOLIO_NAMES_48
#undef BIFOLIO_NAMES_64
#undef BIFOLIO_NAMES_96
#undef BIFOLIO_NAMES_128

__device__ __forceinline__ void mbarrier_init(std::uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive_expect_tx(std::uint32_t barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(num_bytes) : "memory");
}
/// Arrives when all cp.async that this thread has issued are done; counts as one of the barrier's arrivals.
__device__ __forceinline__ void mbarrier_arrive_after_copies(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
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

/// Whether the wait above would return at once.
[[nodiscard]] __device__ __forceinline__ bool mbarrier_test_parity(std::uint32_t barrier, int parity) {
  int done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n}\n"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

/// `num_bytes` consecutive bytes into shared memory by TMA, without a map; they are counted on `barrier`. Addresses and
/// count are multiples of 16.
__device__ __forceinline__ void bulk_load(std::uint32_t dst, const void* src, int num_bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::"r"(dst),
               "l"(src), "r"(num_bytes), "r"(barrier)
               : "memory");
}
/// Brings them into the L2.
__device__ __forceinline__ void bulk_prefetch_l2(const void* src, int num_bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(src), "r"(num_bytes) : "memory");
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

}  // namespace bifolio::inline v0_2::cuda::device

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Products of Hopper's tensor cores with few columns: b is the narrow operand, a has 64 rows (PTX ISA 8.x, section
/// 9.7.15.5). And the transposed store of its registers.

#include <cstdint>

#include "cuda/device/float16_types.cuh"

namespace bifolio::inline v0_2::cuda::device {

/// Where the operand's K dimension is.
enum class major : int { k = 0, mn = 1 };

/// d[64 × 16] (+)= a[64 × 16] · b[16 × 16], a and b from shared memory, K contiguous in b. Asynchronous, as in
/// sm90.cuh.
template <class T, major A>
__device__ __forceinline__ void wgmma_m64n16k16(float (&d)[8], std::uint64_t a, std::uint64_t b, bool accumulate) {
#define BIFOLIO_WGMMA(type)                                                                            \
  asm volatile(                                                                                        \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %10, 0;\n"                                                     \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type                                      \
      " {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, p, 1, 1, %11, 0;\n}\n"                               \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) \
      : "l"(a), "l"(b), "r"(accumulate ? 1 : 0), "n"(static_cast<int>(A)))
  BIFOLIO_FOR_16_BIT_TYPE(T, BIFOLIO_WGMMA)
#undef BIFOLIO_WGMMA
}

/// The same, a from registers.
template <class T>
__device__ __forceinline__ void wgmma_m64n16k16_rs(float (&d)[8], const std::uint32_t (&a)[4], std::uint64_t b,
                                                   bool accumulate){
#define BIFOLIO_WGMMA(type)                                                                            \
  asm volatile(                                                                                        \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"                                                     \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." type "." type                                      \
      " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}\n"                   \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate ? 1 : 0))
    BIFOLIO_FOR_16_BIT_TYPE(T, BIFOLIO_WGMMA)
#undef BIFOLIO_WGMMA
}

/// Four 8 × 8 matrices of 16-bit elements to shared memory, each transposed: lane i gives the address of 16 bytes, row
/// i % 8 of matrix i / 8 as it is stored.
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t address, const std::uint32_t (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(address), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

/// Whether the condition holds in any of the `num_threads` that meet at the barrier.
[[nodiscard]] __device__ __forceinline__ bool named_barrier_any(int id, int num_threads, bool condition) {
  int any;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.b32 p, %3, 0;\nbarrier.cta.red.or.pred q, %1, %2, p;\nselp.b32 %0, 1, 0, q;\n}\n"
      : "=r"(any)
      : "r"(id), "r"(num_threads), "r"(condition ? 1 : 0)
      : "memory");
  return any != 0;
}

}  // namespace bifolio::inline v0_2::cuda::device

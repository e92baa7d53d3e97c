// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The Hopper vocabulary (sm_90a): warpgroup products, tensor-map copies, transaction barriers, as thin functions over
/// PTX (PTX ISA 8.x, sections 9.7.8.27, 9.7.13.15 and 9.7.15.5).

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace bifolio::cuda::device {

/// Shared-memory matrix descriptor for rows of 128 bytes in the 128-byte swizzle. `leading_bytes`: between chunks of 64
/// elements along a contiguous M/N dimension (ignored where K is contiguous); `stride_bytes`: between groups of 8 rows.
[[nodiscard]] __device__ __forceinline__ std::uint64_t matrix_descriptor(std::uint32_t address, int leading_bytes,
                                                                         int stride_bytes) {
  return static_cast<std::uint64_t>((address & 0x3ffff) >> 4) | (static_cast<std::uint64_t>(leading_bytes >> 4) << 16) |
         (static_cast<std::uint64_t>(stride_bytes >> 4) << 32) | (std::uint64_t{1} << 62);
}

__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void warpgroup_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
}

/// Keeps the compiler from moving uses of an accumulator across the asynchronous product that owns it.
template <int N>
__device__ __forceinline__ void fence_registers(float (&r)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <class T>
struct warpgroup_mma;

template <>
struct warpgroup_mma<__nv_bfloat16> {
  /// The 32 registers of d from First: d[64 × 64] (+)= a[64 × 16] · b[16 × 64], both from shared memory, both with K
  /// contiguous.
  template <int First, int N>
  static __device__ __forceinline__ void product_n64(float (&d)[N], std::uint64_t a, std::uint64_t b, bool accumulate) {
    const int keep = accumulate ? 1 : 0;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, "
        "1, 1, 0, 0;\n}\n"
        : "+f"(d[First + 0]), "+f"(d[First + 1]), "+f"(d[First + 2]), "+f"(d[First + 3]), "+f"(d[First + 4]),
          "+f"(d[First + 5]), "+f"(d[First + 6]), "+f"(d[First + 7]), "+f"(d[First + 8]), "+f"(d[First + 9]),
          "+f"(d[First + 10]), "+f"(d[First + 11]), "+f"(d[First + 12]), "+f"(d[First + 13]), "+f"(d[First + 14]),
          "+f"(d[First + 15]), "+f"(d[First + 16]), "+f"(d[First + 17]), "+f"(d[First + 18]), "+f"(d[First + 19]),
          "+f"(d[First + 20]), "+f"(d[First + 21]), "+f"(d[First + 22]), "+f"(d[First + 23]), "+f"(d[First + 24]),
          "+f"(d[First + 25]), "+f"(d[First + 26]), "+f"(d[First + 27]), "+f"(d[First + 28]), "+f"(d[First + 29]),
          "+f"(d[First + 30]), "+f"(d[First + 31])
        : "l"(a), "l"(b), "r"(keep));
  }

  /// d[64 × 64] += a[64 × 16] · b[16 × 64], a from registers, b from shared memory with N contiguous.
  static __device__ __forceinline__ void product_transposed(float (&d)[32], const std::uint32_t (&a)[4],
                                                            std::uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, "
        "%34, %35}, %36, 1, 1, 1, 1;\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }

  /// The 64 registers of d from First: d[64 × 128] (+)= a[64 × 16] · b[16 × 128], both from shared memory, both with K
  /// contiguous.
  template <int First, int N>
  static __device__ __forceinline__ void product_n128(float (&d)[N], std::uint64_t a, std::uint64_t b,
                                                      bool accumulate) {
    const int keep = accumulate ? 1 : 0;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
        "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
        "%57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n}\n"
        : "+f"(d[First + 0]), "+f"(d[First + 1]), "+f"(d[First + 2]), "+f"(d[First + 3]), "+f"(d[First + 4]),
          "+f"(d[First + 5]), "+f"(d[First + 6]), "+f"(d[First + 7]), "+f"(d[First + 8]), "+f"(d[First + 9]),
          "+f"(d[First + 10]), "+f"(d[First + 11]), "+f"(d[First + 12]), "+f"(d[First + 13]), "+f"(d[First + 14]),
          "+f"(d[First + 15]), "+f"(d[First + 16]), "+f"(d[First + 17]), "+f"(d[First + 18]), "+f"(d[First + 19]),
          "+f"(d[First + 20]), "+f"(d[First + 21]), "+f"(d[First + 22]), "+f"(d[First + 23]), "+f"(d[First + 24]),
          "+f"(d[First + 25]), "+f"(d[First + 26]), "+f"(d[First + 27]), "+f"(d[First + 28]), "+f"(d[First + 29]),
          "+f"(d[First + 30]), "+f"(d[First + 31]), "+f"(d[First + 32]), "+f"(d[First + 33]), "+f"(d[First + 34]),
          "+f"(d[First + 35]), "+f"(d[First + 36]), "+f"(d[First + 37]), "+f"(d[First + 38]), "+f"(d[First + 39]),
          "+f"(d[First + 40]), "+f"(d[First + 41]), "+f"(d[First + 42]), "+f"(d[First + 43]), "+f"(d[First + 44]),
          "+f"(d[First + 45]), "+f"(d[First + 46]), "+f"(d[First + 47]), "+f"(d[First + 48]), "+f"(d[First + 49]),
          "+f"(d[First + 50]), "+f"(d[First + 51]), "+f"(d[First + 52]), "+f"(d[First + 53]), "+f"(d[First + 54]),
          "+f"(d[First + 55]), "+f"(d[First + 56]), "+f"(d[First + 57]), "+f"(d[First + 58]), "+f"(d[First + 59]),
          "+f"(d[First + 60]), "+f"(d[First + 61]), "+f"(d[First + 62]), "+f"(d[First + 63])
        : "l"(a), "l"(b), "r"(keep));
  }

  /// d[64 × 128] += a[64 × 16] · b[16 × 128], a from registers, b from shared memory with N contiguous.
  static __device__ __forceinline__ void product_transposed(float (&d)[64], const std::uint32_t (&a)[4],
                                                            std::uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
        "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
        "%57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }

  /// d[64 × 256] += a[64 × 16] · b[16 × 256], a from registers, b from shared memory with N contiguous.
  static __device__ __forceinline__ void product_transposed(float (&d)[128], const std::uint32_t (&a)[4],
                                                            std::uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
        "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
        "%57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, "
        "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "
        "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "
        "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]),
          "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]),
          "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]),
          "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]),
          "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]),
          "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]),
          "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]),
          "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]),
          "+f"(d[126]), "+f"(d[127])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};

template <>
struct warpgroup_mma<__half> {
  /// The 32 registers of d from First: d[64 × 64] (+)= a[64 × 16] · b[16 × 64], both from shared memory, both with K
  /// contiguous.
  template <int First, int N>
  static __device__ __forceinline__ void product_n64(float (&d)[N], std::uint64_t a, std::uint64_t b, bool accumulate) {
    const int keep = accumulate ? 1 : 0;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, "
        "1, 1, 0, 0;\n}\n"
        : "+f"(d[First + 0]), "+f"(d[First + 1]), "+f"(d[First + 2]), "+f"(d[First + 3]), "+f"(d[First + 4]),
          "+f"(d[First + 5]), "+f"(d[First + 6]), "+f"(d[First + 7]), "+f"(d[First + 8]), "+f"(d[First + 9]),
          "+f"(d[First + 10]), "+f"(d[First + 11]), "+f"(d[First + 12]), "+f"(d[First + 13]), "+f"(d[First + 14]),
          "+f"(d[First + 15]), "+f"(d[First + 16]), "+f"(d[First + 17]), "+f"(d[First + 18]), "+f"(d[First + 19]),
          "+f"(d[First + 20]), "+f"(d[First + 21]), "+f"(d[First + 22]), "+f"(d[First + 23]), "+f"(d[First + 24]),
          "+f"(d[First + 25]), "+f"(d[First + 26]), "+f"(d[First + 27]), "+f"(d[First + 28]), "+f"(d[First + 29]),
          "+f"(d[First + 30]), "+f"(d[First + 31])
        : "l"(a), "l"(b), "r"(keep));
  }

  /// d[64 × 64] += a[64 × 16] · b[16 × 64], a from registers, b from shared memory with N contiguous.
  static __device__ __forceinline__ void product_transposed(float (&d)[32], const std::uint32_t (&a)[4],
                                                            std::uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, "
        "%34, %35}, %36, 1, 1, 1, 1;\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }

  /// The 64 registers of d from First: d[64 × 128] (+)= a[64 × 16] · b[16 × 128], both from shared memory, both with K
  /// contiguous.
  template <int First, int N>
  static __device__ __forceinline__ void product_n128(float (&d)[N], std::uint64_t a, std::uint64_t b,
                                                      bool accumulate) {
    const int keep = accumulate ? 1 : 0;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
        "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
        "%57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1, 0, 0;\n}\n"
        : "+f"(d[First + 0]), "+f"(d[First + 1]), "+f"(d[First + 2]), "+f"(d[First + 3]), "+f"(d[First + 4]),
          "+f"(d[First + 5]), "+f"(d[First + 6]), "+f"(d[First + 7]), "+f"(d[First + 8]), "+f"(d[First + 9]),
          "+f"(d[First + 10]), "+f"(d[First + 11]), "+f"(d[First + 12]), "+f"(d[First + 13]), "+f"(d[First + 14]),
          "+f"(d[First + 15]), "+f"(d[First + 16]), "+f"(d[First + 17]), "+f"(d[First + 18]), "+f"(d[First + 19]),
          "+f"(d[First + 20]), "+f"(d[First + 21]), "+f"(d[First + 22]), "+f"(d[First + 23]), "+f"(d[First + 24]),
          "+f"(d[First + 25]), "+f"(d[First + 26]), "+f"(d[First + 27]), "+f"(d[First + 28]), "+f"(d[First + 29]),
          "+f"(d[First + 30]), "+f"(d[First + 31]), "+f"(d[First + 32]), "+f"(d[First + 33]), "+f"(d[First + 34]),
          "+f"(d[First + 35]), "+f"(d[First + 36]), "+f"(d[First + 37]), "+f"(d[First + 38]), "+f"(d[First + 39]),
          "+f"(d[First + 40]), "+f"(d[First + 41]), "+f"(d[First + 42]), "+f"(d[First + 43]), "+f"(d[First + 44]),
          "+f"(d[First + 45]), "+f"(d[First + 46]), "+f"(d[First + 47]), "+f"(d[First + 48]), "+f"(d[First + 49]),
          "+f"(d[First + 50]), "+f"(d[First + 51]), "+f"(d[First + 52]), "+f"(d[First + 53]), "+f"(d[First + 54]),
          "+f"(d[First + 55]), "+f"(d[First + 56]), "+f"(d[First + 57]), "+f"(d[First + 58]), "+f"(d[First + 59]),
          "+f"(d[First + 60]), "+f"(d[First + 61]), "+f"(d[First + 62]), "+f"(d[First + 63])
        : "l"(a), "l"(b), "r"(keep));
  }

  /// d[64 × 128] += a[64 × 16] · b[16 × 128], a from registers, b from shared memory with N contiguous.
  static __device__ __forceinline__ void product_transposed(float (&d)[64], const std::uint32_t (&a)[4],
                                                            std::uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
        "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
        "%57, %58, %59, %60, %61, %62, %63}, {%64, %65, %66, %67}, %68, 1, 1, 1, 1;\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }

  /// d[64 × 256] += a[64 × 16] · b[16 × 256], a from registers, b from shared memory with N contiguous.
  static __device__ __forceinline__ void product_transposed(float (&d)[128], const std::uint32_t (&a)[4],
                                                            std::uint64_t b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, "
        "%13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, "
        "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, "
        "%57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, "
        "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, "
        "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, "
        "%118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),
          "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),
          "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),
          "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),
          "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),
          "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
          "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
          "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63]), "+f"(d[64]),
          "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), "+f"(d[70]), "+f"(d[71]), "+f"(d[72]),
          "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]),
          "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]),
          "+f"(d[89]), "+f"(d[90]), "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]),
          "+f"(d[97]), "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]), "+f"(d[104]),
          "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]), "+f"(d[110]), "+f"(d[111]),
          "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]), "+f"(d[116]), "+f"(d[117]), "+f"(d[118]),
          "+f"(d[119]), "+f"(d[120]), "+f"(d[121]), "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]),
          "+f"(d[126]), "+f"(d[127])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
};

// ---- transaction barriers -----------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(std::uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
__device__ __forceinline__ void barrier_expect(std::uint32_t barrier, int num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(num_bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(std::uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni DONE;\nbra.uni WAIT;\nDONE:\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

/// One box of a tensor map into shared memory; completes on `barrier`.
__device__ __forceinline__ void copy_box_4d(std::uint32_t dst, const void* map, std::uint32_t barrier, int c0, int c1,
                                            int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];\n" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
__device__ __forceinline__ void copy_box_5d(std::uint32_t dst, const void* map, std::uint32_t barrier, int c0, int c1,
                                            int c2, int c3, int c4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], "
      "[%2];\n" ::"r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
      : "memory");
}
__device__ __forceinline__ void copy_box_3d(std::uint32_t dst, const void* map, std::uint32_t barrier, int c0, int c1,
                                            int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];\n" ::
          "r"(dst),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}

/// Makes this thread's ordinary shared-memory writes visible to the copy engine and the tensor cores.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }

__device__ __forceinline__ void named_barrier_sync(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(num_threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(num_threads) : "memory");
}

template <int Registers>
__device__ __forceinline__ void registers_increase() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_decrease() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(Registers));
}

}  // namespace bifolio::cuda::device

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Thin functions over PTX that every supported architecture has (sm_80 and later).

#include <cstdint>

namespace bifolio::inline v0_2::cuda::device {

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

[[nodiscard]] __device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

[[nodiscard]] __device__ __forceinline__ float load_shared_f32(std::uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(value) : "r"(address) : "memory");
  return value;
}

/// The value, which stays in a register from here on: the compiler cannot know it, and so not compute it anew where it
/// is used. For what a loop needs in every round. All lanes of the warp take part.
template <class T>
[[nodiscard]] __device__ __forceinline__ T kept(T value) {
  static_assert(sizeof(T) == 4);
  return __shfl_sync(0xffffffffu, value, static_cast<int>(threadIdx.x) & 31);
}

/// Writes 16 bytes of zeros.
__device__ __forceinline__ void store_shared_zeros_16(std::uint32_t address) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};\n" ::"r"(address), "r"(0) : "memory");
}

/// Prefetches the cache line of `pointer` into L2.
__device__ __forceinline__ void prefetch_l2(const void* pointer) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(pointer));
}

/// Adds and returns what was there. Releases what this thread knows to be written, by others too if a barrier is in
/// between, and acquires what other adders have released.
[[nodiscard]] __device__ __forceinline__ std::uint32_t atomic_add_acq_rel(std::uint32_t* counter, std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;\n" : "=r"(before) : "l"(counter), "r"(value) : "memory");
  return before;
}

/// Counts up, from `last` to 0, and returns what was there. Releases and acquires as the one above does.
[[nodiscard]] __device__ __forceinline__ std::uint32_t atomic_increment_acq_rel(std::uint32_t* counter,
                                                                                std::uint32_t last) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;\n" : "=r"(before) : "l"(counter), "r"(last) : "memory");
  return before;
}
/// The same, without waiting for an answer, and without an order.
__device__ __forceinline__ void atomic_increment(std::uint32_t* counter, std::uint32_t last) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;\n" : : "l"(counter), "r"(last) : "memory");
}
/// Replaces and returns what was there. Releases and acquires as well.
[[nodiscard]] __device__ __forceinline__ std::uint32_t atomic_exchange_acq_rel(std::uint32_t* word,
                                                                               std::uint32_t value) {
  std::uint32_t before;
  asm volatile("atom.acq_rel.gpu.global.exch.b32 %0, [%1], %2;\n" : "=r"(before) : "l"(word), "r"(value) : "memory");
  return before;
}
/// Reads what is in the L2, without an order.
[[nodiscard]] __device__ __forceinline__ std::uint32_t load_relaxed(const std::uint32_t* from) {
  std::uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];\n" : "=r"(value) : "l"(from) : "memory");
  return value;
}
/// Acquires what the thread that wrote the value has released.
[[nodiscard]] __device__ __forceinline__ std::uint32_t load_acquire(const std::uint32_t* from) {
  std::uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];\n" : "=r"(value) : "l"(from) : "memory");
  return value;
}

/// 2^x, with 2^−inf = 0.
[[nodiscard]] __device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

/// tanh without branches: within 2^−21.9 of the value, and within 2^−20.9 of it relatively (ex2 and rcp to 2^−22 and
/// 2^−23, as PTX has them). Below 0.55 an odd polynomial, fitted to the relative error; above 1 − 2 / (e^2x + 1).
[[nodiscard]] __device__ __forceinline__ float tanh_fast(float x) {
  const float z = x * x;
  float p = fmaf(0.016437579f, z, -0.052671812f);
  p = fmaf(p, z, 0.13320725f);
  p = fmaf(p, z, -0.33332947f);
  const float small = fmaf(p, z * x, x);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(r) : "f"(exp2_fast(fabsf(x) * 2.8853901f) + 1.0f));
  return fabsf(x) < 0.55f ? small : copysignf(fmaf(-2.0f, r, 1.0f), x);
}

}  // namespace bifolio::inline v0_2::cuda::device

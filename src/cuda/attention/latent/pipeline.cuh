// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the warps of a latent kernel share: the query rows, the stages of K with their barriers, and what consumer
/// warpgroups hand each other.

#include <cstdint>

#include "cuda/attention/latent/shape.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::latent {

/// Addresses in shared memory.
template <class Shape>
class shared_stages {
  using S = Shape;
  static constexpr shared_layout parts = shared_parts<Shape>;

 public:
  __device__ __forceinline__ explicit shared_stages(const char* shared)
      : base_((device::shared_address(shared) + 1023) & ~1023u) {}

  /// One thread; a barrier of the CTA must follow. `kv_arrivals`, `q_arrivals`: how many fill a stage, and q.
  __device__ __forceinline__ void init_barriers(int kv_arrivals, int q_arrivals = 1) const {
    for (int s = 0; s < S::stages; ++s) {
      device::mbarrier_init(full(s), kv_arrivals);
      device::mbarrier_init(empty(s), S::stage_readers);
    }
    device::mbarrier_init(q_full(), q_arrivals);
    device::mbarrier_init(q_empty(), S::num_warpgroups);
    device::mbarrier_init_fence();
  }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t base() const { return base_; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t q() const { return base_ + parts.q; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t kv(int s) const { return base_ + parts.kv + s * S::kv_bytes; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t full(int s) const { return barrier(s); }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t empty(int s) const { return barrier(S::stages + s); }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t q_full() const { return barrier(2 * S::stages); }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t q_empty() const { return barrier(2 * S::stages + 1); }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t probabilities() const { return base_ + parts.probabilities; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t maxima() const { return base_ + parts.maxima; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t sums() const { return base_ + parts.sums; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t outputs() const { return base_ + parts.outputs; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t powers() const { return base_ + parts.powers; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t scales() const { return base_ + parts.scales; }

 private:
  [[nodiscard]] __device__ __forceinline__ std::uint32_t barrier(int i) const { return base_ + parts.barriers + 8 * i; }

  std::uint32_t base_;
};

__device__ __forceinline__ void store_shared_f32(std::uint32_t address, float value) {
  asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(address), "f"(value) : "memory");
}

/// Named barriers; 0 is __syncthreads.
enum named_barrier : int {
  probabilities_barrier = 1,  // and one for the other warpgroup: it has handed over a tile's
  sums_barrier = 3,
  own_barrier = 4,  // and one for the other warpgroup, of its own threads
};

}  // namespace bifolio::inline v0_2::cuda::latent

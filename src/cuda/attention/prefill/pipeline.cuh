// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The pipeline between the producer and the consumer warpgroups: stages of q, K and V in shared memory, each with
/// a barrier that completes when it is full and one that completes when all consumers have released it.

#include <cstdint>

#include "cuda/attention/prefill/shape.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

/// The stage that is used next, and the parity of its barriers.
template <int Stages>
struct pipeline_state {
  int stage = 0;
  int phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

/// Addresses in shared memory.
template <class Shape>
class shared_stages {
  using S = Shape;

 public:
  __device__ __forceinline__ explicit shared_stages(const char* shared)
      : base_((device::shared_address(shared) + 1023) & ~1023u) {}

  /// One thread; a barrier of the CTA must follow. `kv_arrivals`: how many arrivals fill a stage of K or V;
  /// `more_for_keys`: how many more one of K.
  __device__ __forceinline__ void init_barriers(int kv_arrivals, int more_for_keys = 0) const {
    for (int s = 0; s < S::q_stages; ++s) {
      device::mbarrier_init(q_full(s), 1);
      device::mbarrier_init(q_empty(s), S::num_warpgroups);
    }
    for (int s = 0; s < S::stages; ++s) {
      device::mbarrier_init(k_full(s), kv_arrivals + more_for_keys);
      device::mbarrier_init(k_empty(s), S::num_warpgroups);
      device::mbarrier_init(v_full(s), kv_arrivals);
      device::mbarrier_init(v_empty(s), S::num_warpgroups);
      if constexpr (S::has_late_scales) device::mbarrier_init(scales_full(s), 128);
    }
    device::mbarrier_init_fence();
  }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t q(int s) const { return base_ + S::shared.q + s * S::q_bytes; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t k(int s) const {
    return base_ + S::shared.k + s * S::kv_bytes;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t v(int s) const {
    return base_ + S::shared.v + s * S::kv_bytes;
  }

  /// Outputs of a consumer warpgroup's nodes.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t nodes(int warpgroup) const {
    return base_ + S::shared.nodes + warpgroup * 128 * S::node_vectors * 16;
  }
  /// Scales of a tile of the CTA: of K, then those of V, then their largest.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t scales(std::uint32_t tile) const {
    return base_ + S::shared.scales + (tile & (S::scale_places - 1)) * S::scales_bytes;
  }
  /// What producer warps keep of their work tile.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t kept() const { return base_ + S::shared.kept; }
  /// Where codes are before they are elements.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t raw() const { return base_ + S::shared.raw; }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t k_full(int s) const { return barrier(s); }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t k_empty(int s) const { return barrier(S::stages + s); }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t v_full(int s) const { return barrier(2 * S::stages + s); }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t v_empty(int s) const { return barrier(3 * S::stages + s); }
  /// Late scales of V, of the tile whose K is in stage `s`: all threads of its producer arrive.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t scales_full(int s) const {
    return barrier(4 * S::stages + 2 * S::q_stages + s);
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t q_full(int s) const { return barrier(4 * S::stages + s); }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t q_empty(int s) const {
    return barrier(4 * S::stages + S::q_stages + s);
  }

 private:
  [[nodiscard]] __device__ __forceinline__ std::uint32_t barrier(int i) const {
    return base_ + S::shared.barriers + 8 * i;
  }

  std::uint32_t base_;
};

/// Bytes from the beginning of a stage of K or V to the first 64-element chunk of a token.
template <class Shape>
[[nodiscard]] __device__ __forceinline__ int token_bytes(int token) {
  return token / 8 * Shape::group_bytes + token % 8 * 128;
}

}  // namespace bifolio::inline v0_2::cuda::prefill

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of a consumer warpgroup for few query rows, which would leave most rows of the tensor cores unused: the
/// products are transposed, S^T = K · Q^T and O^T += V^T · P^T, so that keys and dims of V are the rows of 64 and
/// queries the columns. A warpgroup has every other tile of keys, and its own maxima and sums; few_rows_epilogue.cuh
/// puts both together.

#include <cstdint>

#include "cuda/attention/latent/column_softmax.cuh"
#include "cuda/attention/latent/pipeline.cuh"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm90.cuh"
#include "cuda/device/sm90_narrow.cuh"

namespace bifolio::inline v0_2::cuda::latent {

template <class T>
class few_rows_mainloop : column_softmax<few_rows> {
  using S = few_rows;
  using base = column_softmax<few_rows>;

 public:
  using base::base;
  using base::out_array;

  /// Adds this warpgroup's key tiles of `e` to o and the rows' maxima (base 2) and sums.
  __device__ __forceinline__ void process(const prefill::kv_range& e, column_state& rows, out_array& o) {
    if (e.tile_begin >= e.tile_end) return;
    float s[S::score_registers];
    device::mbarrier_wait_parity(stages_.q_full(), q_phase_);
    for (int tile = e.tile_end - (next_stage_ == warpgroup_ ? 1 : 2); tile >= e.tile_begin; tile -= 2) {
      device::mbarrier_wait_parity(stages_.full(warpgroup_), phase_);
      phase_ ^= 1;
      if (a_.loading.by_copy) device::fence_async_proxy();
      scores(s);
      mask(s, tile, e, rows);
      softmax(s, rows, o, false, [] {});
      hand_over(s);
      clear_invalid(tile, e);
      device::fence_async_proxy();
      device::named_barrier_sync(own_barrier + warpgroup_, 128);
      values(o);
      if (thread_ == 0) device::mbarrier_arrive(stages_.empty(warpgroup_));
    }
    if (thread_ == 0) device::mbarrier_arrive(stages_.q_empty());
    q_phase_ ^= 1;
    next_stage_ ^= (e.tile_end - e.tile_begin) & 1;
    for (float& m : rows.max) m *= scale_;
  }

 private:
  using base::score_array;

  // s = k · qᵀ.
  __device__ __forceinline__ void scores(score_array& s) {
    device::wgmma_fence_operands(s);
    device::wgmma_fence();
    const std::uint64_t q = device::wgmma_descriptor(stages_.q(), 16, 1024);
    const std::uint64_t k = device::wgmma_descriptor(stages_.kv(warpgroup_), 16, S::group_bytes);
#pragma unroll
    for (int step = 0; step < S::tile_dims / 16; ++step) {
      const int c = step / 4;
      const int within = step % 4 * 32;
      device::wgmma_m64n16k16<T, device::major::k>(s, device::wgmma_descriptor_after(k, c * 1024 + within),
                                                   device::wgmma_descriptor_after(q, c * S::q_chunk_bytes + within),
                                                   step > 0);
    }
    device::wgmma_commit_group();
    device::wgmma_wait_group<0>();
    device::wgmma_fence_operands(s);
  }

  // o += vᵀ · pᵀ.
  __device__ __forceinline__ void values(out_array& o) {
#pragma unroll
    for (int c = 0; c < S::value_chunks; ++c) device::wgmma_fence_operands(o[c]);
    device::wgmma_fence();
    const std::uint64_t v = device::wgmma_descriptor(stages_.kv(warpgroup_), 1024, S::group_bytes);
    const std::uint64_t p = device::wgmma_descriptor(probabilities(), 16, 1024);
#pragma unroll
    for (int step = 0; step < S::key_steps; ++step) {
#pragma unroll
      for (int c = 0; c < S::value_chunks; ++c) {
        device::wgmma_m64n16k16<T, device::major::mn>(
            o[c], device::wgmma_descriptor_after(v, c * 1024 + step * 2 * S::group_bytes),
            device::wgmma_descriptor_after(p, step * 32), true);
      }
    }
    device::wgmma_commit_group();
    device::wgmma_wait_group<0>();
#pragma unroll
    for (int c = 0; c < S::value_chunks; ++c) device::wgmma_fence_operands(o[c]);
  }

  __device__ __forceinline__ void hand_over(const score_array& s) const {
    static_assert(S::score_registers == 8);
    std::uint32_t p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = device::pack<T>(s[2 * i], s[2 * i + 1]);
    store_probabilities(probabilities(), p);
  }

  // Tokens past the sequence or before the window become zero, because 0 · NaN is NaN and slots that no row attends to
  // hold anything. Their scores were masked.
  __device__ __forceinline__ void clear_invalid(int tile, const prefill::kv_range& e) const {
    if (a_.loading.by_copy) return;  // brings the zeros
    const int first_key = tile * S::tile_keys;
    const int below = max(0, e.begin - first_key);
    const int valid = min(S::tile_keys, e.seq_len - first_key);
    if (below == 0 && valid == S::tile_keys) return;
    for (int token = thread_ / 8; token < S::tile_keys; token += 16) {
      if (token >= below && token < valid) continue;
      const std::uint32_t address =
          stages_.kv(warpgroup_) + token / 8 * S::group_bytes + token % 8 * 128 + (thread_ & 7) * 16;
      for (int chunk = 0; chunk < S::value_chunks; ++chunk) device::store_shared_zeros_16(address + chunk * 1024);
    }
  }

  int q_phase_ = 0;
  int phase_ = 0;
  int next_stage_ = 0;
};

}  // namespace bifolio::inline v0_2::cuda::latent

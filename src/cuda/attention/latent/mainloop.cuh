// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of a consumer warpgroup of the latent kernel. Both have the same 64 query rows and each half the dims
/// of V. Tiles of keys go from the last to the first; the scores and probabilities of one in stage s are computed by
/// warpgroup s alone, which hands them to the other through shared memory, thread by thread: both hold the rows in the
/// same places. The products of a warpgroup's own scores are requested right behind those of the other's values, so
/// that a stage is free as early as it can be.

#include <cstdint>

#include "cuda/attention/latent/pipeline.cuh"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/latent/softmax.cuh"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/results.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/prefill/softmax.cuh"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm90.cuh"
#include "cuda/device/sm90_narrow.cuh"

namespace bifolio::inline v0_2::cuda::latent {

template <class T>
class mainloop {
  using S = many_rows;
  using out_array = float[S::out_registers];
  using probability_array = std::uint32_t[S::key_steps][4];

 public:
  __device__ __forceinline__ mainloop(const prefill_args& args, const shared_stages<many_rows>& stages, int warpgroup,
                                      int thread)
      : a_(args),
        stages_(stages),
        scale_(args.scale * prefill::log2e),
        warpgroup_(warpgroup),
        thread_(thread),
        first_row_((thread / 32) * 16 + (thread & 31) / 4) {}

  /// Adds all key tiles of `e`, which is not empty, to o and the rows' maxima (base 2) and sums.
  __device__ __forceinline__ void process(const prefill::kv_range& e, prefill::row_state& rows, out_array& o) {
    score_array s;
    probability_array p;
    float rescale[2];
    device::mbarrier_wait_parity(stages_.q_full(), q_phase_);
    int tile = e.tile_end - 1;
    if (next_stage_ == warpgroup_) {
      wait_for(warpgroup_);
      scores(s);
      device::wgmma_wait_group<0>();
      device::wgmma_fence_operands(s);
      to_probabilities(s, tile, e, rows, rescale);
      finish_own(s, p, tile, e, rows, rescale, o);
      --tile;
    }
    // The next tile is the other warpgroup's.
    for (; tile > e.tile_begin; tile -= 2) {
      receive(p, rows, o);
      wait_for(other());
      clear_invalid(other(), tile, e);
      values(o, p, other());
      wait_for(warpgroup_);
      scores(s);
      device::wgmma_wait_group<1>();
      device::wgmma_fence_operands(o);
      release(stages_.empty(other()));
      device::wgmma_wait_group<0>();
      device::wgmma_fence_operands(s);
      to_probabilities(s, tile - 1, e, rows, rescale);
      finish_own(s, p, tile - 1, e, rows, rescale, o);
    }
    release(stages_.q_empty());
    q_phase_ ^= 1;
    if (tile == e.tile_begin) {
      receive(p, rows, o);
      wait_for(other());
      clear_invalid(other(), tile, e);
      values(o, p, other());
      device::wgmma_wait_group<0>();
      device::wgmma_fence_operands(o);
      release(stages_.empty(other()));
    }
    next_stage_ ^= (e.tile_end - e.tile_begin) & 1;
    for (float& m : rows.max) m *= scale_;
    add_other_sums(rows);
  }

 private:
  // A thread's 16 bytes of probabilities of one step of 16 keys; the other warpgroup's thread of the same number takes
  // them.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t probabilities(int step) const {
    return stages_.probabilities() + (step * 128 + thread_) * 16;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t maximum(int row) const { return stages_.maxima() + row * 4; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t sum_of(int turn, int warpgroup, int row) const {
    return stages_.sums() + ((turn * S::num_warpgroups + warpgroup) * S::rows + row) * 4;
  }
  [[nodiscard]] __device__ __forceinline__ int other() const { return warpgroup_ ^ 1; }

  __device__ __forceinline__ void release(std::uint32_t barrier) {
    if (thread_ == 0) device::mbarrier_arrive(barrier);
  }

  // Waits for the next tile of a stage.
  __device__ __forceinline__ void wait_for(int stage) {
    device::mbarrier_wait_parity(stages_.full(stage), (phases_ >> stage) & 1);
    phases_ ^= 1 << stage;
    // cp.async writes through another proxy than TMA does, which the tensor cores read through.
    if (a_.loading.by_copy) device::fence_async_proxy();
  }

  // s = q · kᵀ for the tile in this warpgroup's stage; committed, not waited for.
  __device__ __forceinline__ void scores(score_array& s) {
    device::wgmma_fence_operands(s);
    device::wgmma_fence();
    const std::uint64_t q = device::wgmma_descriptor(stages_.q(), 16, 1024);
    const std::uint64_t k = device::wgmma_descriptor(stages_.kv(warpgroup_), 16, S::group_bytes);
#pragma unroll
    for (int step = 0; step < S::tile_dims / 16; ++step) {
      const int c = step / 4;
      const int within = step % 4 * 32;
      device::wgmma_m64k16<T>(s, device::wgmma_descriptor_after(q, c * S::q_chunk_bytes + within),
                              device::wgmma_descriptor_after(k, c * 1024 + within), step > 0);
    }
    device::wgmma_commit_group();
  }

  // o += p · v for this warpgroup's dims of the tile in `stage`; committed, not waited for.
  __device__ __forceinline__ void values(out_array& o, const probability_array& p, int stage) {
    device::wgmma_fence_operands(o);
    device::wgmma_fence();
    const std::uint64_t v =
        device::wgmma_descriptor(stages_.kv(stage) + warpgroup_ * S::part_chunks * 1024, 1024, S::group_bytes);
#pragma unroll
    for (int step = 0; step < S::key_steps; ++step) {
      device::wgmma_m64k16_rs<T>(o, p[step], device::wgmma_descriptor_after(v, step * 2 * S::group_bytes));
    }
    device::wgmma_commit_group();
  }

  __device__ __forceinline__ void to_probabilities(score_array& s, int tile, const prefill::kv_range& e,
                                                   prefill::row_state& rows, float (&rescale)[2]) {
    mask(s, tile, tile * S::tile_keys + (thread_ & 3) * 2, a_, e, rows);
    softmax(s, scale_, rows, rescale);
  }

  // Hands the probabilities of this warpgroup's tile to the other one, and adds its values.
  __device__ __forceinline__ void finish_own(const score_array& s, probability_array& p, int tile,
                                             const prefill::kv_range& e, const prefill::row_state& rows,
                                             const float (&rescale)[2], out_array& o) {
#pragma unroll
    for (int step = 0; step < S::key_steps; ++step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) p[step][j] = device::pack<T>(s[step * 8 + 2 * j], s[step * 8 + 2 * j + 1]);
      device::store_shared_16(probabilities(step), make_uint4(p[step][0], p[step][1], p[step][2], p[step][3]));
    }
    if ((thread_ & 3) == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) store_shared_f32(maximum(first_row_ + 8 * i), rows.max[i]);
    }
    device::named_barrier_arrive(probabilities_barrier + warpgroup_, 256);
    multiply(o, rescale);
    clear_invalid(warpgroup_, tile, e);
    values(o, p, warpgroup_);
    device::wgmma_wait_group<0>();
    device::wgmma_fence_operands(o);
    release(stages_.empty(warpgroup_));
  }

  // Takes the probabilities of the other warpgroup's tile, and lets this one's results follow the maxima.
  __device__ __forceinline__ void receive(probability_array& p, prefill::row_state& rows, out_array& o) {
    device::named_barrier_sync(probabilities_barrier + other(), 256);
#pragma unroll
    for (int step = 0; step < S::key_steps; ++step) {
      const uint4 four = device::load_shared_16(probabilities(step));
      p[step][0] = four.x;
      p[step][1] = four.y;
      p[step][2] = four.z;
      p[step][3] = four.w;
    }
    float rescale[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float m = device::load_shared_f32(maximum(first_row_ + 8 * i));
      rescale[i] = m == rows.max[i] ? 1.0f : device::exp2_fast((rows.max[i] - m) * scale_);
      rows.max[i] = m;
      rows.sum[i] *= rescale[i];
    }
    multiply(o, rescale);
  }

  __device__ __forceinline__ static void multiply(out_array& o, const float (&rescale)[2]) {
    if (!__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) return;
#pragma unroll
    for (int j = 0; j < S::out_registers; ++j) o[j] *= rescale[(j >> 1) & 1];
  }

  // Tokens past the sequence or before the window become zero in this warpgroup's dims of V, because 0 · NaN is NaN and
  // slots that no row attends to hold anything. Their scores were masked.
  __device__ __forceinline__ void clear_invalid(int stage, int tile, const prefill::kv_range& e) {
    if (a_.loading.by_copy) return;  // brings the zeros
    const int first_key = tile * S::tile_keys;
    const int below = max(0, e.begin - first_key);
    const int valid = min(S::tile_keys, e.seq_len - first_key);
    if (below == 0 && valid == S::tile_keys) return;
    for (int row = thread_ / 8; row < S::tile_keys; row += 16) {
      if (row >= below && row < valid) continue;
      const std::uint32_t address = stages_.kv(stage) + row / 8 * S::group_bytes + row % 8 * 128 + (thread_ & 7) * 16 +
                                    warpgroup_ * S::part_chunks * 1024;
      for (int chunk = 0; chunk < S::part_chunks; ++chunk) device::store_shared_zeros_16(address + chunk * 1024);
    }
    device::fence_async_proxy();
    device::named_barrier_sync(own_barrier + warpgroup_, 128);
  }

  // Each warpgroup has the sums of its own tiles. Work tiles take turns with two places, because the other warpgroup
  // may be in the next one before this has read.
  __device__ __forceinline__ void add_other_sums(prefill::row_state& rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float l = rows.sum[i];
      l += __shfl_xor_sync(0xffffffffu, l, 1);
      l += __shfl_xor_sync(0xffffffffu, l, 2);
      if ((thread_ & 3) == 0) store_shared_f32(sum_of(turn_, warpgroup_, first_row_ + 8 * i), l);
    }
    device::named_barrier_sync(sums_barrier, 256);
    if ((thread_ & 3) == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        rows.sum[i] += device::load_shared_f32(sum_of(turn_, other(), first_row_ + 8 * i));
      }
    }
    turn_ ^= 1;
  }

  const prefill_args& a_;
  const shared_stages<many_rows>& stages_;
  float scale_;
  int warpgroup_, thread_;
  int first_row_;
  int q_phase_ = 0;
  int phases_ = 0;  // of the stages, a bit for each
  int next_stage_ = 0;
  int turn_ = 0;
};

}  // namespace bifolio::inline v0_2::cuda::latent

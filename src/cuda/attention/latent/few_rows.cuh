// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of a consumer warpgroup for few query rows, which would leave most rows of the tensor cores unused: the
/// products are transposed, S^T = K · Q^T and O^T += V^T · P^T, so that keys and dims of V are the rows of 64 and
/// queries the columns. A warpgroup has every other tile of keys, and its own maxima and sums; few_rows_epilogue.cuh
/// puts both together.

#include <cstdint>

#include "cuda/attention/latent/pipeline.cuh"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/mainloop.cuh"
#include "cuda/attention/prefill/results.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm90.cuh"
#include "cuda/device/sm90_narrow.cuh"

namespace bifolio::inline v0_2::cuda::latent {

/// A thread's query rows, columns of the products: of each 8 two neighbours.
struct column_state {
  int position[few_rows::columns];  // of the token in the sequence
  float max[few_rows::columns];     // of scores; when all keys are done, of base-2 logits
  float sum[few_rows::columns];     // this thread's share

  [[nodiscard]] __device__ __forceinline__ static int row_of(int column) {
    return column / 2 * 8 + (static_cast<int>(threadIdx.x) & 3) * 2 + column % 2;
  }
  __device__ __forceinline__ void begin(const prefill_args& a, const prefill_work_tile& work) {
#pragma unroll
    for (int c = 0; c < few_rows::columns; ++c) {
      position[c] = work.seq_len - work.query_len + work.row_tile * a.tokens_per_warpgroup + row_of(c) / a.packed_heads;
      max[c] = -INFINITY;
      sum[c] = 0;
    }
  }
};

template <class T>
class few_rows_mainloop {
  using S = few_rows;

 public:
  /// Dims of V by 64, then as the tensor cores have them.
  using out_array = float[S::value_chunks][S::score_registers];

  __device__ __forceinline__ few_rows_mainloop(const prefill_args& args, const shared_stages<few_rows>& stages,
                                               int warpgroup, int thread)
      : a_(args),
        stages_(stages),
        scale_(args.scale * prefill::log2e),
        warpgroup_(warpgroup),
        thread_(thread),
        warp_(thread / 32),
        lane_(thread & 31) {}

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
      softmax(s, rows, o);
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
  using score_array = float[S::score_registers];

  // The key of score register j, from the tile's first.
  [[nodiscard]] __device__ __forceinline__ int key_of(int j) const { return warp_ * 16 + lane_ / 4 + (j & 2) * 4; }
  [[nodiscard]] __device__ __forceinline__ static constexpr int column_of(int j) { return j / 4 * 2 + (j & 1); }

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

  // Scores of keys that a row does not attend to become −inf, in tiles where there are any.
  __device__ __forceinline__ void mask(score_array& s, int tile, const prefill::kv_range& e,
                                       const column_state& rows) const {
    const int first_key = tile * S::tile_keys;
    if (first_key + S::tile_keys <= e.common_limit && first_key >= e.common_begin) return;
#pragma unroll
    for (int j = 0; j < S::score_registers; ++j) {
      const int position = rows.position[column_of(j)];
      int end = a_.causal ? min(e.seq_len, position + 1) : e.seq_len;
      if (a_.window_right >= 0) end = min(end, position + a_.window_right + 1);
      const int begin = a_.window_left >= 0 ? position - a_.window_left : 0;
      const int key = first_key + key_of(j);
      if (key >= end || key < begin) s[j] = -INFINITY;
    }
  }

  // Scores become probabilities against the running maximum, which follows only where a score is more than max_slack
  // above it, as in prefill.
  __device__ __forceinline__ void softmax(score_array& s, column_state& rows, out_array& o) {
    float m[S::columns];  // of this thread
    bool rises = false;
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
      const int j = c / 2 * 4 + c % 2;
      m[c] = fmaxf(s[j], s[j + 2]);
      rises = rises || (m[c] - rows.max[c]) * scale_ > prefill::max_slack;
    }
    // Nobody is in the products of the tile before any more.
    if (device::named_barrier_any(own_barrier + warpgroup_, 128, rises)) raise_maxima(m, rows, o);
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
      const int j = c / 2 * 4 + c % 2;
      const float shift = rows.max[c] == -INFINITY ? 0.0f : rows.max[c] * scale_;
      s[j] = device::exp2_fast(fmaf(s[j], scale_, -shift));
      s[j + 2] = device::exp2_fast(fmaf(s[j + 2], scale_, -shift));
      rows.sum[c] += s[j] + s[j + 2];
    }
  }

  // Lets each row's maximum follow its largest score of the tile, and older results it.
  __device__ void raise_maxima(float (&m)[S::columns], column_state& rows, out_array& o) {
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) m[c] = fmaxf(m[c], __shfl_xor_sync(0xffffffffu, m[c], lanes));
      if (lane_ < 4) store_shared_f32(of_warp(warp_, column_state::row_of(c)), m[c]);
    }
    device::named_barrier_sync(own_barrier + warpgroup_, 128);
    float rescale[S::columns];
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
      float top = -INFINITY;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        top = fmaxf(top, device::load_shared_f32(of_warp(warp, column_state::row_of(c))));
      }
      rescale[c] = 1.0f;
      if ((top - rows.max[c]) * scale_ > prefill::max_slack) {
        rescale[c] = device::exp2_fast((rows.max[c] - top) * scale_);
        rows.max[c] = top;
      }
      rows.sum[c] *= rescale[c];
    }
#pragma unroll
    for (int chunk = 0; chunk < S::value_chunks; ++chunk) {
#pragma unroll
      for (int j = 0; j < S::score_registers; ++j) o[chunk][j] *= rescale[column_of(j)];
    }
  }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t of_warp(int warp, int row) const {
    return stages_.maxima() + ((warpgroup_ * 4 + warp) * S::rows + row) * 4;
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t probabilities() const {
    return stages_.probabilities() + warpgroup_ * S::probability_bytes;
  }

  // Writes the probabilities as an operand: rows of 64 keys, 128 bytes in the swizzle.
  __device__ __forceinline__ void hand_over(const score_array& s) const {
    static_assert(S::score_registers == 8);
    std::uint32_t p[4];  // of rows 8 · (i / 2) … + 7, keys 8 · (i % 2) … + 7 of the warp's 16
#pragma unroll
    for (int i = 0; i < 4; ++i) p[i] = device::pack<T>(s[2 * i], s[2 * i + 1]);
    const int row = lane_ / 16 * 8 + (lane_ & 7);
    const int piece = warp_ * 2 + (lane_ / 8 & 1);
    device::store_matrices_transposed(probabilities() + row * 128 + ((piece ^ (row & 7)) * 16), p);
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

  const prefill_args& a_;
  const shared_stages<few_rows>& stages_;
  float scale_;
  int warpgroup_, thread_, warp_, lane_;
  int q_phase_ = 0;
  int phase_ = 0;
  int next_stage_ = 0;
};

}  // namespace bifolio::inline v0_2::cuda::latent

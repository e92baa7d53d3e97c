// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of a prefill consumer warpgroup: S = Q·Kᵀ, softmax and O += P·V over the key tiles of a work tile, from
/// the last, which needs masks, to the first. The products of the next tile's scores are issued before this tile's
/// softmax, and the two warpgroups issue products in turn (ping-pong).

#include <cstdint>

#include "common/attention/visibility.hpp"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/pipeline.cuh"
#include "cuda/attention/prefill/results.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/prefill/shape.hpp"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::cuda::prefill {

/// A thread's two rows of its warpgroup's 64.
struct row_state {
  int token[2], head[2];
  int position[2];  // of the token in the sequence
  float slope[2];   // of the head; masked variant only
  float max[2];     // of scores, in the masked variant of base-2 logits
  float sum[2];     // this lane's share

  template <bool Masked>
  __device__ __forceinline__ void begin(const prefill_args& a, const prefill_work_tile& work, int warpgroup,
                                        int thread) {
    const int first_token = (2 * work.row_tile + warpgroup) * a.tokens_per_half;
    const int first_row = (thread / 32) * 16 + (thread & 31) / 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + 8 * i;
      const int of_half = row / a.packed_heads;
      head[i] = work.head + row - of_half * a.packed_heads;
      // Rows that no token of the half has belong to none of the sequence.
      token[i] = of_half < a.tokens_per_half ? first_token + of_half : work.query_len;
      position[i] = work.seq_len - work.query_len + token[i];
      max[i] = -INFINITY;
      sum[i] = 0;
      if constexpr (Masked) slope[i] = a.alibi_slopes != nullptr ? a.alibi_slopes[head[i]] : 0.0f;
    }
  }
};

template <class T, class Shape, key_order Order, bool Masked>
class mainloop {
  using S = Shape;

 public:
  __device__ __forceinline__ mainloop(const prefill_args& args, const shared_stages<Shape>& stages, int warpgroup,
                                      int thread)
      : a_(args), stages_(stages), warpgroup_(warpgroup), thread_(thread) {}

  /// Before the first work tile.
  __device__ __forceinline__ void start() {
    if (warpgroup_ == 0) device::named_barrier_arrive(ping_pong_barrier(0), 256);
  }
  /// After the last.
  __device__ __forceinline__ void finish() {
    if (warpgroup_ == 0) ping_pong_sync();  // the other warpgroup has arrived a last time
  }

  /// Adds all key tiles of `e`, which is not empty, to o and the rows' maxima and sums.
  __device__ __forceinline__ void process(const prefill_work_tile& work, const kv_range& e, row_state& rows,
                                          float (&o)[S::out_registers]) {
    float s[S::score_registers];
    std::uint32_t p[prefill_tile_keys / 16][4];
    float rescale[2];
    device::mbarrier_wait_parity(stages_.q_full(q_state_.stage), q_state_.phase);
    int tile = e.tile_end - 1;

    device::mbarrier_wait_parity(stages_.k_full(k_state_.stage), k_state_.phase);
    ping_pong_sync();
    scores(s, q_state_.stage, k_state_.stage);
    device::wgmma_wait_group<0>();
    device::wgmma_fence_operands(s);
    ping_pong_arrive();
    release(stages_.k_empty(k_state_.stage));
    k_state_.advance();
    softmax(s, tile, e, work, rows, rescale);
    pack(s, p);

    for (; tile > e.tile_begin; --tile) {
      device::mbarrier_wait_parity(stages_.k_full(k_state_.stage), k_state_.phase);
      ping_pong_sync();
      scores(s, q_state_.stage, k_state_.stage);
      wait_values(tile, e, work);
      values(o, p, v_state_.stage);
      ping_pong_arrive();
      device::wgmma_wait_group<1>();
      device::wgmma_fence_operands(s);
      release(stages_.k_empty(k_state_.stage));
      k_state_.advance();
      softmax(s, tile - 1, e, work, rows, rescale);
      device::wgmma_wait_group<0>();
      device::wgmma_fence_operands(o);
      release(stages_.v_empty(v_state_.stage));
      v_state_.advance();
      pack(s, p);
#pragma unroll
      for (int j = 0; j < S::out_registers; ++j) o[j] *= rescale[(j >> 1) & 1];
    }
    release(stages_.q_empty(q_state_.stage));
    q_state_.advance();
    wait_values(tile, e, work);
    values(o, p, v_state_.stage);
    device::wgmma_wait_group<0>();
    device::wgmma_fence_operands(o);
    release(stages_.v_empty(v_state_.stage));
    v_state_.advance();
  }

  /// The same for a warpgroup without rows: takes part in the pipeline and in ping-pong, computes nothing.
  __device__ __forceinline__ void skip(const kv_range& e) {
    device::mbarrier_wait_parity(stages_.q_full(q_state_.stage), q_state_.phase);
    for (int tile = e.tile_end; tile > e.tile_begin; --tile) {
      device::mbarrier_wait_parity(stages_.k_full(k_state_.stage), k_state_.phase);
      ping_pong_sync();
      ping_pong_arrive();
      release(stages_.k_empty(k_state_.stage));
      k_state_.advance();
      device::mbarrier_wait_parity(stages_.v_full(v_state_.stage), v_state_.phase);
      release(stages_.v_empty(v_state_.stage));
      v_state_.advance();
    }
    release(stages_.q_empty(q_state_.stage));
    q_state_.advance();
  }

 private:
  // Ping-pong scheduling: one warpgroup issues products while the other one is in its softmax.
  [[nodiscard]] __device__ __forceinline__ static int ping_pong_barrier(int warpgroup) { return 1 + warpgroup; }
  __device__ __forceinline__ void ping_pong_sync() { device::named_barrier_sync(ping_pong_barrier(warpgroup_), 256); }
  __device__ __forceinline__ void ping_pong_arrive() {
    device::named_barrier_arrive(ping_pong_barrier(1 - warpgroup_), 256);
  }

  __device__ __forceinline__ void release(std::uint32_t barrier) {
    if (thread_ == 0) device::mbarrier_arrive(barrier);
  }

  // s = q · kᵀ for the tile in `stage`; committed, not waited for.
  __device__ __forceinline__ void scores(float (&s)[S::score_registers], int q_stage, int stage) {
    device::wgmma_fence_operands(s);
    device::wgmma_fence();
    const std::uint32_t k = stages_.k(stage);
#pragma unroll
    for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const std::uint64_t a = device::wgmma_descriptor(
            stages_.q(q_stage) + (warpgroup_ * S::chunks + c) * S::q_chunk_bytes + step * 32, 16, 1024);
        const bool accumulate = c + step > 0;
        if constexpr (Order == key_order::rows) {
          const std::uint64_t b = device::wgmma_descriptor(k + c * S::kv_chunk_bytes + step * 32, 16, 1024);
          device::wgmma_m64n128k16<T, 0>(s, a, b, accumulate);
        } else {
          const std::uint32_t first = k + c * 2048 + step * 32;
          device::wgmma_m64n64k16<T, 0>(s, a, device::wgmma_descriptor(first, 16, S::chunks * 2048), accumulate);
          device::wgmma_m64n64k16<T, 32>(s, a, device::wgmma_descriptor(first + 1024, 16, S::chunks * 2048),
                                         accumulate);
        }
      }
    }
    device::wgmma_commit_group();
  }

  // The key of score register j, from the tile's first, for this thread's first column.
  [[nodiscard]] __device__ __forceinline__ static constexpr int key_of(int j) {
    if (Order == key_order::rows) return (j >> 2) * 8 + (j & 1);
    return ((j & 31) >> 2) * 16 + (j >> 5) * 8 + (j & 1);
  }

  // o += p · v for the tile in `stage`; committed, not waited for.
  __device__ __forceinline__ void values(float (&o)[S::out_registers],
                                         const std::uint32_t (&p)[prefill_tile_keys / 16][4], int stage) {
    const int chunk_bytes = a_.box_tokens * 128;
    const int group_bytes = a_.box_tokens == 8 ? S::chunks * 1024 : 1024;  // between groups of 8 tokens
    device::wgmma_fence_operands(o);
    device::wgmma_fence();
#pragma unroll
    for (int step = 0; step < prefill_tile_keys / 16; ++step) {
      device::wgmma_m64k16_rs<T>(o, p[step],
                                 device::wgmma_descriptor(stages_.v(stage) + v_token_bytes<S>(step * 16, a_.box_tokens),
                                                          chunk_bytes, group_bytes));
    }
    device::wgmma_commit_group();
  }

  // Waits for a tile of V. Rows past the sequence or before the window become zero, because 0 · NaN is NaN and slots
  // that no row attends to hold anything.
  __device__ __forceinline__ void wait_values(int tile, const kv_range& e, const prefill_work_tile& work) {
    device::mbarrier_wait_parity(stages_.v_full(v_state_.stage), v_state_.phase);
    const int first_key = tile * prefill_tile_keys;
    const int below = Masked ? max(0, e.begin - first_key) : 0;
    const int valid = min(prefill_tile_keys, work.seq_len - first_key);
    if (below == 0 && valid == prefill_tile_keys) return;
    for (int row = thread_ / 8; row < prefill_tile_keys; row += 16) {
      if (row >= below && row < valid) continue;
      for (int chunk = 0; chunk < S::chunks; ++chunk) {
        const std::uint32_t address =
            stages_.v(v_state_.stage) + v_token_bytes<S>(row, a_.box_tokens) + chunk * a_.box_tokens * 128;
        device::store_shared_zeros_16(address + (thread_ & 7) * 16);
      }
    }
    device::fence_async_proxy();
    device::named_barrier_sync(3 + warpgroup_, 128);
  }

  [[nodiscard]] __device__ __forceinline__ bool visible(int key, int i, const prefill_work_tile& work,
                                                        const row_state& rows) const {
    const bool ok = attn::attends(key, rows.position[i], work.seq_len, a_.causal);
    if constexpr (Masked) return ok && attn::is_in_window(key, rows.position[i], a_.window_left, a_.window_right);
    return ok;
  }

  // Scores become probabilities against the running maximum; `rescale` is what older results must be multiplied with.
  __device__ __forceinline__ void softmax(float (&s)[S::score_registers], int tile, const kv_range& e,
                                          const prefill_work_tile& work, row_state& rows, float (&rescale)[2]) {
    const int column = tile * prefill_tile_keys + (thread_ & 3) * 2;
    const float scale = Masked ? 1.0f : a_.scale * log2e;
    if constexpr (Masked) {
#pragma unroll
      for (int j = 0; j < S::score_registers; ++j) {
        const int key = column + key_of(j);
        const int i = (j >> 1) & 1;
        float x = s[j] * a_.scale;
        if (a_.soft_cap > 0) x = a_.soft_cap * tanhf(x / a_.soft_cap);
        x += rows.slope[i] * static_cast<float>(key - rows.position[i]);
        s[j] = visible(key, i, work, rows) ? x * log2e : -INFINITY;
      }
    } else if ((tile + 1) * prefill_tile_keys > e.common_limit) {
#pragma unroll
      for (int j = 0; j < S::score_registers; ++j) {
        if (!visible(column + key_of(j), (j >> 1) & 1, work, rows)) s[j] = -INFINITY;
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = rows.max[i];
#pragma unroll
      for (int j = 0; j < S::score_registers; j += 4) m = fmaxf(m, fmaxf(s[j + 2 * i], s[j + 2 * i + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      const float shift = m == -INFINITY ? 0.0f : m * scale;
      rescale[i] = device::exp2_fast(rows.max[i] * scale - shift);
      rows.max[i] = m;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < S::score_registers; j += 4) {
        s[j + 2 * i] = device::exp2_fast(fmaf(s[j + 2 * i], scale, -shift));
        s[j + 2 * i + 1] = device::exp2_fast(fmaf(s[j + 2 * i + 1], scale, -shift));
        sum += s[j + 2 * i] + s[j + 2 * i + 1];
      }
      rows.sum[i] = rows.sum[i] * rescale[i] + sum;
    }
  }

  __device__ __forceinline__ static void pack(const float (&s)[S::score_registers],
                                              std::uint32_t (&p)[prefill_tile_keys / 16][4]) {
#pragma unroll
    for (int step = 0; step < prefill_tile_keys / 16; ++step)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int from = Order == key_order::rows ? step * 8 + 2 * j : (j >> 1) * 32 + step * 4 + 2 * (j & 1);
        p[step][j] = device::pack<T>(s[from], s[from + 1]);
      }
  }

  const prefill_args& a_;
  const shared_stages<Shape>& stages_;
  int warpgroup_, thread_;
  pipeline_state<S::q_stages> q_state_;
  pipeline_state<S::stages> k_state_, v_state_;
};

}  // namespace bifolio::cuda::prefill

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of decode: for each KV tile, scores by m16n8k16 products, softmax against a running maximum, and the
/// weighted sum of values. The query heads of a KV head (and the few tokens of a speculative step) are the 16 rows of
/// the products, so that K and V are read once whatever the group. The warps split the 64 keys of a tile; each has a
/// running maximum, sum and output of its own, which the epilogue reduces.

#include <cstdint>

#include "common/attention/visibility.hpp"
#include "cuda/attention/decode/loader.cuh"
#include "cuda/attention/decode/scheduler.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm80.cuh"

namespace bifolio::cuda::decode {

/// One warp's partial results of 16 rows. A lane has columns 2 · (lane % 4) and the next of every 8, of rows lane / 4
/// (i = 0) and lane / 4 + 8 (i = 1).
template <class Shape>
struct accumulators {
  float max[2];                  // of base-2 logits
  float sum[2];                  // this lane's share
  float out[Shape::n_tiles][4];  // [2 · i + column]

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max[i] = -INFINITY;
      sum[i] = 0;
    }
#pragma unroll
    for (int n = 0; n < Shape::n_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = 0;
  }
};

template <class T, class Shape, bool Masked, class Scheduler>
class mainloop {
  using S = Shape;

 public:
  __device__ __forceinline__ mainloop(const decode_args& args, const Scheduler& scheduler, const char* shared)
      : a_(args),
        stages_(device::shared_address(shared) + S::shared.stages),
        queries_(device::shared_address(shared) + S::shared.queries),
        lane_(static_cast<int>(threadIdx.x) & 31),
        warp_(static_cast<int>(threadIdx.x) >> 5),
        loader_(args, scheduler, device::shared_address(shared)) {}

  __device__ __forceinline__ void prefetch_first_tile() const { loader_.prefetch_first_tile(); }
  __device__ __forceinline__ void fill_pipeline() { loader_.fill_pipeline(); }

  /// The accumulators are the caller's to clear, at its beginning and wherever the epilogue has taken them.
  __device__ __forceinline__ void begin(const work_tile& w, const decode_seq& s) {
    first_tile_ = w.tile;
    if (w.tile < w.tile_end) q_buffer_ = q_buffer_ + 1 == S::stages ? 0 : q_buffer_ + 1;
    seq_len_ = s.seq_len;
    query_len_ = s.query_len;
    // Keys below this are visible to every row of the tile, as far as causality goes.
    const int first_token = w.row_tile * decode_tile_rows / a_.group_size;
    common_limit_ = a_.causal ? min(seq_len_, seq_len_ - query_len_ + first_token + 1) : seq_len_;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = w.row_tile * decode_tile_rows + lane_ / 4 + 8 * i;
      const int token = row / a_.group_size;
      row_position_[i] = seq_len_ - query_len_ + token;
      if constexpr (Masked) {
        const int head = w.head * a_.group_size + row - token * a_.group_size;
        slope_[i] = a_.alibi_slopes != nullptr && token < query_len_ ? a_.alibi_slopes[head] : 0.0f;
      }
    }
  }

  /// Adds the next KV tile, which is number `tile` of the sequence, to the accumulators.
  __device__ __forceinline__ void process_tile(int tile, accumulators<S>& acc) {
    device::cp_async_wait_group<S::stages - 2>();
    __syncthreads();
    loader_.load_tile(free_stage());
    if (S::q_in_registers && tile == first_tile_) load_q(q_buffer_);
    compute_tile(stage_, tile, q_buffer_, acc);
    stage_ = stage_ + 1 == S::stages ? 0 : stage_ + 1;
  }

  /// The stage of the previous tile: the next call of process_tile fills it, the epilogue may use it before.
  [[nodiscard]] __device__ __forceinline__ int free_stage() const { return stage_ == 0 ? S::stages - 1 : stage_ - 1; }

 private:
  __device__ __forceinline__ void load_q_step(std::uint32_t (&q)[4], int buffer, int kk) const {
    const int row = (lane_ & 7) + ((lane_ >> 3) & 1) * 8;
    const std::uint32_t base = queries_ + buffer * S::q_bytes + row * S::head_dim * 2;
    device::ldmatrix_x4(q, base + (((2 * kk + (lane_ >> 4)) ^ (row & 7)) << 4));
  }
  __device__ __forceinline__ void load_q(int buffer) {
#pragma unroll
    for (int kk = 0; kk < (S::q_in_registers ? S::k_steps : 0); ++kk) load_q_step(q_[kk], buffer, kk);
  }

  [[nodiscard]] __device__ __forceinline__ bool visible(int key, int i) const {
    const bool ok = attn::attends(key, row_position_[i], seq_len_, a_.causal);
    if constexpr (Masked) return ok && attn::is_in_window(key, row_position_[i], a_.window_left, a_.window_right);
    return ok;
  }

  // Step kk of the queries, from registers or shared memory.
  __device__ __forceinline__ void take_q(std::uint32_t (&q)[4], int buffer, int kk) const {
    if constexpr (S::q_in_registers) {
#pragma unroll
      for (int i = 0; i < 4; ++i) q[i] = q_[kk][i];
    } else {
      load_q_step(q, buffer, kk);
    }
  }

  // Scores of this warp's keys: s[n] has those of 8.
  __device__ __forceinline__ void compute_scores(float (&s)[S::key_tiles][4], std::uint32_t k_base,
                                                 int q_buffer) const {
#pragma unroll
    for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = 0;
    if constexpr (S::key_tiles == 2) {
      const int row = warp_ * 16 + (lane_ & 7) + ((lane_ >> 4) & 1) * 8;
      const std::uint32_t row_base = k_base + row * S::head_dim * 2;
#pragma unroll
      for (int kk = 0; kk < S::k_steps; ++kk) {
        std::uint32_t b[4];
        std::uint32_t q[4];
        device::ldmatrix_x4(b, row_base + (((2 * kk + ((lane_ >> 3) & 1)) ^ (row & 7)) << 4));
        take_q(q, q_buffer, kk);
        device::mma_m16n8k16<T>(s[0], q, b[0], b[1]);
        device::mma_m16n8k16<T>(s[1], q, b[2], b[3]);
      }
    } else {
      // Even and odd steps are sums of their own: two chains of products, each half as long.
      float odd[4] = {};
      const int row = warp_ * 8 + (lane_ & 7);
      const std::uint32_t row_base = k_base + row * S::head_dim * 2;
#pragma unroll
      for (int kk = 0; kk < S::k_steps; kk += 2) {
        std::uint32_t b[4];
        std::uint32_t q[4];
        device::ldmatrix_x4(b, row_base + (((2 * kk + (lane_ >> 3)) ^ (row & 7)) << 4));
        take_q(q, q_buffer, kk);
        device::mma_m16n8k16<T>(s[0], q, b[0], b[1]);
        take_q(q, q_buffer, kk + 1);
        device::mma_m16n8k16<T>(odd, q, b[2], b[3]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][e] += odd[e];
    }
  }

  // Adds this warp's probabilities times its rows of V.
  __device__ __forceinline__ void add_values(const std::uint32_t (&p)[2 * S::key_tiles], std::uint32_t v_base,
                                             accumulators<S>& acc) const {
    if constexpr (S::key_tiles == 2) {
      const int row = warp_ * 16 + (lane_ & 7) + ((lane_ >> 3) & 1) * 8;
      const std::uint32_t row_base = v_base + row * S::head_dim * 2;
#pragma unroll
      for (int j = 0; j < S::k_steps; ++j) {
        std::uint32_t b[4];
        device::ldmatrix_x4_trans(b, row_base + (((2 * j + (lane_ >> 4)) ^ (row & 7)) << 4));
        device::mma_m16n8k16<T>(acc.out[2 * j], p, b[0], b[1]);
        device::mma_m16n8k16<T>(acc.out[2 * j + 1], p, b[2], b[3]);
      }
    } else {
      const int row = warp_ * 8 + (lane_ & 7);
      const std::uint32_t row_base = v_base + row * S::head_dim * 2;
#pragma unroll
      for (int j = 0; j < S::n_tiles; j += 4) {
        std::uint32_t b[4];
        device::ldmatrix_x4_trans(b, row_base + (((j + (lane_ >> 3)) ^ (row & 7)) << 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) device::mma_m16n8k8<T>(acc.out[j + i], p[0], p[1], b[i]);
      }
    }
  }

  // Scores of this warp's keys, softmax against the running maximum, and their share of the output.
  __device__ __forceinline__ void compute_tile(int stage, int tile, int q_buffer, accumulators<S>& acc) const {
    const std::uint32_t k_base = stages_ + stage * S::stage_bytes;
    float s[S::key_tiles][4];
    compute_scores(s, k_base, q_buffer);

    constexpr float log2e = 1.4426950408889634f;
    const int first_key = tile * decode_tile_tokens + warp_ * S::warp_keys;
    if constexpr (Masked) {
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = first_key + n * 8 + (lane_ & 3) * 2 + (e & 1);
          float x = s[n][e] * a_.scale;
          if (a_.soft_cap > 0) x = a_.soft_cap * tanhf(x / a_.soft_cap);
          x += slope_[e >> 1] * static_cast<float>(key - row_position_[e >> 1]);
          s[n][e] = visible(key, e >> 1) ? x * log2e : -INFINITY;
        }
    } else {
      const float scale = a_.scale * log2e;
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] *= scale;
      if (first_key + S::warp_keys > common_limit_) {
#pragma unroll
        for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (!visible(first_key + n * 8 + (lane_ & 3) * 2 + (e & 1), e >> 1)) s[n][e] = -INFINITY;
          }
      }
    }

    float shift[2];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = fmaxf(s[0][2 * i], s[0][2 * i + 1]);
      if constexpr (S::key_tiles == 2) m = fmaxf(m, fmaxf(s[1][2 * i], s[1][2 * i + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      shift[i] = fmaxf(acc.max[i], m);
      grows = grows || shift[i] > acc.max[i];
    }
    if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float alpha = shift[i] > acc.max[i] ? device::exp2_fast(acc.max[i] - shift[i]) : 1.0f;
        acc.max[i] = shift[i];
        acc.sum[i] *= alpha;
#pragma unroll
        for (int n = 0; n < S::n_tiles; ++n) {
          acc.out[n][2 * i] *= alpha;
          acc.out[n][2 * i + 1] *= alpha;
        }
      }
    }
    std::uint32_t p[2 * S::key_tiles];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float m = acc.max[i] == -INFINITY ? 0.0f : acc.max[i];
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n) {
        const float p0 = device::exp2_fast(s[n][2 * i] - m);
        const float p1 = device::exp2_fast(s[n][2 * i + 1] - m);
        acc.sum[i] += p0 + p1;
        p[2 * n + i] = device::pack<T>(p0, p1);
      }
    }
    add_values(p, k_base + S::tile_bytes, acc);
  }

  const decode_args& a_;
  std::uint32_t stages_, queries_;
  int lane_, warp_;
  loader<T, Shape, Masked, Scheduler> loader_;
  int stage_ = 0;
  int q_buffer_ = S::stages - 1;

  // Of the work tile.
  int first_tile_;
  int seq_len_, query_len_, common_limit_;
  int row_position_[2];
  float slope_[2];
  std::uint32_t q_[S::q_in_registers ? S::k_steps : 1][4];
};

}  // namespace bifolio::cuda::decode

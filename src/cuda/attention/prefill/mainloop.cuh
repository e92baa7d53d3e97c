// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of a prefill consumer warpgroup: S = Q·Kᵀ, softmax and O += P·V over the key tiles of a work tile, from
/// the last to the first. Only tiles at a border (the diagonal, an edge of the window, the end of the sequence) are
/// masked. The products of the next tile's scores are issued before this tile's softmax, and the warpgroups issue
/// products in turn (ping-pong).

#include <cstdint>
#include <type_traits>

#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/coarse_power.cuh"
#include "cuda/attention/prefill/pipeline.cuh"
#include "cuda/attention/prefill/results.cuh"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/prefill/shape.hpp"
#include "cuda/attention/prefill/softmax.cuh"
#include "cuda/attention/prefill/token_softmax.cuh"
#include "cuda/attention/query_powers.cuh"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm90.cuh"
#include "cuda/device/zero_codes.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

template <class Shape, bool Transform>
inline constexpr bool has_token_softmax = Shape::by_token && !Transform;

/// With scales per token and a logits transform those of K multiply the products, before the transform, and those of V
/// the probabilities, after their sums. Without one, see token_softmax.cuh.
template <class T, class Shape, bool Transform>
class mainloop : protected std::conditional_t<has_token_softmax<Shape, Transform>, token_softmax<Shape>,
                                              softmax<Shape, Transform>> {
  using S = Shape;
  static constexpr bool folds_scales = has_token_softmax<Shape, Transform>;
  using base = std::conditional_t<folds_scales, token_softmax<Shape>, softmax<Shape, Transform>>;

 public:
  __device__ __forceinline__ mainloop(const prefill_args& args, const shared_stages<Shape>& stages, int warpgroup,
                                      int thread)
      : base(args, thread),
        stages_(stages),
        warpgroup_(warpgroup),
        has_late_scales_(S::has_late_scales && args.v_type == dtype::bf16) {}

  /// Before the first work tile.
  __device__ __forceinline__ void start() {
    if (warpgroup_ == 0) device::named_barrier_arrive(ping_pong_barrier(0), 256);
  }
  /// After the last.
  __device__ __forceinline__ void finish() {
    if (warpgroup_ == 0) ping_pong_sync();  // the last warpgroup has arrived once more
  }

  /// Adds all key tiles of `e`, which is not empty, to o and the rows' maxima and sums.
  __device__ __forceinline__ void process(const kv_range& e, int kv_head, row_state& rows,
                                          float (&o)[S::out_registers]) {
    if constexpr (S::is_coded) base::take_head(kv_head);
    [[maybe_unused]] typename base::units_of_rows units;
    if constexpr (S::by_token) units.clear(a_.v_scales.tail_floats > 0);
    float s[S::score_registers];
    std::uint32_t p[S::tile_keys / 16][4];
    float rescale[2];
    device::mbarrier_wait_parity(stages_.q_full(q_state_.stage), q_state_.phase);
    if constexpr (S::is_coded) take_queries(rows);
    int tile = e.tile_end - 1;

    wait_keys();
    ping_pong_sync();
    scores(s, q_state_.stage, k_state_.stage);
    device::wgmma_wait_group<0>();
    device::wgmma_fence_operands(s);
    ping_pong_arrive();
    wait_late_scales();
    release(stages_.k_empty(k_state_.stage));
    take_scores(s, tile, e, rows, units, rescale);
    pack(s, p);

    if (tile > e.tile_begin) wait_keys();
    for (; tile > e.tile_begin; --tile) {
      ping_pong_sync();
      scores(s, q_state_.stage, k_state_.stage);
      wait_values(tile, e);
      values(o, p, v_state_.stage);
      ping_pong_arrive();
      device::wgmma_wait_group<1>();
      device::wgmma_fence_operands(s);
      wait_late_scales();
      release(stages_.k_empty(k_state_.stage));
      take_scores(s, tile - 1, e, rows, units, rescale);
      if (tile - 1 > e.tile_begin) wait_keys();
      device::wgmma_wait_all_after(rows.sum[0] + rows.sum[1]);
      device::wgmma_fence_operands(o);
      release(stages_.v_empty(v_state_.stage));
      v_state_.advance();
      pack(s, p);
      if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int j = 0; j < S::out_registers; ++j) o[j] *= rescale[(j >> 1) & 1];
      }
    }
    release(stages_.q_empty(q_state_.stage));
    q_state_.advance();
    wait_values(tile, e);
    values(o, p, v_state_.stage);
    device::wgmma_wait_group<0>();
    device::wgmma_fence_operands(o);
    release(stages_.v_empty(v_state_.stage));
    v_state_.advance();
    if constexpr (folds_scales) {
      base::finish(rows, units);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) rows.max[i] *= base::unit_of(rows, i);
    }
    if constexpr (S::by_token) {
#pragma unroll
      for (int j = 0; j < S::out_registers; ++j) o[j] *= units.unit((j >> 1) & 1);
    }
    if constexpr (S::has_zeros) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float shift = rows.shift[i];
        shift += __shfl_xor_sync(0xffffffffu, shift, 1);
        shift += __shfl_xor_sync(0xffffffffu, shift, 2);
#pragma unroll
        for (int j = 2 * i; j < S::out_registers; j += 4) {
          o[j] += shift;
          o[j + 1] += shift;
        }
      }
    }
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

 protected:
  using base::a_, base::thread_, base::transform_;

  // Ping-pong scheduling: one warpgroup issues products while the others are in their softmax.
  [[nodiscard]] __device__ __forceinline__ static int ping_pong_barrier(int warpgroup) { return 1 + warpgroup; }
  __device__ __forceinline__ void ping_pong_sync() { device::named_barrier_sync(ping_pong_barrier(warpgroup_), 256); }
  __device__ __forceinline__ void ping_pong_arrive() {
    const int next = warpgroup_ + 1 == S::num_warpgroups ? 0 : warpgroup_ + 1;
    device::named_barrier_arrive(ping_pong_barrier(next), 256);
  }

  __device__ __forceinline__ void release(std::uint32_t barrier) {
    if (thread_ == 0) device::mbarrier_arrive(barrier);
  }

  // cp.async writes through another proxy than TMA does, which the tensor cores read through. Producers of codes fence
  // what they store themselves.
  __device__ __forceinline__ void see_copies() {
    if constexpr (S::is_coded) return;
    if (a_.loading.by_copy) device::fence_async_proxy();
  }

  __device__ __forceinline__ void wait_keys() {
    device::mbarrier_wait_parity(stages_.k_full(k_state_.stage), k_state_.phase);
    see_copies();
  }

  // Before K is released: its stage is the barrier's.
  __device__ __forceinline__ void wait_late_scales() const {
    if constexpr (S::has_late_scales) {
      if (has_late_scales_) device::mbarrier_wait_parity(stages_.scales_full(k_state_.stage), k_state_.phase);
    }
  }

  // Queries of bfloat16 become float16 where they are, each over its row's power. Four lanes have a row, as they have
  // its scores; the vectors that they take of it next to each other are those of other banks than the next row's. Zero
  // points ask for the sums of rows, of either type.
  __device__ __forceinline__ void take_queries(row_state& rows) const {
    rows.power[0] = rows.power[1] = 1.0f;
    rows.shift[0] = rows.shift[1] = 0;
    const bool is_bf16 = a_.q_type == dtype::bf16;
    if (!is_bf16 && !S::has_zeros) return;
    const int lane = thread_ & 31;
    const std::uint32_t first = stages_.q(q_state_.stage) + S::row_part(warpgroup_) * S::chunks * S::q_chunk_bytes +
                                (thread_ / 32 * 16 + lane / 4) * 128;
    const std::uint32_t vectors[2] = {static_cast<std::uint32_t>(lane & 7) * 16,
                                      static_cast<std::uint32_t>((lane & 7) ^ 4) * 16};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint4 q[S::chunks][2];
      std::uint32_t largest = 0;
#pragma unroll
      for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          q[c][j] = device::load_shared_16(first + i * 1024 + c * S::q_chunk_bytes + vectors[j]);
          for (const std::uint32_t pair : {q[c][j].x, q[c][j].y, q[c][j].z, q[c][j].w}) {
            largest = larger_magnitude(largest, pair);
          }
        }
      }
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      if (is_bf16) {
        const std::conditional_t<folds_scales, coarse_power, query_power> power(largest);
        rows.power[i] = power.value();
#pragma unroll
        for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            q[c][j] = make_uint4(power.divide(q[c][j].x), power.divide(q[c][j].y), power.divide(q[c][j].z),
                                 power.divide(q[c][j].w));
            device::store_shared_16(first + i * 1024 + c * S::q_chunk_bytes + vectors[j], q[c][j]);
          }
        }
      }
      if constexpr (S::has_zeros) {
        float sum = 0;
#pragma unroll
        for (int c = 0; c < S::chunks; ++c) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            for (const std::uint32_t pair : {q[c][j].x, q[c][j].y, q[c][j].z, q[c][j].w}) {
              sum += device::sum_of_halves(pair);
            }
          }
        }
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        rows.query[i] = sum + __shfl_xor_sync(0xffffffffu, sum, 2);
        if constexpr (folds_scales) rows.query[i] *= rows.power[i];
      }
    }
    if (!is_bf16) return;
    device::fence_async_proxy();
    device::named_barrier_sync(1 + S::num_warpgroups + warpgroup_, 128);
  }

  // s = q · kᵀ for the tile in `stage`; committed, not waited for.
  __device__ __forceinline__ void scores(float (&s)[S::score_registers], int q_stage, int stage) {
    device::wgmma_fence_operands(s);
    device::wgmma_fence();
    const std::uint64_t q =
        device::wgmma_descriptor(stages_.q(q_stage) + S::row_part(warpgroup_) * S::chunks * S::q_chunk_bytes, 16, 1024);
    const std::uint64_t k = device::wgmma_descriptor(stages_.k(stage), 16, S::group_bytes);
#pragma unroll
    for (int step = 0; step < S::tile_dims / 16; ++step) {
      const int c = step / 4;
      const int within = step % 4 * 32;
      device::wgmma_m64k16<T>(s, device::wgmma_descriptor_after(q, c * S::q_chunk_bytes + within),
                              device::wgmma_descriptor_after(k, c * 1024 + within), step > 0);
    }
    device::wgmma_commit_group();
  }

  // Scores of the tile in the stage of K to probabilities; that stage is the next one then.
  __device__ __forceinline__ void take_scores(float (&s)[S::score_registers], int tile, const kv_range& e,
                                              row_state& rows, [[maybe_unused]] typename base::units_of_rows& units,
                                              float (&rescale)[2]) {
    if constexpr (folds_scales) {
      const std::uint32_t scales = stages_.scales(k_state_.phase * S::stages + k_state_.stage);
      k_state_.advance();
      base::take(s, scales, tile, e, rows, units, rescale);
    } else if constexpr (S::by_token) {
      const std::uint32_t scales = stages_.scales(k_state_.phase * S::stages + k_state_.stage);
      k_state_.advance();
      base::scale_products(s, scales, rows);
      base::multiply_powers(s, rows);
      base::probabilities(s, tile, e, rows, rescale);
      base::scale_probabilities(s, scales, tile, e, rows, units, rescale);
    } else {
      k_state_.advance();
      if constexpr (S::is_coded) base::multiply_powers(s, rows);
      base::probabilities(s, tile, e, rows, rescale);
    }
  }

  // o += p · v for the tile in `stage`; committed, not waited for.
  __device__ __forceinline__ void values(float (&o)[S::out_registers], const std::uint32_t (&p)[S::tile_keys / 16][4],
                                         int stage) {
    device::wgmma_fence_operands(o);
    device::wgmma_fence();
    const std::uint64_t v =
        device::wgmma_descriptor(stages_.v(stage) + S::first_dim(warpgroup_) / 64 * 1024, 1024, S::group_bytes);
#pragma unroll
    for (int step = 0; step < S::tile_keys / 16; ++step) {
      if constexpr (S::value_products == 1) {
        device::wgmma_m64k16_rs<T>(o, p[step], device::wgmma_descriptor_after(v, step * 2 * S::group_bytes));
      } else {
        constexpr int registers = S::out_registers / S::value_products;
#pragma unroll
        for (int i = 0; i < S::value_products; ++i) {
          device::wgmma_m64k16_rs<T>(
              reinterpret_cast<float(&)[registers]>(o[i * registers]), p[step],
              device::wgmma_descriptor_after(v, step * 2 * S::group_bytes + i * registers * 2 / 64 * 1024));
        }
      }
    }
    device::wgmma_commit_group();
  }

  // Waits for a tile of V. Rows past the sequence or before the window become zero, because 0 · NaN is NaN and slots
  // that no row attends to hold anything.
  __device__ __forceinline__ void wait_values(int tile, const kv_range& e) {
    device::mbarrier_wait_parity(stages_.v_full(v_state_.stage), v_state_.phase);
    if (S::is_coded || a_.loading.by_copy) {  // brings the zeros
      see_copies();
      return;
    }
    const int first_key = tile * S::tile_keys;
    const int below = max(0, e.begin - first_key);
    const int valid = min(S::tile_keys, e.seq_len - first_key);
    if (below == 0 && valid == S::tile_keys) return;
    for (int row = thread_ / 8; row < S::tile_keys; row += 16) {
      if (row >= below && row < valid) continue;
      const std::uint32_t address = stages_.v(v_state_.stage) + token_bytes<S>(row) + (thread_ & 7) * 16;
      for (int chunk = 0; chunk < S::chunks; ++chunk) device::store_shared_zeros_16(address + chunk * 1024);
    }
    device::fence_async_proxy();
    device::named_barrier_sync(1 + S::num_warpgroups + warpgroup_, 128);
  }

  __device__ __forceinline__ static void pack(const float (&s)[S::score_registers],
                                              std::uint32_t (&p)[S::tile_keys / 16][4]) {
#pragma unroll
    for (int step = 0; step < S::tile_keys / 16; ++step)
#pragma unroll
      for (int j = 0; j < 4; ++j) p[step][j] = device::pack<T>(s[step * 8 + 2 * j], s[step * 8 + 2 * j + 1]);
  }

  const shared_stages<Shape>& stages_;
  int warpgroup_;
  bool has_late_scales_;  // of V, which its producer finds
  pipeline_state<S::q_stages> q_state_;
  pipeline_state<S::stages> k_state_, v_state_;
};

}  // namespace bifolio::inline v0_2::cuda::prefill

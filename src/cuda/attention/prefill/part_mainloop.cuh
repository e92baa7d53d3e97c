// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of a prefill consumer warpgroup in deterministic plans above 256 dims. Keys are taken as in other
/// plans, from the last to the first, but each part of `prefill_part_keys` of them, counted from position 0, begins
/// with a fresh maximum, sum and output. A part that ends is combined with those before it: here where the work tile
/// has them, otherwise by the combine kernel, by the same instructions (combine_tree.cuh). Keys that a row does not
/// attend to change none of its bits, and neither do parts without any key that it attends to.

#include <cstdint>

#include "cuda/attention/combine_tree.cuh"
#include "cuda/attention/prefill/mainloop.cuh"
#include "cuda/attention/prefill/tree_sums.cuh"
#include "cuda/device/sm90.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

template <class T, class Shape, bool Transform>
class part_mainloop : public mainloop<T, Shape, Transform> {
  using S = Shape;
  using base = mainloop<T, Shape, Transform>;
  using base::a_, base::stages_, base::thread_, base::warpgroup_, base::q_state_, base::k_state_, base::v_state_;
  static_assert(prefill_part_keys % S::tile_keys == 0);
  static constexpr int part_tiles = prefill_part_keys / S::tile_keys;
  static constexpr int vectors = S::out_vectors;

 public:
  __device__ __forceinline__ part_mainloop(const prefill_args& args, const shared_stages<Shape>& stages, int warpgroup,
                                           int thread)
      : base(args, stages, warpgroup, thread) {
    // The shortcut asks whether maxima may rise by another formula than the one that lets them, and warp by warp.
    if constexpr (Transform) base::transform_.rising = false;
  }

  /// Adds all key tiles of `e`, which is not empty, to o and the rows' maxima and sums, both empty so far.
  __device__ __forceinline__ void process(const kv_range& e, int /*kv_head*/, row_state& rows,
                                          float (&o)[S::out_registers]) {
    value_units units;  // of codes
    float s[S::score_registers];
    std::uint32_t p[S::tile_keys / 16][4];
    float rescale[2];
    tree_sums later;
    // A warp without rows of a token keeps none: decode has rows for one of four.
    const bool has_rows = __any_sync(0xffffffffu, rows.position[0] < e.seq_len || rows.position[1] < e.seq_len);
    device::mbarrier_wait_parity(stages_.q_full(q_state_.stage), q_state_.phase);
    int tile = e.tile_end - 1;

    base::wait_keys();
    base::ping_pong_sync();
    base::scores(s, q_state_.stage, k_state_.stage);
    device::wgmma_wait_group<0>();
    device::wgmma_fence_operands(s);
    base::ping_pong_arrive();
    base::release(stages_.k_empty(k_state_.stage));
    base::take_scores(s, tile, e, rows, units, rescale);
    base::pack(s, p);

    if (tile > e.tile_begin) base::wait_keys();
    for (; tile > e.tile_begin; --tile) {
      base::ping_pong_sync();
      base::scores(s, q_state_.stage, k_state_.stage);
      base::wait_values(tile, e);
      base::values(o, p, v_state_.stage);
      base::ping_pong_arrive();
      device::wgmma_wait_group<1>();
      device::wgmma_fence_operands(s);
      base::release(stages_.k_empty(k_state_.stage));
      const bool ends_part = tile % part_tiles == 0;
      tree_sums part;
      if (ends_part) part = take_part(rows);
      base::take_scores(s, tile - 1, e, rows, units, rescale);
      if (tile - 1 > e.tile_begin) base::wait_keys();
      device::wgmma_wait_all_after(rows.sum[0] + rows.sum[1]);
      device::wgmma_fence_operands(o);
      base::release(stages_.v_empty(v_state_.stage));
      v_state_.advance();
      base::pack(s, p);
      if (ends_part) {
        keep_part(o, part, later, has_rows);
      } else if (__any_sync(0xffffffffu, rescale[0] != 1.0f || rescale[1] != 1.0f)) {
#pragma unroll
        for (int j = 0; j < S::out_registers; ++j) o[j] *= rescale[(j >> 1) & 1];
      }
    }
    base::release(stages_.q_empty(q_state_.stage));
    q_state_.advance();
    base::wait_values(tile, e);
    base::values(o, p, v_state_.stage);
    device::wgmma_wait_group<0>();
    device::wgmma_fence_operands(o);
    base::release(stages_.v_empty(v_state_.stage));
    v_state_.advance();
    tree_sums part = take_part(rows);
    add_later(o, part, later, has_rows);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.max[i] = part.max[i];
      rows.sum[i] = (thread_ & 3) == 0 ? part.sum[i] : 0.0f;  // the epilogue adds up a row's lanes
    }
  }

 private:
  // The part that ends; the rows begin another.
  [[nodiscard]] __device__ __forceinline__ tree_sums take_part(row_state& rows) const {
    tree_sums part;
    part.empty = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      part.max[i] = __fmul_rn(rows.max[i], base::unit_of(rows, i));
      part.sum[i] = tree::sum_over_lanes(rows.sum[i]);
      rows.max[i] = -INFINITY;
      rows.sum[i] = 0;
    }
    return part;
  }

  // This thread's outputs of the parts so far, in the workspace after partial results. The address is opaque, because
  // the compiler would compute that of each vector anew.
  static constexpr int vector_step = 128;
  [[nodiscard]] __device__ __forceinline__ float4* kept_outputs() const {
    const std::int64_t partial_floats = std::int64_t{a_.max_partials} * a_.tile_rows * (std::int64_t{a_.head_dim} + 2);
    const int of_warpgroup = static_cast<int>(blockIdx.x) * S::num_warpgroups + warpgroup_;
    float4* first =
        reinterpret_cast<float4*>(a_.workspace + partial_floats) + of_warpgroup * vectors * vector_step + thread_;
    asm("" : "+l"(first));
    return first;
  }

  // o, part ← the parts of later keys, and that. A warp without rows keeps no outputs.
  __device__ __forceinline__ void add_later(float (&o)[S::out_registers], tree_sums& part, const tree_sums& later,
                                            bool has_rows) const {
    const tree::combination both[2] = {{later.max[0], part.max[0]}, {later.max[1], part.max[1]}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      part.max[i] = both[i].max;
      part.sum[i] = both[i].of(later.sum[i], part.sum[i]);
    }
    if (later.empty || !has_rows) {
#pragma unroll
      for (int j = 0; j < S::out_registers; ++j) o[j] = both[(j >> 1) & 1].of(0.0f, o[j]);
      return;
    }
    const float4* const kept = kept_outputs();
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      const float4 before = __ldcg(kept + i * vector_step);
      o[4 * i] = both[0].of(before.x, o[4 * i]);
      o[4 * i + 1] = both[0].of(before.y, o[4 * i + 1]);
      o[4 * i + 2] = both[1].of(before.z, o[4 * i + 2]);
      o[4 * i + 3] = both[1].of(before.w, o[4 * i + 3]);
    }
  }
  // Adds it to those of later keys; o begins the next.
  __device__ __forceinline__ void keep_part(float (&o)[S::out_registers], tree_sums& part, tree_sums& later,
                                            bool has_rows) const {
    add_later(o, part, later, has_rows);
    later = part;
    float4* const kept = kept_outputs();
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      __stcg(kept + i * vector_step, make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]));
    }
#pragma unroll
    for (int j = 0; j < S::out_registers; ++j) o[j] = 0;
  }
};

}  // namespace bifolio::inline v0_2::cuda::prefill

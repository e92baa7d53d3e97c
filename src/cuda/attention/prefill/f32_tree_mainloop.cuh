// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of a consumer warpgroup of float32's prefill in deterministic plans: what combine_tree.cuh says of
/// float32, so that a row has the bits that decode gives it. Key tiles, each one run, are taken from the first to the
/// last. Nodes and the root are in the workspace, each thread's part in a place of its own. Rows that one warpgroup
/// holds are computed by the first.

#include <cstdint>

#include "cuda/attention/combine_tree.cuh"
#include "cuda/attention/prefill/f32_mainloop.cuh"
#include "cuda/attention/prefill/tree_sums.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

template <class Shape>
class f32_tree_mainloop : public f32_mainloop<Shape, false> {
  using S = Shape;
  using base = f32_mainloop<Shape, false>;
  using base::a_, base::thread_, base::warpgroup_;
  using operand = typename base::operand;
  static_assert(S::tile_keys == tree::f32_run_keys);
  static constexpr int leaf_tiles = tree::leaf_keys / S::tile_keys;

 public:
  __device__ __forceinline__ f32_tree_mainloop(const prefill_args& args, const f32_ring<Shape>& ring, int warpgroup,
                                               int thread)
      : base(args, ring, warpgroup, thread), scoring_(args.scale, args.soft_cap, args.alibi_slopes != nullptr) {}

  /// Adds all key tiles of `e`, which is not empty, to o and the rows' maxima and sums, both empty so far. `few_rows`:
  /// the warpgroups have the same rows; the results are then warpgroup 0's.
  __device__ __forceinline__ void process(const prefill_work_tile& work, const kv_range& e, bool few_rows,
                                          row_state& rows, float (&o)[S::out_registers]) {
    if (few_rows && warpgroup_ > 0) {
      for (int tile = e.tile_begin; tile < e.tile_end; ++tile) base::skip_tile();
      return;
    }
    base::put_queries(work, rows);
    tree_sums node, root;
    for (int tile = e.tile_begin; tile < e.tile_end; ++tile) {
      float s[S::score_registers];
      float weight[2];
      base::scores(base::wait_stage(), s);
      base::release_stage();
      prepare_scores(s, tile, e, rows);
      take_run(s, rows, weight);
      operand p[S::tile_keys / 8];
      base::split_probabilities(s, p);
      float sum[S::out_registers];
      base::values(p, base::wait_stage(), sum);
      base::release_stage();
      if (__any_sync(0xffffffffu, weight[0] != 1.0f || weight[1] != 1.0f)) {
#pragma unroll
        for (int j = 0; j < S::out_registers; ++j) o[j] = __fmul_rn(o[j], weight[(j >> 1) & 1]);
      }
#pragma unroll
      for (int j = 0; j < S::out_registers; ++j) o[j] = __fadd_rn(o[j], sum[j]);
      if (tile % leaf_tiles != leaf_tiles - 1 || tile + 1 == e.tile_end) continue;
      tree_sums leaf = complete_leaf(rows);
      keep_leaf(o, leaf, node, root, tile / leaf_tiles);
#pragma unroll
      for (int j = 0; j < S::out_registers; ++j) o[j] = 0;
    }
    // The last leaf and all before it.
    tree_sums leaf = complete_leaf(rows);
    add_earlier(o, leaf, node, [&](int i) { return __ldcg(kept_outputs() + (vectors + i) * vector_step); });
    add_earlier(o, leaf, root, [&](int i) { return __ldcg(kept_outputs() + i * vector_step); });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.max[i] = leaf.max[i];
      rows.sum[i] = (thread_ & 3) == 0 ? leaf.sum[i] : 0.0f;  // the epilogue adds up a row's lanes
    }
  }

 private:
  // The leaf that ends; the rows begin another.
  [[nodiscard]] __device__ __forceinline__ tree_sums complete_leaf(row_state& rows) const {
    tree_sums leaf;
    leaf.empty = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      leaf.max[i] = scoring_.in_base_2(rows.max[i]);
      leaf.sum[i] = tree::sum_over_lanes(rows.sum[i]);
      rows.max[i] = -INFINITY;
      rows.sum[i] = 0;
    }
    return leaf;
  }

  // This thread's outputs of the root in the workspace, so far apart, then those of the node. The address is opaque,
  // because the compiler would compute that of each vector anew.
  static constexpr int vectors = S::out_registers / 4;
  static constexpr int vector_step = 128;
  [[nodiscard]] __device__ __forceinline__ float4* kept_outputs() const {
    static_assert(prefill_tree_outputs(dtype::f32, S::tile_dims) == 2);
    const int of_warpgroup = static_cast<int>(blockIdx.x) * S::num_consumers + warpgroup_;
    float4* first = reinterpret_cast<float4*>(a_.workspace) +
                    static_cast<std::int64_t>(of_warpgroup) * 2 * vectors * vector_step + thread_;
    asm("" : "+l"(first));
    return first;
  }
  // Adds a leaf, number `number` of the sequence, to its node, and a node that it completes to the root.
  __device__ __forceinline__ void keep_leaf(float (&o)[S::out_registers], tree_sums& leaf, tree_sums& node,
                                            tree_sums& root, int number) const {
    float4* kept = kept_outputs();
    add_earlier(o, leaf, node, [&](int i) { return __ldcg(kept + (vectors + i) * vector_step); });
    if (number % tree::node_leaves != tree::node_leaves - 1) {
      node = leaf;
      kept += vectors * vector_step;
    } else {
      add_earlier(o, leaf, root, [&](int i) { return __ldcg(kept + i * vector_step); });
      root = leaf;
      node = tree_sums();
    }
#pragma unroll
    for (int i = 0; i < vectors; ++i) {
      __stcg(kept + i * vector_step, make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]));
    }
  }

  // Products to scores, −inf where a row does not attend to the key.
  __device__ __forceinline__ void prepare_scores(float (&s)[S::score_registers], int tile, const kv_range& e,
                                                 const row_state& rows) const {
    const int column = tile * S::tile_keys + (thread_ & 3) * 2;
    if (scoring_.has_options) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float slope = a_.alibi_slopes != nullptr ? rows.slope[i] * log2e : 0.0f;
        const auto distance = static_cast<float>(column - rows.position[i]);
#pragma unroll
        for (int j = 2 * i; j < S::score_registers; j += 4) {
          s[j] = scoring_.logit(s[j], slope, distance + static_cast<float>(base::key_of(j)));
          s[j + 1] = scoring_.logit(s[j + 1], slope, distance + static_cast<float>(base::key_of(j + 1)));
        }
      }
    }
    base::mask(s, tile, column, e, rows);
  }

  // Scores to probabilities. `weight`: of older results of the leaf.
  __device__ __forceinline__ void take_run(float (&s)[S::score_registers], row_state& rows, float (&weight)[2]) const {
    float m[2] = {-INFINITY, -INFINITY};  // of this lane
#pragma unroll
    for (int j = 0; j < S::score_registers; j += 4) {
      m[0] = fmaxf(m[0], fmaxf(s[j], s[j + 1]));
      m[1] = fmaxf(m[1], fmaxf(s[j + 2], s[j + 3]));
    }
    weight[0] = weight[1] = 1.0f;
    const bool rises = scoring_.rises(m[0], rows.max[0]) || scoring_.rises(m[1], rows.max[1]);
    if (__any_sync(0xffffffffu, rises)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        m[i] = fmaxf(m[i], __shfl_xor_sync(0xffffffffu, m[i], 1));
        m[i] = fmaxf(m[i], __shfl_xor_sync(0xffffffffu, m[i], 2));
        if (!scoring_.rises(m[i], rows.max[i])) continue;
        weight[i] = scoring_.weight_of_older(rows.max[i], m[i]);
        rows.max[i] = m[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = scoring_.shift_of(rows.max[i]);
      float of_run = 0;
#pragma unroll
      for (int j = 2 * i; j < S::score_registers; j += 4) {
        s[j] = scoring_.probability(s[j], shift);
        s[j + 1] = scoring_.probability(s[j + 1], shift);
        const float pair = __fadd_rn(s[j], s[j + 1]);
        of_run = j < 4 ? pair : __fadd_rn(of_run, pair);
      }
      rows.sum[i] = __fmaf_rn(rows.sum[i], weight[i], of_run);
    }
  }

  tree::scoring scoring_;
};

}  // namespace bifolio::inline v0_2::cuda::prefill

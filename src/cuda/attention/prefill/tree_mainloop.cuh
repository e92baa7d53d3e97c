// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of a prefill consumer warpgroup in deterministic plans: what combine_tree.cuh says, so that a row has
/// the bits that decode gives it. Key tiles are taken from the first to the last. Up to 128 dims a tile is two runs:
/// the products of the first run's probabilities with V overlap with the softmax of the second, those of the second
/// with the softmax of the next tile's first. Above that a tile is one run, and the order is that of other plans. Nodes
/// are in shared memory, each thread's part in a place of its own, what does not fit there and the root in the
/// workspace.

#include <cstdint>

#include "cuda/attention/combine_tree.cuh"
#include "cuda/attention/prefill/mainloop.cuh"
#include "cuda/attention/prefill/tree_sums.cuh"
#include "cuda/device/shared_vectors.cuh"

namespace bifolio::inline v0_2::cuda::prefill {

static_assert(tree::max_slack == max_slack);

template <class T, class Shape>
class tree_mainloop : public mainloop<T, Shape, false> {
  using S = Shape;
  using base = mainloop<T, Shape, false>;
  using base::a_, base::stages_, base::thread_, base::warpgroup_, base::q_state_, base::k_state_, base::v_state_;
  static constexpr int runs = S::tile_keys / tree::run_keys;
  static_assert(runs == 1 || runs == 2);

 public:
  __device__ __forceinline__ tree_mainloop(const prefill_args& args, const shared_stages<Shape>& stages, int warpgroup,
                                           int thread)
      : base(args, stages, warpgroup, thread), scoring_(args.scale, args.soft_cap, args.alibi_slopes != nullptr) {}

  /// Adds all key tiles of `e`, which is not empty, to o and the rows' maxima and sums, both empty so far.
  __device__ __forceinline__ void process(const kv_range& e, int /*kv_head*/, row_state& rows,
                                          float (&o)[S::out_registers]) {
    if constexpr (runs == 1) {
      process_runs(e, rows, o);
    } else {
      process_pairs_of_runs(e, rows, o);
    }
  }

 private:
  static constexpr int leaf_tiles = tree::leaf_keys / S::tile_keys;
  static constexpr int run_steps = tree::run_groups;  // of products with V
  static constexpr int run_registers = S::score_registers / runs;
  static constexpr int vectors = S::out_vectors;
  using run_probabilities = std::uint32_t[run_steps][4];

  // Tiles of one run. Probabilities stay where the scores were until the products before them have ended.
  __device__ __forceinline__ void process_runs(const kv_range& e, row_state& rows, float (&o)[S::out_registers]) {
    float s[S::score_registers];
    run_probabilities p;
    tree_sums node, root, leaf;
    float weight[2];
    device::mbarrier_wait_parity(stages_.q_full(q_state_.stage), q_state_.phase);
    int tile = e.tile_begin;

    base::wait_keys();
    base::ping_pong_sync();
    base::scores(s, q_state_.stage, k_state_.stage);
    device::wgmma_wait_group<0>();
    device::wgmma_fence_operands(s);
    base::ping_pong_arrive();
    release_keys();
    prepare_scores(s, tile, e, rows);
    begin_leaf(rows);
    take_run<0>(s, rows, weight, nullptr);
    pack_run(s, p);
    bool begins_leaf = true;

    for (; tile + 1 < e.tile_end; ++tile) {
      base::wait_keys();
      base::ping_pong_sync();
      base::scores(s, q_state_.stage, k_state_.stage);
      base::wait_values(tile, e);
      add_values<0>(o, p, !begins_leaf);
      base::ping_pong_arrive();
      device::wgmma_wait_group<1>();
      device::wgmma_fence_operands(s);
      release_keys();
      prepare_scores(s, tile + 1, e, rows);
      begins_leaf = tile % leaf_tiles == leaf_tiles - 1;  // the next tile
      if (begins_leaf) {
        leaf = complete_leaf(rows);
        begin_leaf(rows);
      }
      take_run<0>(s, rows, weight, nullptr);
      finish_values(o);
      release_values();
      pack_run(s, p);
      if (begins_leaf) {
        add_leaf(o, leaf, node, root, tile / leaf_tiles);
      } else {
        scale(o, weight);
      }
    }
    base::release(stages_.q_empty(q_state_.stage));
    q_state_.advance();
    base::wait_values(tile, e);
    add_values<0>(o, p, !begins_leaf);
    end(rows, node, root, o);
  }

  __device__ __forceinline__ void process_pairs_of_runs(const kv_range& e, row_state& rows,
                                                        float (&o)[S::out_registers]) {
    float s[S::score_registers];
    run_probabilities p[2];
    tree_sums node, root, leaf;
    device::mbarrier_wait_parity(stages_.q_full(q_state_.stage), q_state_.phase);
    int tile = e.tile_begin;

    base::wait_keys();
    base::ping_pong_sync();
    base::scores(s, q_state_.stage, k_state_.stage);
    device::wgmma_wait_group<0>();
    device::wgmma_fence_operands(s);
    base::ping_pong_arrive();
    release_keys();
    prepare_scores(s, tile, e, rows);
    begin_leaf(rows);
    float weight[2];
    take_run<0>(s, rows, weight, &p[0]);
    base::wait_values(tile, e);
    add_values<0>(o, p[0], false);
    take_run<1>(s, rows, weight, &p[1]);
    finish_values(o);
    scale(o, weight);

    for (; tile + 1 < e.tile_end; ++tile) {
      base::wait_keys();
      base::ping_pong_sync();
      base::scores(s, q_state_.stage, k_state_.stage);
      add_values<1>(o, p[1], true);
      base::ping_pong_arrive();
      device::wgmma_wait_group<1>();
      device::wgmma_fence_operands(s);
      release_keys();
      prepare_scores(s, tile + 1, e, rows);
      const bool ends_leaf = tile % leaf_tiles == leaf_tiles - 1;
      if (ends_leaf) {
        leaf = complete_leaf(rows);
        begin_leaf(rows);
      }
      take_run<0>(s, rows, weight, &p[0]);
      finish_values(o);
      release_values();
      if (ends_leaf) {
        add_leaf(o, leaf, node, root, tile / leaf_tiles);
      } else {
        scale(o, weight);
      }
      base::wait_values(tile + 1, e);
      add_values<0>(o, p[0], !ends_leaf);
      take_run<1>(s, rows, weight, &p[1]);
      finish_values(o);
      scale(o, weight);
    }
    base::release(stages_.q_empty(q_state_.stage));
    q_state_.advance();
    add_values<1>(o, p[1], true);
    end(rows, node, root, o);
  }

  // The last leaf, whose last products are under way, and all before it.
  __device__ __forceinline__ void end(row_state& rows, const tree_sums& node, const tree_sums& root,
                                      float (&o)[S::out_registers]) {
    tree_sums leaf = complete_leaf(rows);
    finish_values(o);
    release_values();
    float4* const kept = kept_outputs();
    add_earlier(o, leaf, node, [&](int i) { return load_node(kept, i); });
    add_earlier(o, leaf, root, [&](int i) { return __ldcg(kept + i * vector_step); });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.max[i] = leaf.max[i];
      rows.sum[i] = (thread_ & 3) == 0 ? leaf.sum[i] : 0.0f;  // the epilogue adds up a row's lanes
    }
  }

  __device__ __forceinline__ void release_keys() {
    base::release(stages_.k_empty(k_state_.stage));
    k_state_.advance();
  }
  __device__ __forceinline__ void release_values() {
    base::release(stages_.v_empty(v_state_.stage));
    v_state_.advance();
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

  __device__ __forceinline__ void begin_leaf(row_state& rows) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.max[i] = -INFINITY;
#pragma unroll
      for (int w = 0; w < tree::run_groups; ++w) sums_[i][w] = 0;
    }
  }
  [[nodiscard]] __device__ __forceinline__ tree_sums complete_leaf(const row_state& rows) const {
    tree_sums leaf;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      leaf.max[i] = scoring_.in_base_2(rows.max[i]);
      leaf.sum[i] = tree::sum_of_row(sums_[i]);
    }
    return leaf;
  }

  // Scores of a run to probabilities. `weight`: of older results of the leaf. `p`: the probabilities as operands, or
  // null where older ones are still in use and pack_run makes them later. Made here they take fewer registers: with 64
  // dims there is no local memory in the loop.
  template <int Run>
  __device__ __forceinline__ void take_run(float (&s)[S::score_registers], row_state& rows, float (&weight)[2],
                                           run_probabilities* p) {
    constexpr int first = Run * run_registers;
    float m[2] = {-INFINITY, -INFINITY};  // of this lane
#pragma unroll
    for (int j = first; j < first + run_registers; j += 4) {
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
#pragma unroll
      for (int w = 0; w < tree::run_groups; ++w) {
        float* const x = s + first + 8 * w + 2 * i;
        for (const int j : {0, 1, 4, 5}) x[j] = scoring_.probability(x[j], shift);
        sums_[i][w] = tree::add_group(sums_[i][w], weight[i], __fadd_rn(x[0], x[1]), __fadd_rn(x[4], x[5]));
        if (p == nullptr) continue;
        (*p)[w][i] = device::pack<T>(x[0], x[1]);
        (*p)[w][i + 2] = device::pack<T>(x[4], x[5]);
      }
    }
  }
  // Probabilities of a tile of one run as operands.
  __device__ __forceinline__ static void pack_run(const float (&s)[S::score_registers], run_probabilities& p) {
#pragma unroll
    for (int w = 0; w < run_steps; ++w)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* const x = s + 8 * w + 2 * j;
        p[w][j] = device::pack<T>(x[0], x[1]);
      }
  }

  // o (+)= p · v for one run of the tile in the stage; committed, not waited for.
  template <int Run>
  __device__ __forceinline__ void add_values(float (&o)[S::out_registers], const run_probabilities& p,
                                             bool accumulate) {
    device::wgmma_fence_operands(o);
    device::wgmma_fence();
    const std::uint64_t v = device::wgmma_descriptor(stages_.v(v_state_.stage), 1024, S::group_bytes);
#pragma unroll
    for (int step = 0; step < run_steps; ++step) {
      device::wgmma_m64k16_rs<T>(o, p[step],
                                 device::wgmma_descriptor_after(v, (Run * run_steps + step) * 2 * S::group_bytes),
                                 step > 0 || accumulate);
    }
    device::wgmma_commit_group();
  }

  // Waits for them once the sums are known: the softmax overlaps with them.
  __device__ __forceinline__ void finish_values(float (&o)[S::out_registers]) {
    device::wgmma_wait_all_after(sums_[0][0] + sums_[1][0] + sums_[0][tree::run_groups - 1] +
                                 sums_[1][tree::run_groups - 1]);
    device::wgmma_fence_operands(o);
  }

  __device__ __forceinline__ static void scale(float (&o)[S::out_registers], const float (&weight)[2]) {
    if (!__any_sync(0xffffffffu, weight[0] != 1.0f || weight[1] != 1.0f)) return;
#pragma unroll
    for (int j = 0; j < S::out_registers; ++j) o[j] *= weight[(j >> 1) & 1];
  }

  // Where the i-th four outputs of a thread are.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t shared_node_place(int i) const {
    return stages_.nodes(warpgroup_) + (i * 128 + thread_) * 16;
  }
  // This thread's outputs in the workspace, so far apart: those of the root, then those of the node. The address is
  // opaque, because the compiler would compute that of each vector anew.
  static constexpr int vector_step = 128;
  [[nodiscard]] __device__ __forceinline__ float4* kept_outputs() const {
    const int of_warpgroup = static_cast<int>(blockIdx.x) * S::num_consumers + warpgroup_;
    constexpr int num_vectors = prefill_tree_outputs(dtype::bf16, S::tile_dims) * vectors;
    float4* first = reinterpret_cast<float4*>(a_.workspace) +
                    static_cast<std::int64_t>(of_warpgroup) * num_vectors * vector_step + thread_;
    asm("" : "+l"(first));
    return first;
  }
  [[nodiscard]] __device__ __forceinline__ float4 load_node(const float4* kept, int i) const {
    return i < S::node_vectors ? device::load_shared_f32x4(shared_node_place(i))
                               : __ldcg(kept + (vectors + i) * vector_step);
  }
  __device__ __forceinline__ void store_node(float4* kept, int i, const float4& x) const {
    if (i < S::node_vectors) {
      device::store_shared_f32x4(shared_node_place(i), x);
    } else {
      __stcg(kept + (vectors + i) * vector_step, x);
    }
  }

  // Adds a leaf, number `number` of the sequence, to its node, and a node that it completes to the root.
  __device__ __forceinline__ void add_leaf(float (&o)[S::out_registers], tree_sums& leaf, tree_sums& node,
                                           tree_sums& root, int number) const {
    float4* const kept = kept_outputs();
    add_earlier(o, leaf, node, [&](int i) { return load_node(kept, i); });
    leaf.empty = false;
    const auto outputs = [&](int i) { return make_float4(o[4 * i], o[4 * i + 1], o[4 * i + 2], o[4 * i + 3]); };
    if (number % tree::node_leaves != tree::node_leaves - 1) {
      node = leaf;
#pragma unroll
      for (int i = 0; i < vectors; ++i) store_node(kept, i, outputs(i));
      return;
    }
    add_earlier(o, leaf, root, [&](int i) { return __ldcg(kept + i * vector_step); });
    root = leaf;
    node = tree_sums();
#pragma unroll
    for (int i = 0; i < vectors; ++i) __stcg(kept + i * vector_step, outputs(i));
  }

  tree::scoring scoring_;
  float sums_[2][tree::run_groups];  // of the leaf: this lane's share of a row's
};

}  // namespace bifolio::inline v0_2::cuda::prefill

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of deterministic plans for shapes that split dims: what combine_tree.cuh says, by four or eight warps.
/// Each warp computes the scores of its 16 or 8 keys of a KV tile. The warps exchange maxima and probabilities through
/// shared memory, and each multiplies the probabilities of all 64 keys with its share of V's dims. So the output of a
/// leaf is one chain of products, and nothing is left to reduce over warps: nodes and root stay in registers. Of eight
/// warps two have a group of 16 keys, and both add up its probabilities.

#include <cstdint>

#include "cuda/attention/combine_tree.cuh"
#include "cuda/attention/decode/mainloop.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"

namespace bifolio::inline v0_2::cuda::decode {

static_assert(tree::run_keys == decode_tile_tokens && tree::leaf_keys == decode_leaf_tiles * decode_tile_tokens &&
              tree::node_leaves == decode_combine_fan_in);

/// Two rows of a lane in a leaf, a node or the root. `Alternate`: whose outputs alternate; else they are two each.
template <int Tiles, bool Alternate>
struct lane_rows {
  float max[2];  // of scores in their unit; once a leaf is complete, base 2
  float sum[2];  // a lane's share, where shares are summed later; once a leaf is complete, of all
  float out[Tiles][4];

  [[nodiscard]] __device__ __forceinline__ static constexpr int row_of(int e) { return Alternate ? e % 2 : e / 2; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      max[i] = -INFINITY;
      sum[i] = 0;
    }
#pragma unroll
    for (int n = 0; n < Tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = 0;
  }

  __device__ __forceinline__ void add(const lane_rows& later) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const tree::combination both(max[i], later.max[i]);
      max[i] = both.max;
      sum[i] = both.of(sum[i], later.sum[i]);
#pragma unroll
      for (int n = 0; n < Tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (row_of(e) == i) out[n][e] = both.of(out[n][e], later.out[n][e]);
        }
    }
  }
};

/// Tiles of 8 dims of a warp: two at a time; where they are too few for all, the last warps have none.
template <class Shape>
inline constexpr int tree_tiles = (Shape::n_tiles / 2 + Shape::warps - 1) / Shape::warps * 2;

/// 16 rows of a leaf, a node or the root; of the output this warp's dims. Lanes have rows and columns as `accumulators`
/// have them.
template <class Shape>
struct tree_rows : lane_rows<tree_tiles<Shape>, false> {
  static constexpr int n_tiles = tree_tiles<Shape>;
};

/// The same of float32, whose rows are columns of products, in groups of eight (f32_tree_mainloop.cuh): of each group a
/// lane has rows 2 · (lane % 4) + i and, of every 16 dims of this warp, 2 · (lane / 4) and the next.
template <class Shape>
requires(Shape::tree_columns > 0) struct tree_rows<Shape> {
  static constexpr int dim_tiles = Shape::head_dim / 16 / Shape::warps;
  using group = lane_rows<dim_tiles, true>;
  group columns[Shape::tree_columns];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int c = 0; c < Shape::tree_columns; ++c) columns[c].clear();
  }
  __device__ __forceinline__ void add(const tree_rows& later) {
#pragma unroll
    for (int c = 0; c < Shape::tree_columns; ++c) columns[c].add(later.columns[c]);
  }
};

/// The leaves of a work tile as they come.
template <class Shape>
class running_tree {
 public:
  __device__ __forceinline__ void clear() {
    node_.clear();
    root_.clear();
  }
  /// Leaves come in their order. `leaf`: its number in the sequence.
  __device__ __forceinline__ void add(const tree_rows<Shape>& rows, int leaf) {
    node_.add(rows);
    if (leaf % tree::node_leaves != tree::node_leaves - 1) return;
    root_.add(node_);
    node_.clear();
  }
  /// Of one node that node, otherwise the root.
  [[nodiscard]] __device__ __forceinline__ const tree_rows<Shape>& finish() {
    root_.add(node_);
    return root_;
  }

 private:
  tree_rows<Shape> node_, root_;
};

/// What products become in a tree, of float32 too.
template <class T, class Shape, class Scheduler>
class tree_scores : public mainloop<T, Shape, Scheduler> {
  using S = Shape;
  using base = mainloop<T, Shape, Scheduler>;

 protected:
  __device__ __forceinline__ tree_scores(const decode_args& args, const Scheduler& scheduler, char* shared)
      : base(args, scheduler, shared), scoring_(args.scale, args.soft_cap, args.alibi_slopes != nullptr) {}

  __device__ __forceinline__ void apply_options(float (&s)[S::key_tiles][4], int first_key) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float slope = base::a_.alibi_slopes != nullptr ? base::slope_[i] : 0.0f;
      const auto distance = static_cast<float>(first_key + (base::lane_ & 3) * 2 - base::row_position_[i]);
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = s[n][2 * i + e];
          x = scoring_.logit(x, slope, distance + static_cast<float>(n * 8 + e));
        }
    }
  }

  tree::scoring scoring_;
};

template <class T, class Shape, class Scheduler>
class tree_mainloop : public tree_scores<T, Shape, Scheduler> {
  using S = Shape;
  using base = tree_scores<T, Shape, Scheduler>;
  using base::lane_, base::warp_, base::stage_, base::scoring_;

 public:
  __device__ __forceinline__ tree_mainloop(const decode_args& args, const Scheduler& scheduler, char* shared)
      : base(args, scheduler, shared),
        exchange_(*reinterpret_cast<tree_exchange<S::warps>*>(shared + S::shared.exchange)) {}

  /// Adds the next KV tile to `leaf`, which the caller has cleared before its first. After the last, the leaf is
  /// complete.
  __device__ __forceinline__ void process_tile(int tile, bool is_last, tree_rows<S>& leaf) {
    base::wait_for_tile(tile);
    const std::uint32_t k_base = base::stages_ + stage_ * S::stage_bytes;
    float s[S::key_tiles][4];
    base::template compute_scores<true>(s, k_base, base::q_buffer_);
    const int first_key = tile * decode_tile_tokens + warp_ * S::warp_keys;
    if (scoring_.has_options) base::apply_options(s, first_key);
    base::mask_scores(s, first_key);

    float weight[2];
    follow_maxima(s, leaf, weight);
    float pairs[2][S::key_tiles];
    make_probabilities(s, leaf, pairs);
    if constexpr (has_groups) {
#pragma unroll
      for (int i = 0; i < 2; ++i) leaf.sum[i] = tree::add_group(leaf.sum[i], weight[i], pairs[i][0], pairs[i][1]);
      if (is_last) share_sums(leaf);
      __syncthreads();
      add_values(k_base + S::tile_bytes, leaf);
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) exchange_.pairs[warp_][row_of(i)][lane_ & 3] = pairs[i][0];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float other = exchange_.pairs[warp_ ^ 1][row_of(i)][lane_ & 3];
        leaf.sum[i] = tree::add_group(leaf.sum[i], weight[i], pairs[i][0], other);
      }
      if (is_last && warp_ % 2 == 0) share_sums(leaf);
      add_values(k_base + S::tile_bytes, leaf);
      if (is_last) __syncthreads();
    }
    if (is_last) complete(leaf);
    stage_ = base::next_stage();
  }

 private:
  // A warp's keys are whole groups.
  static constexpr bool has_groups = S::warp_keys == tree::group_keys;
  using probability_rows = row_format<2, decode_tile_tokens>;

  [[nodiscard]] __device__ __forceinline__ int row_of(int i) const { return lane_ / 4 + 8 * i; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t probabilities() const {
    return device::shared_address(reinterpret_cast<const char*>(exchange_.probabilities));
  }

  // Each row's maximum against all keys of the tile. `weight`: of older results.
  __device__ __forceinline__ void follow_maxima(const float (&s)[S::key_tiles][4], tree_rows<S>& leaf,
                                                float (&weight)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = fmaxf(s[0][2 * i], s[0][2 * i + 1]);
      if constexpr (S::key_tiles == 2) m = fmaxf(m, fmaxf(s[1][2 * i], s[1][2 * i + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      if ((lane_ & 3) == 0) exchange_.maxima[warp_][row_of(i)] = m;
    }
    __syncthreads();
    bool any = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = exchange_.maxima[0][row_of(i)];
#pragma unroll
      for (int w = 1; w < S::warps; ++w) m = fmaxf(m, exchange_.maxima[w][row_of(i)]);
      weight[i] = 1.0f;
      if (!scoring_.rises(m, leaf.max[i])) continue;
      weight[i] = scoring_.weight_of_older(leaf.max[i], m);
      leaf.max[i] = m;
      any = true;
    }
    if (!__any_sync(0xffffffffu, any)) return;
#pragma unroll
    for (int n = 0; n < tree_rows<S>::n_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) leaf.out[n][e] *= weight[e / 2];
  }

  // This warp's probabilities, for all. `pairs`: the lane's two of every 8 keys, added up.
  __device__ __forceinline__ void make_probabilities(const float (&s)[S::key_tiles][4], const tree_rows<S>& leaf,
                                                     float (&pairs)[2][S::key_tiles]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = scoring_.shift_of(leaf.max[i]);
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n) {
        const float p0 = scoring_.probability(s[n][2 * i], shift);
        const float p1 = scoring_.probability(s[n][2 * i + 1], shift);
        const int vector = S::key_tiles * warp_ + n;
        device::store_shared_4(probabilities() + probability_rows::place(row_of(i), vector) + (lane_ & 3) * 4,
                               device::pack<T>(p0, p1));
        pairs[i][n] = __fadd_rn(p0, p1);
      }
    }
  }

  __device__ __forceinline__ void share_sums(const tree_rows<S>& leaf) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      exchange_.sums[warp_ * S::warp_keys / tree::group_keys][row_of(i)][lane_ & 3] = leaf.sum[i];
    }
  }

  // The probabilities of all keys times this warp's dims of V.
  __device__ __forceinline__ void add_values(std::uint32_t v_base, tree_rows<S>& leaf) const {
    constexpr int n_tiles = tree_rows<S>::n_tiles;
    const int row = (lane_ & 7) + ((lane_ >> 3) & 1) * 8;
#pragma unroll
    for (int kk = 0; kk < decode_tile_tokens / 16; ++kk) {
      std::uint32_t p[4];
      device::ldmatrix_x4(p, probabilities() + probability_rows::place(row, 2 * kk + (lane_ >> 4)));
#pragma unroll
      for (int n = 0; n < n_tiles; n += 2) {
        if (S::n_tiles % (2 * S::warps) != 0 && warp_ * n_tiles + n >= S::n_tiles) break;
        std::uint32_t b[4];
        device::ldmatrix_x4_trans(b, v_base + S::place(kk * 16 + row, warp_ * n_tiles + n + (lane_ >> 4)));
        device::mma_m16n8k16<T>(leaf.out[n], p, b[0], b[1]);
        device::mma_m16n8k16<T>(leaf.out[n + 1], p, b[2], b[3]);
      }
    }
  }

  __device__ __forceinline__ void complete(tree_rows<S>& leaf) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float of_groups[tree::run_groups];
#pragma unroll
      for (int w = 0; w < tree::run_groups; ++w) of_groups[w] = exchange_.sums[w][row_of(i)][lane_ & 3];
      leaf.sum[i] = tree::sum_of_row(of_groups);
      leaf.max[i] = scoring_.in_base_2(leaf.max[i]);
    }
  }

  tree_exchange<S::warps>& exchange_;
};

}  // namespace bifolio::inline v0_2::cuda::decode

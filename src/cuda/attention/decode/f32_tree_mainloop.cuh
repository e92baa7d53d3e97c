// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of float32 in deterministic plans: what combine_tree.cuh says of it, by products whose 16 rows are
/// keys, then dims of V, and whose 8 columns are query rows. Tensor cores give a product the same bits whichever factor
/// comes first. An output tile of up to decode_few_rows rows has one group of columns, others have two, for which an
/// element of V is taken from shared memory and split once.
///
/// Four warps compute the scores of 16 keys each, for all groups; of eight warps four do so for each group. All warps
/// share V's dims.

#include <cstdint>
#include <type_traits>

#include "cuda/attention/combine_tree.cuh"
#include "cuda/attention/decode/mainloop.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/attention/decode/tree_mainloop.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"
#include "cuda/device/static_loop.cuh"

namespace bifolio::inline v0_2::cuda::decode {

template <class Shape, class Scheduler>
class f32_tree_mainloop : public tree_scores<float, Shape, Scheduler> {
  using S = Shape;
  using base = tree_scores<float, Shape, Scheduler>;
  static constexpr int columns = S::tree_columns;  // groups of them
  using exchange = f32_tree_exchange<columns>;
  using lane_columns = typename tree_rows<S>::group;
  using base::lane_, base::warp_, base::stage_, base::scoring_, base::a_;
  static constexpr int key_warps = exchange::key_warps;
  static constexpr int score_keys = decode_tile_tokens / key_warps;  // of a warp
  /// Groups of columns that a warp has scores of.
  static constexpr int scored = S::warps == key_warps ? columns : 1;
  static constexpr int scoring_warps = key_warps * columns / scored;
  static constexpr int runs = decode_tile_tokens / tree::f32_run_keys;
  static constexpr int run_groups = tree::f32_run_keys / 8;  // of keys, which one product with V adds
  /// Two groups of columns have their queries as they are, and split them for each tile: registers are short, and what
  /// is in local memory comes from L2, because shared memory takes the rest of L1.
  using query = std::conditional_t<scored == 1, device::tf32_pair, float>;
  static_assert(score_keys == 16 && tree::f32_run_keys == 2 * score_keys && tree_rows<S>::dim_tiles == 1);
  static_assert(S::kv_rows::swizzled && S::q_rows::swizzled && S::warps >= scoring_warps);

 public:
  __device__ __forceinline__ f32_tree_mainloop(const decode_args& args, const Scheduler& scheduler, char* shared)
      : base(args, scheduler, shared),
        exchange_(device::shared_address(shared) + S::shared.exchange),
        key_place_(device::kept(S::place(own_keys() + (lane_ & 15), lane_ >> 4))) {
    const int key = (lane_ & 3) * 2;
    const int vector = warp_ * 4 + (lane_ >> 3);
    const std::uint32_t dim_bytes = (lane_ >> 2 & 1) * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) value_places_[i] = device::kept(S::tile_bytes + S::place(key + i, vector) + dim_bytes);
  }

  __device__ __forceinline__ void begin(const work_tile& w, const decode_seq& s) {
    base::begin(w, s);
#pragma unroll
    for (int c = 0; c < scored; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = w.row_tile * decode_tile_rows + (first_scored() + c) * 8 + first_row() + i;
        const int token = a_.by_group_size.quotient(row);
        row_position_[c][i] = device::kept(s.seq_len - s.query_len + token);
        if (a_.alibi_slopes == nullptr) continue;
        const int head = w.head * a_.group_size + row - token * a_.group_size;
        slope_[c][i] = token < s.query_len ? a_.alibi_slopes[head] * base::log2e : 0.0f;
      }
    }
  }

  /// Of the work tile that has begun; before its first KV tile, with which they come.
  __device__ __forceinline__ void take_queries() {
    device::cp_async_wait_group<S::stages - 2>();
    __syncthreads();
    if (!is_scoring()) return;
    const std::uint32_t queries = base::queries_ + base::q_buffer_ * S::q_bytes;
#pragma unroll
    for (int kk = 0; kk < S::k_steps; kk += 2) {
#pragma unroll
      for (int c = 0; c < scored; ++c) {
        std::uint32_t x[4];
        const int row = (first_scored() + c) * 8 + (lane_ & 7);
        device::ldmatrix_x4(x, queries + S::q_rows::place(row, 2 * kk + (lane_ >> 3)));
#pragma unroll
        for (int i = 0; i < 4; ++i) query_[kk + i / 2][c][i % 2] = query_of(__uint_as_float(x[i]));
      }
    }
  }

  /// Adds the next KV tile to `leaf`, which the caller has cleared before its first. After the last, the leaf is
  /// complete; before, the first sum of each group of columns is this lane's share of row lane / 4 of the group.
  __device__ __forceinline__ void process_tile(int tile, bool is_last, tree_rows<S>& leaf) {
    base::wait_for_stage();
    const std::uint32_t k_base = base::stages_ + stage_ * S::stage_bytes;
    float s[scored][4];  // [2 · (key / 8) + i]
    if (is_scoring()) {
      compute_scores(s, k_base);
      const int warp_key = tile * decode_tile_tokens + own_keys();
      if (scoring_.has_options) apply_options(s, warp_key + (lane_ >> 2));
      mask_scores(s, warp_key);
      share_maxima(s);
    }
    __syncthreads();
    float weight[columns][runs][2];  // of older results
    follow_maxima(s, leaf, weight);
    __syncthreads();
    if (has_dims()) add_values(k_base, weight, leaf);
    if (is_last) {
#pragma unroll
      for (int c = 0; c < columns; ++c) complete(leaf.columns[c]);
    }
    stage_ = base::next_stage();
  }

 private:
  // 16 rows and 8 columns that are the first factor of a product: rows of the lane, of the first four columns, then of
  // the others.
  struct factor {
    uint4 large, small;
  };
  [[nodiscard]] __device__ __forceinline__ static factor split(float x, float y, float z, float w) {
    const device::tf32_pair a = device::split_tf32(x);
    const device::tf32_pair b = device::split_tf32(y);
    const device::tf32_pair c = device::split_tf32(z);
    const device::tf32_pair d = device::split_tf32(w);
    return {make_uint4(a.large, b.large, c.large, d.large), make_uint4(a.small, b.small, c.small, d.small)};
  }

  [[nodiscard]] __device__ __forceinline__ static query query_of(float x) {
    if constexpr (scored == 1) {
      return device::split_tf32(x);
    } else {
      return x;
    }
  }
  [[nodiscard]] __device__ __forceinline__ static device::tf32_pair pair_of(const query& q) {
    if constexpr (scored == 1) {
      return q;
    } else {
      return device::split_tf32(q);
    }
  }

  [[nodiscard]] __device__ __forceinline__ bool is_scoring() const {
    return S::warps == scoring_warps || warp_ < scoring_warps;
  }
  // Of the tile, with whose scores this warp begins.
  [[nodiscard]] __device__ __forceinline__ int own_keys() const { return warp_ % key_warps * score_keys; }
  // Group of columns.
  [[nodiscard]] __device__ __forceinline__ int first_scored() const {
    return scored == columns ? 0 : warp_ / key_warps;
  }
  [[nodiscard]] __device__ __forceinline__ bool scores(int c) const {
    return scored == columns || warp_ / key_warps == c;
  }
  // Whether the warp's dims of V are not all beyond the rows' ends.
  [[nodiscard]] __device__ __forceinline__ bool has_dims() const { return warp_ * 16 < S::row_dims(a_); }
  // Of the lane's two rows in a group of columns.
  [[nodiscard]] __device__ __forceinline__ int first_row() const { return (lane_ & 3) * 2; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t probability(int row, int key) const {
    return exchange_ + static_cast<std::uint32_t>((row * exchange::row_floats + key) * sizeof(float));
  }
  // Of this lane's rows in a group of columns, by warp.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t maxima(int c) const {
    constexpr std::uint32_t of_pair = key_warps * 2 * sizeof(float);
    return exchange_ + static_cast<std::uint32_t>(sizeof(exchange::probabilities)) + (c * 4 + (lane_ & 3)) * of_pair;
  }

  // Of 8 keys the lane's two, of two dims each, as the product takes them: even keys come first.
  [[nodiscard]] __device__ __forceinline__ factor take_values(std::uint32_t k_base, int group) const {
    const std::uint32_t later = group * 8 * S::kv_rows::bytes;
    const float2 even = device::load_shared_f32x2(k_base + value_places_[0] + later);
    const float2 odd = device::load_shared_f32x2(k_base + value_places_[1] + later);
    return split(even.x, even.y, odd.x, odd.y);
  }

  // Larger · larger and the two others in sums of their own, each one sum over the dims.
  __device__ __forceinline__ void compute_scores(float (&s)[scored][4], std::uint32_t k_base) const {
    float rest[scored][4] = {};
#pragma unroll
    for (int c = 0; c < scored; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[c][e] = 0;
    std::uint32_t first[4];  // vectors of 128 bytes of a row
#pragma unroll
    for (int i = 0; i < 4; ++i) first[i] = k_base + (key_place_ ^ static_cast<std::uint32_t>(i << 5));
    const auto add = [&](auto step) {
      constexpr int kk = decltype(step)::value;
      std::uint32_t place = first[kk % 4] + kk / 4 * 128;
      if (2 * kk + 1 >= S::least_row_vectors && 2 * kk + (lane_ >> 4) >= S::vectors_of_row(a_)) place = base::zeros_;
      std::uint32_t x[4];
      device::ldmatrix_x4(x, place);
      const factor k =
          split(__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]), __uint_as_float(x[3]));
      device::tf32_pair q[scored][2];
#pragma unroll
      for (int c = 0; c < scored; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) q[c][i] = pair_of(query_[kk][c][i]);
#pragma unroll
      for (int c = 0; c < scored; ++c) device::mma_m16n8k8_tf32(rest[c], k.large, q[c][0].small, q[c][1].small);
#pragma unroll
      for (int c = 0; c < scored; ++c) device::mma_m16n8k8_tf32(rest[c], k.small, q[c][0].large, q[c][1].large);
#pragma unroll
      for (int c = 0; c < scored; ++c) device::mma_m16n8k8_tf32(s[c], k.large, q[c][0].large, q[c][1].large);
    };
    // What short rows lack adds nothing.
    constexpr int most = S::k_steps * 3 / 4;
    device::for_each_step<0, most>(add);
    if (S::vectors_of_row(a_) > 2 * most) device::for_each_step<most, S::k_steps>(add);
#pragma unroll
    for (int c = 0; c < scored; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[c][e] = __fadd_rn(s[c][e], rest[c][e]);
  }

  __device__ __forceinline__ void apply_options(float (&s)[scored][4], int key) const {
#pragma unroll
    for (int c = 0; c < scored; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float slope = a_.alibi_slopes != nullptr ? slope_[c][i] : 0.0f;
        const int distance = key - row_position_[c][i];
#pragma unroll
        for (int j = 0; j < 2; ++j)
          s[c][2 * j + i] = scoring_.logit(s[c][2 * j + i], slope, static_cast<float>(distance + 8 * j));
      }
  }

  // Scores of keys that a row does not attend to become −inf.
  __device__ __forceinline__ void mask_scores(float (&s)[scored][4], int warp_key) const {
    if (warp_key >= base::common_begin_ && warp_key + score_keys <= base::common_end_) return;
    const int key = warp_key + (lane_ >> 2);
#pragma unroll
    for (int c = 0; c < scored; ++c)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!base::visible_from(row_position_[c][e % 2], key + e / 2 * 8)) s[c][e] = -INFINITY;
      }
  }

  __device__ __forceinline__ void share_maxima(const float (&s)[scored][4]) const {
#pragma unroll
    for (int c = 0; c < scored; ++c) {
      float m[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        m[i] = fmaxf(s[c][i], s[c][2 + i]);
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) m[i] = fmaxf(m[i], __shfl_xor_sync(0xffffffffu, m[i], lanes));
      }
      if (lane_ < 4) {
        device::store_shared_f32x2(maxima(first_scored() + c) + warp_ % key_warps * 8, make_float2(m[0], m[1]));
      }
    }
  }

  // Each row's maximum follows the scores of one run, then those of the next; this warp's probabilities, for all.
  __device__ __forceinline__ void follow_maxima(const float (&s)[scored][4], tree_rows<S>& leaf,
                                                float (&weight)[columns][runs][2]) const {
    float m[columns][runs][2];
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int run = 0; run < runs; ++run) {
        const float4 of_warps = device::load_shared_f32x4(maxima(c) + run * 16);
        m[c][run][0] = fmaxf(of_warps.x, of_warps.z);
        m[c][run][1] = fmaxf(of_warps.y, of_warps.w);
      }
    float max[columns][2];  // of this warp's run
#pragma unroll
    for (int c = 0; c < columns; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float current = leaf.columns[c].max[i];
#pragma unroll
        for (int run = 0; run < runs; ++run) {
          weight[c][run][i] = 1.0f;
          if (scoring_.rises(m[c][run][i], current)) {
            weight[c][run][i] = scoring_.weight_of_older(current, m[c][run][i]);
            current = m[c][run][i];
          }
          if (run == 0 || own_keys() >= tree::f32_run_keys) max[c][i] = current;
        }
        leaf.columns[c].max[i] = current;
      }
    if (!is_scoring()) return;
#pragma unroll
    for (int c = 0; c < scored; ++c)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float shift = scoring_.shift_of(scores(c) ? max[c][i] : max[columns - 1][i]);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          device::store_shared_4(
              probability((first_scored() + c) * 8 + first_row() + i, own_keys() + j * 8 + (lane_ >> 2)),
              __float_as_uint(scoring_.probability(s[c][2 * j + i], shift)));
        }
      }
  }

  // This warp's dims of V times the probabilities of all keys. A run's products begin new sums, smaller parts first,
  // which are added to the output by ordinary additions.
  __device__ __forceinline__ void add_values(std::uint32_t k_base, const float (&weight)[columns][runs][2],
                                             tree_rows<S>& leaf) const {
    constexpr auto of_columns = static_cast<std::uint32_t>(8 * exchange::row_floats * sizeof(float));
    const std::uint32_t own = probability(lane_ >> 2, (lane_ & 3) * 2);
    float sum[runs][columns][4] = {};
    float of_row[runs][columns];
#pragma unroll
    for (int run = 0; run < runs; ++run) {
      uint4 larger_values[run_groups];
      device::tf32_pair even[run_groups][columns];
      device::tf32_pair odd[run_groups][columns];
#pragma unroll
      for (int g = 0; g < run_groups; ++g) {
        const factor v = take_values(k_base, run * run_groups + g);
        larger_values[g] = v.large;
#pragma unroll
        for (int c = 0; c < columns; ++c) {
          const float2 p = device::load_shared_f32x2(own + c * of_columns + (run * run_groups + g) * 32);
          const float pair = __fadd_rn(p.x, p.y);
          of_row[run][c] = g == 0 ? pair : __fadd_rn(of_row[run][c], pair);
          even[g][c] = device::split_tf32(p.x);
          odd[g][c] = device::split_tf32(p.y);
          device::mma_m16n8k8_tf32(sum[run][c], v.large, even[g][c].small, odd[g][c].small);
          device::mma_m16n8k8_tf32(sum[run][c], v.small, even[g][c].large, odd[g][c].large);
        }
      }
#pragma unroll
      for (int g = 0; g < run_groups; ++g)
#pragma unroll
        for (int c = 0; c < columns; ++c) {
          device::mma_m16n8k8_tf32(sum[run][c], larger_values[g], even[g][c].large, odd[g][c].large);
        }
    }
#pragma unroll
    for (int c = 0; c < columns; ++c) {
      lane_columns& to = leaf.columns[c];
#pragma unroll
      for (int run = 0; run < runs; ++run) {
        const float(&w)[2] = weight[c][run];
        to.sum[0] = __fmaf_rn(to.sum[0], of_own_row(w), of_row[run][c]);
#pragma unroll
        for (int e = 0; e < 4; ++e) to.out[0][e] = __fadd_rn(__fmul_rn(to.out[0][e], w[e % 2]), sum[run][c][e]);
      }
    }
  }

  // From the lanes that have row lane / 4 as one of their two.
  [[nodiscard]] __device__ __forceinline__ float of_own_row(const float (&of_rows)[2]) const {
    const float first = __shfl_sync(0xffffffffu, of_rows[0], lane_ >> 3);
    const float second = __shfl_sync(0xffffffffu, of_rows[1], lane_ >> 3);
    return (lane_ & 4) == 0 ? first : second;
  }

  __device__ __forceinline__ void complete(lane_columns& leaf) const {
    const float sum = tree::sum_over_lanes(leaf.sum[0]);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      leaf.sum[i] = __shfl_sync(0xffffffffu, sum, (first_row() + i) * 4);
      leaf.max[i] = scoring_.in_base_2(leaf.max[i]);
    }
  }

  std::uint32_t exchange_;
  std::uint32_t key_place_;        // in the stage: the lane's vector of K's first product
  std::uint32_t value_places_[2];  // of V: two dims of the lane's keys of the first product, even and odd
  query query_[S::k_steps][scored][2];
  // Of the rows with scores.
  int row_position_[scored][2];
  float slope_[scored][2];
};

}  // namespace bifolio::inline v0_2::cuda::decode

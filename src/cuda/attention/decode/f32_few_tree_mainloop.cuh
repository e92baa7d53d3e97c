// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of float32 in deterministic plans where no output tile has more than decode_few_rows rows: the numbers
/// of f32_tree_mainloop.cuh in the same order, by products whose 16 rows are keys, then dims of V, and whose 8 columns
/// are the query rows. Tensor cores give a product the same bits whichever factor comes first. Nothing is padded to 16
/// rows: half the products, and half the registers of queries.
///
/// Four warps compute the scores of 16 keys each; all warps share V's dims. A warp takes its part of V from shared
/// memory and splits it before the probabilities are there: one with scores between their products, which are a chain,
/// the others meanwhile.

#include <cstdint>

#include "cuda/attention/combine_tree.cuh"
#include "cuda/attention/decode/mainloop.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/attention/decode/tree_mainloop.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"
#include "cuda/device/static_loop.cuh"

namespace bifolio::inline v0_2::cuda::decode {

template <class Shape, class Scheduler>
class f32_few_tree_mainloop : public tree_scores<float, Shape, Scheduler> {
  using S = Shape;
  using base = tree_scores<float, Shape, Scheduler>;
  using exchange = f32_few_tree_exchange;
  using base::lane_, base::warp_, base::stage_, base::scoring_, base::row_position_, base::slope_, base::a_;
  static constexpr int scoring_warps = exchange::scoring_warps;
  static constexpr int score_keys = decode_tile_tokens / scoring_warps;  // of a warp
  static constexpr int runs = decode_tile_tokens / tree::f32_run_keys;
  static constexpr int groups = decode_tile_tokens / 8;  // of keys, which one product with V adds
  static constexpr int run_groups = tree::f32_run_keys / 8;
  static_assert(score_keys == 16 && tree::f32_run_keys == 2 * score_keys && tree_rows<S>::dim_tiles == 1);
  static_assert(S::kv_rows::swizzled && S::q_rows::swizzled && S::warps >= scoring_warps);

 public:
  __device__ __forceinline__ f32_few_tree_mainloop(const decode_args& args, const Scheduler& scheduler, char* shared)
      : base(args, scheduler, shared),
        exchange_(device::shared_address(shared) + S::shared.exchange),
        key_place_(device::kept(S::place(warp_ * score_keys + (lane_ & 15), lane_ >> 4))) {
    const int key = (lane_ & 3) * 2;
    const int vector = warp_ * 4 + (lane_ >> 3);
    const std::uint32_t dim_bytes = (lane_ >> 2 & 1) * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) value_places_[i] = device::kept(S::tile_bytes + S::place(key + i, vector) + dim_bytes);
  }

  __device__ __forceinline__ void begin(const work_tile& w, const decode_seq& s) {
    base::begin(w, s);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row() + i;
      const int token = a_.by_group_size.quotient(row);
      row_position_[i] = device::kept(s.seq_len - s.query_len + token);
      if (a_.alibi_slopes == nullptr) continue;
      const int head = w.head * a_.group_size + row - token * a_.group_size;
      slope_[i] = token < s.query_len ? a_.alibi_slopes[head] * base::log2e : 0.0f;
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
      std::uint32_t x[4];
      device::ldmatrix_x4(x, queries + S::q_rows::place(lane_ & 7, 2 * kk + (lane_ >> 3)));
#pragma unroll
      for (int i = 0; i < 4; ++i) query_[kk + i / 2][i % 2] = device::split_tf32(__uint_as_float(x[i]));
    }
  }

  /// Adds the next KV tile to `leaf`, which the caller has cleared before its first. After the last, the leaf is
  /// complete; before, its first sum is this lane's share of row lane / 4.
  __device__ __forceinline__ void process_tile(int tile, bool is_last, tree_rows<S>& leaf) {
    base::wait_for_stage();
    const std::uint32_t k_base = base::stages_ + stage_ * S::stage_bytes;
    float s[4];  // [2 · (key / 8) + i]
    factor values[groups];
    if (is_scoring()) {
      compute_scores(s, values, k_base);
      const int first_key = tile * decode_tile_tokens + warp_ * score_keys + (lane_ >> 2);
      if (scoring_.has_options) apply_options(s, first_key);
      mask_scores(s, tile * decode_tile_tokens + warp_ * score_keys, first_key);
      share_maxima(s);
    } else {
#pragma unroll
      for (int g = 0; g < groups; ++g) values[g] = take_values(k_base, g);
    }
    __syncthreads();
    float weight[runs][2];  // of older results
    follow_maxima(s, leaf, weight);
    __syncthreads();
    add_values(values, weight, leaf);
    if (is_last) complete(leaf);
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

  [[nodiscard]] __device__ __forceinline__ bool is_scoring() const {
    return S::warps == scoring_warps || warp_ < scoring_warps;
  }
  [[nodiscard]] __device__ __forceinline__ int first_row() const { return (lane_ & 3) * 2; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t probability(int row, int key) const {
    return exchange_ + static_cast<std::uint32_t>((row * exchange::row_floats + key) * sizeof(float));
  }
  // Of this lane's rows, by warp.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t maxima() const {
    constexpr std::uint32_t of_pair = scoring_warps * 2 * sizeof(float);
    return exchange_ + static_cast<std::uint32_t>(sizeof(exchange::probabilities)) + (lane_ & 3) * of_pair;
  }

  // Of 8 keys the lane's two, of two dims each, as the product takes them: even keys come first.
  [[nodiscard]] __device__ __forceinline__ factor take_values(std::uint32_t k_base, int group) const {
    const std::uint32_t later = group * 8 * S::kv_rows::bytes;
    const float2 even = device::load_shared_f32x2(k_base + value_places_[0] + later);
    const float2 odd = device::load_shared_f32x2(k_base + value_places_[1] + later);
    return split(even.x, even.y, odd.x, odd.y);
  }

  // Larger · larger and the two others in sums of their own, each one sum over the dims.
  __device__ __forceinline__ void compute_scores(float (&s)[4], factor (&values)[groups], std::uint32_t k_base) const {
    float rest[4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = 0;
    std::uint32_t first[4];  // vectors of 128 bytes of a row
#pragma unroll
    for (int i = 0; i < 4; ++i) first[i] = k_base + (key_place_ ^ static_cast<std::uint32_t>(i << 5));
    device::for_each_step<0, S::k_steps>([&](auto step) {
      constexpr int kk = decltype(step)::value;
      std::uint32_t place = first[kk % 4] + kk / 4 * 128;
      if (2 * kk + 1 >= S::least_row_vectors && 2 * kk + (lane_ >> 4) >= S::vectors_of_row(a_)) place = base::zeros_;
      std::uint32_t x[4];
      device::ldmatrix_x4(x, place);
      const factor k =
          split(__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]), __uint_as_float(x[3]));
      const device::tf32_pair(&q)[2] = query_[kk];
      device::mma_m16n8k8_tf32(rest, k.large, q[0].small, q[1].small);
      device::mma_m16n8k8_tf32(rest, k.small, q[0].large, q[1].large);
      device::mma_m16n8k8_tf32(s, k.large, q[0].large, q[1].large);
      if constexpr ((kk + 1) * groups % S::k_steps == 0)
        values[kk * groups / S::k_steps] = take_values(k_base, kk * groups / S::k_steps);
    });
#pragma unroll
    for (int e = 0; e < 4; ++e) s[e] = __fadd_rn(s[e], rest[e]);
  }

  __device__ __forceinline__ void apply_options(float (&s)[4], int key) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float slope = a_.alibi_slopes != nullptr ? slope_[i] : 0.0f;
      const int distance = key - row_position_[i];
#pragma unroll
      for (int j = 0; j < 2; ++j)
        s[2 * j + i] = scoring_.logit(s[2 * j + i], slope, static_cast<float>(distance + 8 * j));
    }
  }

  // Scores of keys that a row does not attend to become −inf.
  __device__ __forceinline__ void mask_scores(float (&s)[4], int warp_key, int key) const {
    if (warp_key >= base::common_begin_ && warp_key + score_keys <= base::common_end_) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (!base::visible(key + e / 2 * 8, e % 2)) s[e] = -INFINITY;
    }
  }

  __device__ __forceinline__ void share_maxima(const float (&s)[4]) const {
    float m[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      m[i] = fmaxf(s[i], s[2 + i]);
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) m[i] = fmaxf(m[i], __shfl_xor_sync(0xffffffffu, m[i], lanes));
    }
    if (lane_ < 4) device::store_shared_f32x2(maxima() + warp_ * 8, make_float2(m[0], m[1]));
  }

  // Each row's maximum follows the scores of one run, then those of the next; this warp's probabilities, for all.
  __device__ __forceinline__ void follow_maxima(const float (&s)[4], tree_rows<S>& leaf,
                                                float (&weight)[runs][2]) const {
    float own_max[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int run = 0; run < runs; ++run) {
      const float4 of_warps = device::load_shared_f32x4(maxima() + run * 16);
      const float m[2] = {fmaxf(of_warps.x, of_warps.z), fmaxf(of_warps.y, of_warps.w)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        weight[run][i] = 1.0f;
        if (scoring_.rises(m[i], leaf.max[i])) {
          weight[run][i] = scoring_.weight_of_older(leaf.max[i], m[i]);
          leaf.max[i] = m[i];
        }
        if (run == (warp_ * score_keys >= tree::f32_run_keys ? 1 : 0)) own_max[i] = leaf.max[i];
      }
    }
    if (!is_scoring()) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = scoring_.shift_of(own_max[i]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        device::store_shared_4(probability(first_row() + i, warp_ * score_keys + j * 8 + (lane_ >> 2)),
                               __float_as_uint(scoring_.probability(s[2 * j + i], shift)));
      }
    }
  }

  // This warp's dims of V times the probabilities of all keys. A run's products begin new sums, smaller parts first,
  // which are added to the output by ordinary additions.
  __device__ __forceinline__ void add_values(const factor (&values)[groups], const float (&weight)[runs][2],
                                             tree_rows<S>& leaf) const {
    const std::uint32_t own = probability(lane_ >> 2, (lane_ & 3) * 2);
    float sum[runs][4] = {};
    float of_row[runs];
#pragma unroll
    for (int run = 0; run < runs; ++run) {
      device::tf32_pair even[run_groups];
      device::tf32_pair odd[run_groups];
#pragma unroll
      for (int g = 0; g < run_groups; ++g) {
        const int group = run * run_groups + g;
        const float2 p = device::load_shared_f32x2(own + group * 32);
        const float pair = __fadd_rn(p.x, p.y);
        of_row[run] = g == 0 ? pair : __fadd_rn(of_row[run], pair);
        even[g] = device::split_tf32(p.x);
        odd[g] = device::split_tf32(p.y);
        device::mma_m16n8k8_tf32(sum[run], values[group].large, even[g].small, odd[g].small);
        device::mma_m16n8k8_tf32(sum[run], values[group].small, even[g].large, odd[g].large);
      }
#pragma unroll
      for (int g = 0; g < run_groups; ++g) {
        device::mma_m16n8k8_tf32(sum[run], values[run * run_groups + g].large, even[g].large, odd[g].large);
      }
    }
#pragma unroll
    for (int run = 0; run < runs; ++run) {
      leaf.sum[0] = __fmaf_rn(leaf.sum[0], of_own_row(weight[run]), of_row[run]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        leaf.out[0][e] = __fadd_rn(__fmul_rn(leaf.out[0][e], weight[run][e % 2]), sum[run][e]);
      }
    }
  }

  // From the lanes that have row lane / 4 as one of their two.
  [[nodiscard]] __device__ __forceinline__ float of_own_row(const float (&of_rows)[2]) const {
    const float first = __shfl_sync(0xffffffffu, of_rows[0], lane_ >> 3);
    const float second = __shfl_sync(0xffffffffu, of_rows[1], lane_ >> 3);
    return (lane_ & 4) == 0 ? first : second;
  }

  __device__ __forceinline__ void complete(tree_rows<S>& leaf) const {
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
  device::tf32_pair query_[S::k_steps][2];
};

}  // namespace bifolio::inline v0_2::cuda::decode

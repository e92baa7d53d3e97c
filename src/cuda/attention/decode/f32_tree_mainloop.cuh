// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of float32 in deterministic plans: what combine_tree.cuh says of it, by four or eight warps, each of
/// which computes the scores of its 16 or 8 keys of a KV tile and multiplies the probabilities of all 64 keys with its
/// share of V's dims. Queries are split into TensorFloat-32 numbers once for a work tile and stay in registers;
/// probabilities are shared as they are, and every warp splits them.

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
class f32_tree_mainloop : public tree_scores<float, Shape, Scheduler> {
  using S = Shape;
  using base = tree_scores<float, Shape, Scheduler>;
  using base::lane_, base::warp_, base::stage_, base::scoring_;
  static constexpr int runs = decode_tile_tokens / tree::f32_run_keys;
  static constexpr int run_warps = S::warps / runs;  // that have a run's keys
  static constexpr int run_groups = tree::f32_run_keys / 8;
  static constexpr int n_tiles = tree_rows<S>::n_tiles;
  static_assert(runs == 2 && S::n_tiles == n_tiles * S::warps);

 public:
  __device__ __forceinline__ f32_tree_mainloop(const decode_args& args, const Scheduler& scheduler, char* shared)
      : base(args, scheduler, shared),
        exchange_(*reinterpret_cast<f32_tree_exchange<S::warps>*>(shared + S::shared.exchange)) {}

  /// Of the work tile that has begun; before its first KV tile, with which they come.
  __device__ __forceinline__ void take_queries() {
    device::cp_async_wait_group<S::stages - 2>();
    __syncthreads();
#pragma unroll
    for (int kk = 0; kk < S::k_steps; ++kk) {
      std::uint32_t x[4];
      base::load_q_step(x, base::q_buffer_, kk);
#pragma unroll
      for (int i = 0; i < 4; ++i) q_[kk][i] = device::split_tf32(__uint_as_float(x[i]));
    }
  }

  /// Adds the next KV tile to `leaf`, which the caller has cleared before its first. After the last, the leaf is
  /// complete.
  __device__ __forceinline__ void process_tile(int tile, bool is_last, tree_rows<S>& leaf) {
    base::wait_for_stage();
    const std::uint32_t k_base = base::stages_ + stage_ * S::stage_bytes;
    float s[S::key_tiles][4];
    compute_scores(s, k_base);
    const int first_key = tile * decode_tile_tokens + warp_ * S::warp_keys;
    if (scoring_.has_options) base::apply_options(s, first_key);
    base::mask_scores(s, first_key);

    float weight[runs][2];  // of older results
    follow_maxima(s, leaf, weight);
    __syncthreads();
    add_values(k_base + S::tile_bytes, weight, leaf);
    if (is_last) complete(leaf);
    stage_ = base::next_stage();
  }

 private:
  using probability_rows = row_format<4, decode_tile_tokens>;

  [[nodiscard]] __device__ __forceinline__ int row_of(int i) const { return lane_ / 4 + 8 * i; }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t probabilities() const {
    return device::shared_address(reinterpret_cast<const char*>(exchange_.probabilities));
  }

  // Of 8 keys, larger · larger and the two others in sums of their own, each one sum over the dims.
  __device__ __forceinline__ void compute_scores(float (&s)[S::key_tiles][4], std::uint32_t k_base) const {
    float rest[S::key_tiles][4];
#pragma unroll
    for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = rest[n][e] = 0;
    const auto add = [&](int n, int kk, std::uint32_t b0, std::uint32_t b1) {
      device::mma_tf32x3(s[n], rest[n], q_[kk], device::split_tf32(__uint_as_float(b0)),
                         device::split_tf32(__uint_as_float(b1)));
    };
    if constexpr (S::key_tiles == 2) {
      const int row = warp_ * 16 + (lane_ & 7) + ((lane_ >> 4) & 1) * 8;
      device::for_each_step<0, S::k_steps>([&](auto step) {
        constexpr int kk = decltype(step)::value;
        std::uint32_t b[4];
        device::ldmatrix_x4(b, base::template key_vector<2 * kk + 1>(k_base, row, 2 * kk + ((lane_ >> 3) & 1)));
        add(0, kk, b[0], b[1]);
        add(1, kk, b[2], b[3]);
      });
    } else {
      const int row = warp_ * 8 + (lane_ & 7);
      device::for_each_step<0, S::k_steps / 2>([&](auto step) {
        constexpr int kk = 2 * decltype(step)::value;
        std::uint32_t b[4];
        device::ldmatrix_x4(b, base::template key_vector<2 * kk + 3>(k_base, row, 2 * kk + (lane_ >> 3)));
        add(0, kk, b[0], b[1]);
        add(0, kk + 1, b[2], b[3]);
      });
    }
#pragma unroll
    for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = __fadd_rn(s[n][e], rest[n][e]);
  }

  // Each row's maximum follows the scores of one run, then those of the next; this warp's probabilities, for all.
  __device__ __forceinline__ void follow_maxima(const float (&s)[S::key_tiles][4], tree_rows<S>& leaf,
                                                float (&weight)[runs][2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = fmaxf(s[0][2 * i], s[0][2 * i + 1]);
      if constexpr (S::key_tiles == 2) m = fmaxf(m, fmaxf(s[1][2 * i], s[1][2 * i + 1]));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, 2));
      if ((lane_ & 3) == 0) exchange_.maxima[row_of(i)][warp_] = m;
    }
    __syncthreads();
    const bool is_later = warp_ >= run_warps;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float* const maxima = exchange_.maxima[row_of(i)];
      float own_max = -INFINITY;
#pragma unroll
      for (int run = 0; run < runs; ++run) {
        float m = maxima[run * run_warps];
#pragma unroll
        for (int w = 1; w < run_warps; ++w) m = fmaxf(m, maxima[run * run_warps + w]);
        weight[run][i] = 1.0f;
        if (scoring_.rises(m, leaf.max[i])) {
          weight[run][i] = scoring_.weight_of_older(leaf.max[i], m);
          leaf.max[i] = m;
        }
        if (run == (is_later ? 1 : 0)) own_max = leaf.max[i];
      }
      const float shift = scoring_.shift_of(own_max);
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          // Of 8 keys the even ones come first.
          const int vector = 2 * (S::key_tiles * warp_ + n) + e;
          device::store_shared_4(probabilities() + probability_rows::place(row_of(i), vector) + (lane_ & 3) * 4,
                                 __float_as_uint(scoring_.probability(s[n][2 * i + e], shift)));
        }
    }
  }

  // The probabilities of all keys times this warp's dims of V. A run's products begin new sums, smaller parts first,
  // which are added to the output by ordinary additions.
  __device__ __forceinline__ void add_values(std::uint32_t v_base, const float (&weight)[runs][2],
                                             tree_rows<S>& leaf) const {
    const int row = (lane_ & 7) + ((lane_ >> 3) & 1) * 8;
    const std::uint32_t dim_bytes = (lane_ >> 2 & 3) * 4;
#pragma unroll
    for (int run = 0; run < runs; ++run) {
      float sum[n_tiles][4] = {};
      float of_row[2];
      uint4 large_p[run_groups];
      std::uint32_t large_v[run_groups][n_tiles][2];
#pragma unroll
      for (int g = 0; g < run_groups; ++g) {
        const int group = run * run_groups + g;
        std::uint32_t x[4];
        device::ldmatrix_x4(x, probabilities() + probability_rows::place(row, 2 * group + (lane_ >> 4)));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float pair = __fadd_rn(__uint_as_float(x[i]), __uint_as_float(x[i + 2]));
          of_row[i] = g == 0 ? pair : __fadd_rn(of_row[i], pair);
        }
        device::tf32_pair p[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) p[i] = device::split_tf32(__uint_as_float(x[i]));
        large_p[g] = make_uint4(p[0].large, p[1].large, p[2].large, p[3].large);
        const uint4 small_p = make_uint4(p[0].small, p[1].small, p[2].small, p[3].small);
        const int key = group * 8 + (lane_ & 3) * 2;
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
          const int vector = 2 * (warp_ * n_tiles + n) + (lane_ >> 4);
          const auto even = device::split_tf32(device::load_shared_f32(v_base + S::place(key, vector) + dim_bytes));
          const auto odd = device::split_tf32(device::load_shared_f32(v_base + S::place(key + 1, vector) + dim_bytes));
          large_v[g][n][0] = even.large;
          large_v[g][n][1] = odd.large;
          device::mma_m16n8k8_tf32(sum[n], small_p, even.large, odd.large);
          device::mma_m16n8k8_tf32(sum[n], large_p[g], even.small, odd.small);
        }
      }
#pragma unroll
      for (int g = 0; g < run_groups; ++g)
#pragma unroll
        for (int n = 0; n < n_tiles; ++n) {
          device::mma_m16n8k8_tf32(sum[n], large_p[g], large_v[g][n][0], large_v[g][n][1]);
        }
#pragma unroll
      for (int i = 0; i < 2; ++i) leaf.sum[i] = __fmaf_rn(leaf.sum[i], weight[run][i], of_row[i]);
#pragma unroll
      for (int n = 0; n < n_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          leaf.out[n][e] = __fadd_rn(__fmul_rn(leaf.out[n][e], weight[run][e / 2]), sum[n][e]);
        }
    }
  }

  __device__ __forceinline__ void complete(tree_rows<S>& leaf) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      leaf.sum[i] = tree::sum_over_lanes(leaf.sum[i]);
      leaf.max[i] = scoring_.in_base_2(leaf.max[i]);
    }
  }

  f32_tree_exchange<S::warps>& exchange_;
  device::tf32_pair q_[S::k_steps][4];
};

}  // namespace bifolio::inline v0_2::cuda::decode

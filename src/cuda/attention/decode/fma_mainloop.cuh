// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of float32 where no output tile has more than decode_few_rows rows: products by ordinary fused
/// multiplications and additions. Of so few rows these are less work than splitting every element of K and V into two
/// numbers of TensorFloat-32 and multiplying three times, half of it padding; and nothing is truncated.
///
/// A warp has its own keys of a tile, as in the mainloop of tensor cores. For the scores eight lanes share the dims of
/// a key, each for four rows, whose queries stay in its registers; of more than four rows each half of a group of 16
/// lanes has four. The sums over the lanes leave each lane with one row and a few keys. It puts its probabilities into
/// shared memory, from where all lanes read them: for the products with V a lane has four dims of every row. A row's
/// sums are the same whatever the other rows, but for the keys that a lane has of it.

#include <cstdint>

#include "cuda/attention/decode/mainloop.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"

namespace bifolio::inline v0_2::cuda::decode {

/// Which part of the scores a lane has. `Wide`: of more than four rows.
template <class Shape, bool Wide>
struct fma_lanes {
  static constexpr int rows = Wide ? 8 : 4;
  static constexpr int key_groups = Wide ? 2 : 4;             // of lanes
  static constexpr int keys = Shape::warp_keys / key_groups;  // of a lane's products: every key_groups-th
  static constexpr int own_keys = keys / 2;                   // of a lane once the sums are complete

  [[nodiscard]] static __device__ __forceinline__ int key_group(int lane) { return lane >> (Wide ? 4 : 3); }
  /// Of the four rows of its products.
  [[nodiscard]] static __device__ __forceinline__ int first_row(int lane) { return Wide ? (lane >> 3 & 1) * 4 : 0; }
  /// Of the warp's keys; its other ones are key_groups later each.
  [[nodiscard]] static __device__ __forceinline__ int own_key(int lane) {
    return (lane >> 2 & 1) * own_keys * key_groups + key_group(lane);
  }
};

template <class T, class Shape, class Scheduler>
class fma_mainloop : public mainloop<T, Shape, Scheduler> {
  using S = Shape;
  using base = mainloop<T, Shape, Scheduler>;
  using base::a_, base::lane_, base::warp_, base::stage_, base::slope_, base::row_position_;

 public:
  __device__ __forceinline__ fma_mainloop(const decode_args& args, const Scheduler& scheduler, char* shared)
      : base(args, scheduler, shared),
        probabilities_(device::shared_address(shared) + S::shared.exchange +
                       warp_ * S::warp_keys * decode_few_rows * 4),
        value_place_(
            device::kept(S::tile_bytes + S::place(warp_ * S::warp_keys + lane_ / value_lanes, lane_ % value_lanes))) {}

  __device__ __forceinline__ void begin(const work_tile& w, const decode_seq& s) {
    base::begin(w, s);
    wide_ = s.query_len * a_.group_size > 4;
    const int row = fma_row_of(lane_, wide_);
    const int token = a_.by_group_size.quotient(row);
    row_position_[0] = device::kept(s.seq_len - s.query_len + token);
    base::common_begin_ = device::kept(base::common_begin_);
    base::common_end_ = device::kept(base::common_end_);
    if (a_.alibi_slopes != nullptr) {
      slope_[0] = token < s.query_len
                      ? a_.alibi_slopes[w.head * a_.group_size + row - token * a_.group_size] * base::log2e
                      : 0.0f;
    }
    const int key = wide_ ? wide::key_group(lane_) : narrow::key_group(lane_);
    key_place_ = device::kept(S::place(warp_ * S::warp_keys + key, lane_ & 7));
    first_own_key_ = device::kept(warp_ * S::warp_keys + (wide_ ? wide::own_key(lane_) : narrow::own_key(lane_)));
  }

  /// Takes the queries of a work tile that has tiles, between `begin` and the first of them.
  __device__ __forceinline__ void take_queries() {
    device::cp_async_wait_group<S::stages - 2>();
    __syncthreads();
    const int first_row = wide_ ? wide::first_row(lane_) : 0;
    const std::uint32_t queries = base::queries_ + base::q_buffer_ * S::q_bytes;
#pragma unroll
    for (int v = 0; v < lane_vectors; ++v)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        query_[v][r] = device::load_shared_f32x4(queries + S::q_rows::place(first_row + r, (lane_ & 7) + 8 * v));
      }
  }

  /// Adds the next KV tile, which is number `tile` of the sequence, to the accumulators.
  __device__ __forceinline__ void process_tile(int tile, accumulators<S>& acc) {
    device::cp_async_wait_group<S::stages - 2>();
    __syncwarp();  // a warp loads the keys that it multiplies
    base::loader_.load_tile(base::free_stage());
    if (wide_) {
      compute_tile<wide>(tile, acc);
    } else {
      compute_tile<narrow>(tile, acc);
    }
    stage_ = base::next_stage();
  }

 private:
  using narrow = fma_lanes<S, false>;
  using wide = fma_lanes<S, true>;
  static constexpr int lane_vectors = S::row_vectors / 8;       // of a key's dims
  static constexpr int value_lanes = accumulators<S>::lanes;    // that share a row of V
  static constexpr int value_step = 32 / value_lanes;           // keys that the lanes have at once
  static constexpr int value_keys = S::warp_keys / value_step;  // of a lane
  static_assert(S::kv_rows::swizzled && S::row_vectors % 8 == 0 && S::padded);

  template <class Lanes>
  __device__ __forceinline__ void compute_tile(int tile, accumulators<S>& acc) const {
    const std::uint32_t k_base = base::stages_ + stage_ * S::stage_bytes;
    float s[Lanes::own_keys];
    compute_scores<Lanes>(s, k_base);
    // Of few rows there are registers for all of V before the probabilities are there.
    constexpr int early = Lanes::rows == 4 ? value_keys : value_keys / 2;
    float4 values[value_keys];
    load_values<0, early>(values, k_base);

    const int warp_key = tile * decode_tile_tokens + warp_ * S::warp_keys;
    const bool is_border = warp_key < base::common_begin_ || warp_key + S::warp_keys > base::common_end_;
    transform<Lanes>(s, tile * decode_tile_tokens + first_own_key_, is_border);
    follow_maximum<Lanes>(s, acc);

    const float m = acc.max == -INFINITY ? 0.0f : acc.max;
#pragma unroll
    for (int i = 0; i < Lanes::own_keys; ++i) {
      const float p = device::exp2_fast(s[i] - m);
      acc.sum += p;
      const int place = Lanes::own_key(lane_) * Lanes::rows + fma_row_of(lane_, Lanes::rows == 8);
      device::store_shared_4(probabilities_ + (place + i * Lanes::key_groups * Lanes::rows) * 4, __float_as_uint(p));
    }
    __syncwarp();
    load_values<early, value_keys>(values, k_base);
    add_values<Lanes>(values, acc);
  }

  // Products with the lane's keys of a row, and their sums over the eight lanes that share its dims: every step halves
  // what a lane has.
  template <class Lanes>
  __device__ __forceinline__ void compute_scores(float (&s)[Lanes::own_keys], std::uint32_t k_base) const {
    float sums[Lanes::keys][4] = {};
#pragma unroll
    for (int v = 0; v < lane_vectors; ++v)
#pragma unroll
      for (int i = 0; i < Lanes::keys; ++i) {
        const float4 k = device::load_shared_f32x4(key_address<Lanes>(k_base, i, v));
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          const float4& q = query_[v][r];
          sums[i][r] = fmaf(q.x, k.x, sums[i][r]);
          sums[i][r] = fmaf(q.y, k.y, sums[i][r]);
          sums[i][r] = fmaf(q.z, k.z, sums[i][r]);
          sums[i][r] = fmaf(q.w, k.w, sums[i][r]);
        }
      }
    float of_row_pairs[Lanes::own_keys][2];
#pragma unroll
    for (int i = 0; i < Lanes::own_keys; ++i) {
      float of_keys[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) of_keys[r] = keep_half<4>(sums[i][r], sums[i + Lanes::own_keys][r]);
#pragma unroll
      for (int r = 0; r < 2; ++r) of_row_pairs[i][r] = keep_half<2>(of_keys[r], of_keys[r + 2]);
    }
#pragma unroll
    for (int i = 0; i < Lanes::own_keys; ++i) s[i] = keep_half<1>(of_row_pairs[i][0], of_row_pairs[i][1]);
  }

  // A lane whose bit `Bit` is 0 keeps the first, the other the second, both with the other lane's added.
  template <int Bit>
  [[nodiscard]] __device__ __forceinline__ float keep_half(float first, float second) const {
    const bool keeps_second = (lane_ & Bit) != 0;
    const float other = __shfl_xor_sync(0xffffffffu, keeps_second ? first : second, Bit);
    return (keeps_second ? second : first) + other;
  }

  // Where the lane's vector v of its key i is, or zeros past the row's end.
  template <class Lanes>
  [[nodiscard]] __device__ __forceinline__ std::uint32_t key_address(std::uint32_t k_base, int i, int v) const {
    const int keys_later = i * Lanes::key_groups;
    const std::uint32_t first = (k_base + key_place_) ^ static_cast<std::uint32_t>((keys_later & 7) << 4);
    const std::uint32_t place = first + static_cast<std::uint32_t>(keys_later * S::kv_rows::bytes + v * 128);
    if (8 * v + 7 < S::least_row_vectors) return place;
    return (lane_ & 7) + 8 * v < S::vectors_of_row(a_) ? place : base::zeros_;
  }

  template <int Begin, int End>
  __device__ __forceinline__ void load_values(float4 (&values)[value_keys], std::uint32_t k_base) const {
#pragma unroll
    for (int i = Begin; i < End; ++i) {
      const int keys_later = i * value_step;
      const std::uint32_t first = (k_base + value_place_) ^ static_cast<std::uint32_t>((keys_later & 7) << 4);
      values[i] = device::load_shared_f32x4(first + static_cast<std::uint32_t>(keys_later * S::kv_rows::bytes));
    }
  }

  // Products to base-2 logits, of which those that the row does not attend to are −inf.
  template <class Lanes>
  __device__ __forceinline__ void transform(float (&s)[Lanes::own_keys], int first_key, bool is_border) const {
#pragma unroll
    for (int i = 0; i < Lanes::own_keys; ++i) s[i] *= a_.product_factor;
    if (a_.soft_cap > 0) {
#pragma unroll
      for (int i = 0; i < Lanes::own_keys; ++i) s[i] = a_.cap_log2e * device::tanh_fast(s[i]);
    }
    if (a_.alibi_slopes != nullptr) {
      const auto distance = static_cast<float>(first_key - row_position_[0]);
#pragma unroll
      for (int i = 0; i < Lanes::own_keys; ++i) {
        s[i] = fmaf(slope_[0], distance + static_cast<float>(i * Lanes::key_groups), s[i]);
      }
    }
    if (is_border) {
#pragma unroll
      for (int i = 0; i < Lanes::own_keys; ++i) {
        if (!base::visible(first_key + i * Lanes::key_groups, 0)) s[i] = -INFINITY;
      }
    }
  }

  // The lanes of a row need not exchange their maxima where none of them is a new one.
  template <class Lanes>
  __device__ __forceinline__ void follow_maximum(const float (&s)[Lanes::own_keys], accumulators<S>& acc) const {
    float largest = s[0];
#pragma unroll
    for (int i = 1; i < Lanes::own_keys; ++i) largest = fmaxf(largest, s[i]);
    if (!__any_sync(0xffffffffu, largest > acc.max)) return;
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 4));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 16));
    if (Lanes::rows == 4) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 8));
    const float shift = fmaxf(acc.max, largest);
    const float alpha = shift > acc.max ? device::exp2_fast(acc.max - shift) : 1.0f;
    acc.max = shift;
    acc.sum *= alpha;
#pragma unroll
    for (int r = 0; r < Lanes::rows; ++r) {
      const float of_row = __shfl_sync(0xffffffffu, alpha, fma_lane_of(r));
#pragma unroll
      for (int c = 0; c < 4; ++c) acc.out[r][c] *= of_row;
    }
  }

  // The tile's sums are added to the output as wholes: the error grows with the tiles, not with the keys.
  template <class Lanes>
  __device__ __forceinline__ void add_values(const float4 (&values)[value_keys], accumulators<S>& acc) const {
    const std::uint32_t first = probabilities_ + static_cast<std::uint32_t>(lane_ / value_lanes * Lanes::rows * 4);
    float sums[Lanes::rows][4] = {};
#pragma unroll
    for (int i = 0; i < value_keys; ++i) {
      const float4& v = values[i];
#pragma unroll
      for (int r = 0; r < Lanes::rows; r += 4) {
        const auto place = static_cast<std::uint32_t>((i * value_step * Lanes::rows + r) * 4);
        const float4 four = device::load_shared_f32x4(first + place);
        const float p[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float(&sum)[4] = sums[r + e];
          sum[0] = fmaf(p[e], v.x, sum[0]);
          sum[1] = fmaf(p[e], v.y, sum[1]);
          sum[2] = fmaf(p[e], v.z, sum[2]);
          sum[3] = fmaf(p[e], v.w, sum[3]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < Lanes::rows; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc.out[r][c] += sums[r][c];
  }

  std::uint32_t probabilities_;  // of this warp's keys, all rows of a key after one another
  std::uint32_t value_place_;    // in the stage: the lane's vector of its first key of V
  // Of the work tile.
  bool wide_;
  std::uint32_t key_place_;  // in the stage: the lane's first vector of its first key of K
  int first_own_key_;        // of the tile
  float4 query_[lane_vectors][4];
};

}  // namespace bifolio::inline v0_2::cuda::decode

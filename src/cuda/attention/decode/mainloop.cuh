// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The mainloop of decode: for each KV tile, scores by m16n8k16 products (float32: three products of TensorFloat-32),
/// softmax against a running maximum, and the weighted sum of values. The query heads of a KV head (and the few tokens
/// of a speculative step) are the 16 rows of the products, so that K and V are read once whatever the group. The warps
/// split the 64 keys of a tile; each has a running maximum, sum and output of its own, which the epilogue reduces.

#include <cstdint>
#include <type_traits>

#include "common/attention/visibility.hpp"
#include "cuda/attention/decode/loader.cuh"
#include "cuda/attention/decode/scheduler.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/sm80.cuh"
#include "cuda/device/static_loop.cuh"

namespace bifolio::inline v0_2::cuda::decode {

/// One warp's partial results of 16 rows. A lane has columns 2 · (lane % 4) and the next of every 8, of rows lane / 4
/// (i = 0) and lane / 4 + 8 (i = 1).
template <class Shape>
struct accumulators {
  static constexpr int row_groups = 2;
  float max[2];                  // of base-2 logits
  float sum[2];                  // this lane's share
  float out[Shape::n_tiles][4];  // [2 · i + column]

  __device__ __forceinline__ void clear(const decode_args& /*args*/) {
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

/// The same by ordinary multiplications (fma_mainloop.cuh): `max` and `sum` of the lane's own row, and four dims of the
/// output of each row. Where less than 32 lanes have all dims, a warp's output is the sum over the lanes of a dim.
template <class Shape>
requires(Shape::by_fma) struct accumulators<Shape> {
  static constexpr int row_groups = 1;
  static constexpr int lanes = Shape::head_dim / 4;
  float max;  // of base-2 logits
  float sum;  // this lane's share
  float out[decode_few_rows][4];

  __device__ __forceinline__ void clear(const decode_args&) {
    max = -INFINITY;
    sum = 0;
#pragma unroll
    for (int r = 0; r < decode_few_rows; ++r)
#pragma unroll
      for (int c = 0; c < 4; ++c) out[r][c] = 0;
  }
};

/// The row of a lane's `max` and `sum` in an output tile of more than four rows (`wide`) or up to four, and a lane that
/// has a row.
[[nodiscard]] __device__ __forceinline__ int fma_row_of(int lane, bool wide) {
  return (lane & 3) + (wide ? (lane >> 3 & 1) * 4 : 0);
}
[[nodiscard]] __device__ __forceinline__ constexpr int fma_lane_of(int row) { return (row & 3) + (row >> 2) * 8; }

template <class T, class Shape, class Scheduler>
class mainloop {
  using S = Shape;

 public:
  __device__ __forceinline__ mainloop(const decode_args& args, const Scheduler& scheduler, char* shared)
      : a_(args),
        stages_(device::shared_address(shared) + S::shared.stages),
        queries_(device::shared_address(shared) + S::shared.queries),
        zeros_(device::shared_address(shared) + S::shared.zeros),
        lane_(static_cast<int>(threadIdx.x) & 31),
        warp_(static_cast<int>(threadIdx.x) >> 5),
        loader_(args, scheduler, device::shared_address(shared)) {
    if (S::padded && threadIdx.x == 0) device::store_shared_zeros_16(zeros_);
  }

  __device__ __forceinline__ void prefetch_first_tile() const { loader_.prefetch_first_tile(); }
  __device__ __forceinline__ void fill_pipeline() { loader_.fill_pipeline(); }

  /// The accumulators are the caller's to clear, at its beginning and wherever the epilogue has taken them.
  __device__ __forceinline__ void begin(const work_tile& w, const decode_seq& s) {
    first_tile_ = w.tile;
    if (w.tile < w.tile_end) q_buffer_ = q_buffer_ + 1 == S::stages ? 0 : q_buffer_ + 1;
    seq_len_ = s.seq_len;
    query_len_ = s.query_len;
    // Keys from common_begin_ to common_end_ are visible to every row of the tile.
    const int offset = seq_len_ - query_len_;
    const int first_row = w.row_tile * decode_tile_rows;
    const int last_row = min(first_row + decode_tile_rows, query_len_ * a_.group_size) - 1;
    const int first_position = offset + a_.by_group_size.quotient(first_row);
    const int last_position = offset + a_.by_group_size.quotient(last_row);
    common_begin_ = a_.window_left >= 0 ? last_position - a_.window_left : 0;
    common_end_ = a_.causal ? min(seq_len_, first_position + 1) : seq_len_;
    if (a_.window_right >= 0) common_end_ = min(common_end_, first_position + a_.window_right + 1);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + lane_ / 4 + 8 * i;
      const int token = a_.by_group_size.quotient(row);
      row_position_[i] = offset + token;
      if (a_.alibi_slopes != nullptr) {
        const int head = w.head * a_.group_size + row - token * a_.group_size;
        slope_[i] = token < query_len_ ? a_.alibi_slopes[head] * log2e : 0.0f;
      }
    }
  }

  /// Adds the next KV tile, which is number `tile` of the sequence, to the accumulators.
  __device__ __forceinline__ void process_tile(int tile, accumulators<S>& acc) {
    wait_for_tile(tile);
    compute_tile(stage_, tile, q_buffer_, acc);
    stage_ = next_stage();
  }

  /// The stage of the previous tile: the next call of process_tile fills it, the epilogue may use it before.
  [[nodiscard]] __device__ __forceinline__ int free_stage() const { return stage_ == 0 ? S::stages - 1 : stage_ - 1; }

 protected:
  [[nodiscard]] __device__ __forceinline__ int next_stage() const { return stage_ + 1 == S::stages ? 0 : stage_ + 1; }

  // The tile is in stage_ when it is there; requests the one that comes into the free stage.
  __device__ __forceinline__ void wait_for_stage() {
    device::cp_async_wait_group<S::stages - 2>();
    __syncthreads();
    loader_.load_tile(free_stage());
  }
  __device__ __forceinline__ void wait_for_tile(int tile) {
    wait_for_stage();
    if (S::q_in_registers && tile == first_tile_) load_q(q_buffer_);
  }

  static constexpr float log2e = 1.4426950408889634f;
  static constexpr bool is_f32 = std::is_same_v<T, float>;
  // Probabilities as the product with V takes them.
  using fragment = std::conditional_t<is_f32, float, std::uint32_t>;
  static constexpr int values_per_fragment = is_f32 ? 1 : 2;

  // acc += a · b over 32 bytes of a row: 16 dims, or 8 of float32, as three products of TensorFloat-32 whose small part
  // goes to `rest`.
  __device__ __forceinline__ static void add_product(float (&acc)[4], float (&rest)[4], const std::uint32_t (&a)[4],
                                                     std::uint32_t b0, std::uint32_t b1) {
    if constexpr (is_f32) {
      device::tf32_pair pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = device::split_tf32(__uint_as_float(a[i]));
      device::mma_tf32x3(acc, rest, pairs, device::split_tf32(__uint_as_float(b0)),
                         device::split_tf32(__uint_as_float(b1)));
    } else {
      device::mma_m16n8k16<T>(acc, a, b0, b1);
    }
  }

  __device__ __forceinline__ void load_q_step(std::uint32_t (&q)[4], int buffer, int kk) const {
    const int row = (lane_ & 7) + ((lane_ >> 3) & 1) * 8;
    device::ldmatrix_x4(q, queries_ + buffer * S::q_bytes + S::q_rows::place(row, 2 * kk + (lane_ >> 4)));
  }
  __device__ __forceinline__ void load_q(int buffer) {
#pragma unroll
    for (int kk = 0; kk < (S::q_in_registers ? S::k_steps : 0); ++kk) load_q_step(q_[kk], buffer, kk);
  }

  [[nodiscard]] __device__ __forceinline__ bool visible_from(int position, int key) const {
    return attn::attends(key, position, seq_len_, a_.causal) &&
           attn::is_in_window(key, position, a_.window_left, a_.window_right);
  }
  [[nodiscard]] __device__ __forceinline__ bool visible(int key, int i) const {
    return visible_from(row_position_[i], key);
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

  // Where a vector of a row of K is, or zeros past the row's end. `vector` is at most `most`.
  template <int Most>
  [[nodiscard]] __device__ __forceinline__ std::uint32_t key_vector(std::uint32_t k_base, int row, int vector) const {
    const std::uint32_t place = k_base + S::place(row, vector);
    if constexpr (Most < S::least_row_vectors) return place;
    return vector < S::vectors_of_row(a_) ? place : zeros_;
  }

  // Scores of this warp's keys: s[n] has those of 8. `InOrder`: each is one sum over the dims.
  template <bool InOrder = false>
  __device__ __forceinline__ void compute_scores(float (&s)[S::key_tiles][4], std::uint32_t k_base,
                                                 int q_buffer) const {
    float rest[S::key_tiles][4];  // f32 only: small products, in sums of their own
#pragma unroll
    for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = rest[n][e] = 0;
    if constexpr (S::key_tiles == 2) {
      const int row = warp_ * 16 + (lane_ & 7) + ((lane_ >> 4) & 1) * 8;
      device::for_each_step<0, S::k_steps>([&](auto step) {
        constexpr int kk = decltype(step)::value;
        std::uint32_t b[4];
        std::uint32_t q[4];
        device::ldmatrix_x4(b, key_vector<2 * kk + 1>(k_base, row, 2 * kk + ((lane_ >> 3) & 1)));
        take_q(q, q_buffer, kk);
        add_product(s[0], rest[0], q, b[0], b[1]);
        add_product(s[1], rest[1], q, b[2], b[3]);
      });
    } else {
      // Even and odd steps are sums of their own: two chains of products, each half as long. Not where prefill has one.
      float odd_sums[4] = {};
      float(&odd)[4] = InOrder ? s[0] : odd_sums;
      const int row = warp_ * 8 + (lane_ & 7);
      device::for_each_step<0, S::k_steps / 2>([&](auto step) {
        constexpr int kk = 2 * decltype(step)::value;
        std::uint32_t b[4];
        std::uint32_t q[4];
        device::ldmatrix_x4(b, key_vector<2 * kk + 3>(k_base, row, 2 * kk + (lane_ >> 3)));
        take_q(q, q_buffer, kk);
        add_product(s[0], rest[0], q, b[0], b[1]);
        take_q(q, q_buffer, kk + 1);
        add_product(odd, rest[0], q, b[2], b[3]);
      });
      if constexpr (!InOrder) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[0][e] += odd[e];
      }
    }
    if constexpr (is_f32) {
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] += rest[n][e];
    }
  }

  // Adds this warp's probabilities times its rows of V.
  __device__ __forceinline__ void add_values(const fragment (&p)[S::key_tiles * 4 / values_per_fragment],
                                             std::uint32_t v_base, accumulators<S>& acc) const {
    if constexpr (is_f32) {
      // Of eight keys the even ones are columns 0 to 3 of the probabilities and rows 0 to 3 of V, the odd ones the
      // others: a lane then has its probabilities where the scores' product left them.
      const std::uint32_t dim_bytes = (lane_ >> 2 & 3) * 4;
      const int key = warp_ * S::warp_keys + (lane_ & 3) * 2;
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n) {
        device::tf32_pair a[4];
        a[0] = device::split_tf32(p[4 * n]);
        a[1] = device::split_tf32(p[4 * n + 2]);
        a[2] = device::split_tf32(p[4 * n + 1]);
        a[3] = device::split_tf32(p[4 * n + 3]);
#pragma unroll
        for (int j = 0; j < S::n_tiles; ++j) {
          const int vector = 2 * j + (lane_ >> 4);
          const float even = device::load_shared_f32(v_base + S::place(key + n * 8, vector) + dim_bytes);
          const float odd = device::load_shared_f32(v_base + S::place(key + n * 8 + 1, vector) + dim_bytes);
          // Added to the output by an ordinary addition, which rounds to the nearest: tensor cores truncate.
          float sum[4] = {};
          device::mma_tf32x3(sum, sum, a, device::split_tf32(even), device::split_tf32(odd));
#pragma unroll
          for (int e = 0; e < 4; ++e) acc.out[j][e] += sum[e];
        }
      }
    } else if constexpr (S::key_tiles == 2) {
      const int row = warp_ * 16 + (lane_ & 7) + ((lane_ >> 3) & 1) * 8;
#pragma unroll
      for (int j = 0; j < S::k_steps; ++j) {
        std::uint32_t b[4];
        device::ldmatrix_x4_trans(b, v_base + S::place(row, 2 * j + (lane_ >> 4)));
        device::mma_m16n8k16<T>(acc.out[2 * j], p, b[0], b[1]);
        device::mma_m16n8k16<T>(acc.out[2 * j + 1], p, b[2], b[3]);
      }
    } else {
      const int row = warp_ * 8 + (lane_ & 7);
#pragma unroll
      for (int j = 0; j < S::n_tiles; j += 4) {
        std::uint32_t b[4];
        device::ldmatrix_x4_trans(b, v_base + S::place(row, j + (lane_ >> 3)));
#pragma unroll
        for (int i = 0; i < 4; ++i) device::mma_m16n8k8<T>(acc.out[j + i], p[0], p[1], b[i]);
      }
    }
  }

  // Products to base-2 logits.
  __device__ __forceinline__ void transform_scores(float (&s)[S::key_tiles][4], int first_key) const {
#pragma unroll
    for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] *= a_.product_factor;
    if (a_.soft_cap > 0) {
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[n][e] = a_.cap_log2e * device::tanh_fast(s[n][e]);
    }
    if (a_.alibi_slopes != nullptr) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const auto distance = static_cast<float>(first_key + (lane_ & 3) * 2 - row_position_[i]);
#pragma unroll
        for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float& x = s[n][2 * i + e];
            x = fmaf(slope_[i], distance + static_cast<float>(n * 8 + e), x);
          }
      }
    }
  }

  // Scores of keys that a row does not attend to become −inf.
  __device__ __forceinline__ void mask_scores(float (&s)[S::key_tiles][4], int first_key) const {
    if (first_key >= common_begin_ && first_key + S::warp_keys <= common_end_) return;
#pragma unroll
    for (int n = 0; n < S::key_tiles; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (!visible(first_key + n * 8 + (lane_ & 3) * 2 + (e & 1), e >> 1)) s[n][e] = -INFINITY;
      }
  }

  // Scores of this warp's keys, softmax against the running maximum, and their share of the output.
  __device__ __forceinline__ void compute_tile(int stage, int tile, int q_buffer, accumulators<S>& acc) const {
    const std::uint32_t k_base = stages_ + stage * S::stage_bytes;
    float s[S::key_tiles][4];
    compute_scores(s, k_base, q_buffer);

    const int first_key = tile * decode_tile_tokens + warp_ * S::warp_keys;
    transform_scores(s, first_key);
    mask_scores(s, first_key);

    float largest[2];
    bool grows = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = fmaxf(s[0][2 * i], s[0][2 * i + 1]);
      if constexpr (S::key_tiles == 2) largest[i] = fmaxf(largest[i], fmaxf(s[1][2 * i], s[1][2 * i + 1]));
      grows = grows || largest[i] > acc.max[i];
    }
    // The lanes of a row need not exchange their maxima where none of them is a new one.
    if (__any_sync(0xffffffffu, grows)) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float shift = fmaxf(acc.max[i], max_of_row(largest[i]));
        const float alpha = shift > acc.max[i] ? device::exp2_fast(acc.max[i] - shift) : 1.0f;
        acc.max[i] = shift;
        acc.sum[i] *= alpha;
#pragma unroll
        for (int n = 0; n < S::n_tiles; ++n) {
          acc.out[n][2 * i] *= alpha;
          acc.out[n][2 * i + 1] *= alpha;
        }
      }
    }
    fragment p[S::key_tiles * 4 / values_per_fragment];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float m = acc.max[i] == -INFINITY ? 0.0f : acc.max[i];
#pragma unroll
      for (int n = 0; n < S::key_tiles; ++n) {
        const float p0 = device::exp2_fast(s[n][2 * i] - m);
        const float p1 = device::exp2_fast(s[n][2 * i + 1] - m);
        acc.sum[i] += p0 + p1;
        if constexpr (is_f32) {
          p[4 * n + 2 * i] = p0;
          p[4 * n + 2 * i + 1] = p1;
        } else {
          p[2 * n + i] = device::pack<T>(p0, p1);
        }
      }
    }
    add_values(p, k_base + S::tile_bytes, acc);
  }

  // Over the lanes of a row.
  [[nodiscard]] __device__ __forceinline__ static float max_of_row(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
  }

  const decode_args& a_;
  std::uint32_t stages_, queries_, zeros_;
  int lane_, warp_;
  loader<T, Shape, Scheduler> loader_;
  int stage_ = 0;
  int q_buffer_ = S::stages - 1;

  // Of the work tile.
  int first_tile_;
  int seq_len_, query_len_;
  int common_begin_, common_end_;
  int row_position_[2];
  float slope_[2];
  std::uint32_t q_[S::q_in_registers ? S::k_steps : 1][4];
};

}  // namespace bifolio::inline v0_2::cuda::decode

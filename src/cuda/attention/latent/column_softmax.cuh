// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Masks and the online softmax of the latent kernels whose products are transposed: keys are the 64 rows of the tensor
/// cores, query rows the columns, and a consumer warpgroup has tiles of keys of its own.

#include <cstdint>

#include "cuda/attention/latent/pipeline.cuh"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/scheduler.cuh"
#include "cuda/attention/prefill/softmax.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm90.cuh"
#include "cuda/device/sm90_narrow.cuh"

namespace bifolio::inline v0_2::cuda::latent {

/// A thread's query rows, columns of the products: of each 8 two neighbours.
struct column_state {
  int position[column_rows::columns];  // of the token in the sequence
  float max[column_rows::columns];     // of scores; when all keys are done, of base-2 logits
  float sum[column_rows::columns];     // this thread's share

  [[nodiscard]] __device__ __forceinline__ static int row_of(int column) {
    return column / 2 * 8 + (static_cast<int>(threadIdx.x) & 3) * 2 + column % 2;
  }
  __device__ __forceinline__ void begin(const prefill_args& a, const prefill_work_tile& work) {
#pragma unroll
    for (int c = 0; c < column_rows::columns; ++c) {
      position[c] = work.seq_len - work.query_len + work.row_tile * a.tokens_per_warpgroup + row_of(c) / a.packed_heads;
      max[c] = -INFINITY;
      sum[c] = 0;
    }
  }
};

template <class Shape>
class column_softmax {
  using S = Shape;

 public:
  /// Dims of V by 64, then as the tensor cores have them.
  using out_array = float[S::value_chunks][S::score_registers];

  __device__ __forceinline__ column_softmax(const prefill_args& args, const shared_stages<Shape>& stages, int warpgroup,
                                            int thread)
      : a_(args),
        stages_(stages),
        scale_(args.scale * prefill::log2e),
        warpgroup_(warpgroup),
        thread_(thread),
        warp_(thread / 32),
        lane_(thread & 31) {}

 protected:
  using score_array = float[S::score_registers];

  // The key of score register j, from the tile's first.
  [[nodiscard]] __device__ __forceinline__ int key_of(int j) const { return warp_ * 16 + lane_ / 4 + (j & 2) * 4; }
  [[nodiscard]] __device__ __forceinline__ static constexpr int column_of(int j) { return j / 4 * 2 + (j & 1); }

  // Scores of keys that a row does not attend to become −inf, in tiles where there are any.
  __device__ __forceinline__ void mask(score_array& s, int tile, const prefill::kv_range& e,
                                       const column_state& rows) const {
    const int first_key = tile * S::tile_keys;
    if (first_key + S::tile_keys <= e.common_limit && first_key >= e.common_begin) return;
#pragma unroll
    for (int j = 0; j < S::score_registers; ++j) {
      const int position = rows.position[column_of(j)];
      int end = a_.causal ? min(e.seq_len, position + 1) : e.seq_len;
      if (a_.window_right >= 0) end = min(end, position + a_.window_right + 1);
      const int begin = a_.window_left >= 0 ? position - a_.window_left : 0;
      const int key = first_key + key_of(j);
      if (key >= end || key < begin) s[j] = -INFINITY;
    }
  }

  // Scores become probabilities against the running maximum, which follows only where a score is more than max_slack
  // above it, as in prefill. `rises`: something else asks for `raise`, which all threads of the warpgroup call where
  // one thread asks for it.
  template <class Raise>
  __device__ __forceinline__ void softmax(score_array& s, column_state& rows, out_array& o, bool rises,
                                          const Raise& raise) {
    float m[S::columns];  // of this thread
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
      const int j = c / 2 * 4 + c % 2;
      m[c] = fmaxf(s[j], s[j + 2]);
      rises = rises || (m[c] - rows.max[c]) * scale_ > prefill::max_slack;
    }
    // Nobody is in the products of the tile before any more.
    if (device::named_barrier_any(own_barrier + warpgroup_, 128, rises)) {
      raise_maxima(m, rows, o);
      raise();
    }
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
      const int j = c / 2 * 4 + c % 2;
      const float shift = rows.max[c] == -INFINITY ? 0.0f : rows.max[c] * scale_;
      s[j] = device::exp2_fast(fmaf(s[j], scale_, -shift));
      s[j + 2] = device::exp2_fast(fmaf(s[j + 2], scale_, -shift));
      rows.sum[c] += s[j] + s[j + 2];
    }
  }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t probabilities() const {
    return stages_.probabilities() + warpgroup_ * S::probability_bytes;
  }
  // Writes probabilities as an operand: rows of 64 keys, 128 bytes in the swizzle. `p`: of rows
  // 8 · (i / 2) … + 7, keys 8 · (i % 2) … + 7 of the warp's 16.
  __device__ __forceinline__ void store_probabilities(std::uint32_t to, const std::uint32_t (&p)[4]) const {
    const int row = lane_ / 16 * 8 + (lane_ & 7);
    const int piece = warp_ * 2 + (lane_ / 8 & 1);
    device::store_matrices_transposed(to + row * 128 + ((piece ^ (row & 7)) * 16), p);
  }

  const prefill_args& a_;
  const shared_stages<Shape>& stages_;
  float scale_;
  int warpgroup_, thread_, warp_, lane_;

 private:
  // Lets each row's maximum follow its largest score of the tile, and older results it.
  __device__ void raise_maxima(float (&m)[S::columns], column_state& rows, out_array& o) {
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) m[c] = fmaxf(m[c], __shfl_xor_sync(0xffffffffu, m[c], lanes));
      if (lane_ < 4) store_shared_f32(of_warp(warp_, column_state::row_of(c)), m[c]);
    }
    device::named_barrier_sync(own_barrier + warpgroup_, 128);
    float rescale[S::columns];
#pragma unroll
    for (int c = 0; c < S::columns; ++c) {
      float top = -INFINITY;
#pragma unroll
      for (int warp = 0; warp < 4; ++warp) {
        top = fmaxf(top, device::load_shared_f32(of_warp(warp, column_state::row_of(c))));
      }
      rescale[c] = 1.0f;
      if ((top - rows.max[c]) * scale_ > prefill::max_slack) {
        rescale[c] = device::exp2_fast((rows.max[c] - top) * scale_);
        rows.max[c] = top;
      }
      rows.sum[c] *= rescale[c];
    }
#pragma unroll
    for (int chunk = 0; chunk < S::value_chunks; ++chunk) {
#pragma unroll
      for (int j = 0; j < S::score_registers; ++j) o[chunk][j] *= rescale[column_of(j)];
    }
  }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t of_warp(int warp, int row) const {
    return stages_.maxima() + ((warpgroup_ * 4 + warp) * S::rows + row) * 4;
  }
};

}  // namespace bifolio::inline v0_2::cuda::latent

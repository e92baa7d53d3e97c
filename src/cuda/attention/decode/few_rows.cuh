// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The output of decode over codes where an output tile has at most eight rows of queries (decode_few_rows). Its
/// product is transposed: 16 dims of V are the rows of the products and the queries the columns, so that nothing is
/// padded to 16. That is half of the products, of the softmax and of the outputs' registers. Probabilities are where
/// the scores' product, whose left factor are the queries, leaves them. Every element is the sum of the same products
/// in the same order as with queries in rows, so no bit depends on which form computes it.
///
/// Of the scores, a lane has row lane / 4. Of the output it has rows 2 · (lane % 4) and the next: `out[n][2 · i + r]`
/// is of row 2 · (lane % 4) + r and dim 2 · (lane / 4) + i of 16, because a register of V holds two neighbouring dims
/// of two neighbouring tokens.

#include <cstdint>

#include "cuda/attention/decode/coded_rows.cuh"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/device/code_pairs.cuh"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/sm80.cuh"

namespace bifolio::inline v0_2::cuda::decode {

static_assert(decode_few_rows == 8);

/// What does not change from tile to tile.
template <bool FewRows>
struct few_rows_constants {};
template <>
struct few_rows_constants<true> {
  int variant;                           // 2 · (0 e4m3, 1 e5m2, 2 i8), and 1 more with scales per token
  int transforms_logits;                 // 0 or 1
  std::uint32_t key_place, value_place;  // in the stage: what the lane's first ldmatrix of K and of V reads
};

/// V's tokens of a warp as they are stored.
template <class Shape>
struct few_rows_values {
  static constexpr int load_vectors = 4 / Shape::key_tiles;
  static constexpr int loads = (Shape::row_vectors + load_vectors - 1) / load_vectors;
  static constexpr int fragment = 2 * Shape::key_tiles;  // registers of 16 dims
  static constexpr bool last_is_whole = Shape::row_vectors % load_vectors == 0;
  static_assert(last_is_whole || (Shape::key_tiles == 1 && Shape::row_vectors % load_vectors == 2));
  std::uint32_t load[loads][4];

  /// What a lane's first ldmatrix reads, from the beginning of V's tile.
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t place(int warp, int lane) {
    if constexpr (Shape::key_tiles == 2) {
      return Shape::place(warp * 16 + (lane & 7) + (lane >> 3 & 1) * 8, lane >> 4);
    } else {
      return Shape::place(warp * 8 + (lane & 7), lane >> 3);
    }
  }
  __device__ __forceinline__ void read(std::uint32_t first) {
#pragma unroll
    for (int j = 0; j < loads; ++j) {
      const std::uint32_t at = Shape::kv_rows::vectors_later(first, j * load_vectors);
      if (j + 1 < loads || last_is_whole) {
        device::ldmatrix_x4_trans(load[j], at);
      } else {
        device::ldmatrix_x2_trans(load[j][0], load[j][1], at);  // what follows the row is another warp's
      }
    }
  }
  /// out += V's transpose · p. Even dims of a vector, then its odd ones, are the rows.
  template <class Pairs>
  __device__ __forceinline__ void multiply(const Pairs& pairs, const std::uint32_t (&p)[Shape::key_tiles],
                                           float (&out)[Shape::row_vectors][4]) const {
    std::uint32_t a[Shape::row_vectors][fragment];
#pragma unroll
    for (int j = 0; j < Shape::row_vectors; ++j) {
#pragma unroll
      for (int i = 0; i < Shape::key_tiles; ++i) {
        const device::half_pairs both =
            pairs.alternate(load[j / load_vectors][j % load_vectors * Shape::key_tiles + i]);
        a[j][2 * i] = both.first;
        a[j][2 * i + 1] = both.second;
      }
    }
#pragma unroll
    for (int j = 0; j < Shape::row_vectors; ++j) {
      if constexpr (Shape::key_tiles == 2) {
        device::mma_m16n8k16<__half>(out[j], a[j], p[0], p[1]);
      } else {
        device::mma_m16n8k8<__half>(out[j], a[j][0], a[j][1], p[0]);
      }
    }
  }
};

/// Of a value that lanes have for row lane / 4, that of row 2 · (lane % 4) + r.
[[nodiscard]] __device__ __forceinline__ float of_output_row(float x, int lane, int r) {
  return __shfl_sync(0xffffffffu, x, 8 * (lane & 3) + 4 * r);
}

}  // namespace bifolio::inline v0_2::cuda::decode

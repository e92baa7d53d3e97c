// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Tile sizes and shared memory of decode on x_split, for launcher and kernel alike, and who a thread is.

#include <cstddef>
#include <cstdint>

#include "cuda/attention/x_split/args.hpp"
#include "cuda/attention/x_split/products.cuh"

namespace bifolio::inline v0_2::cuda {

/// Tile sizes and shared memory of one kernel. Product: tensor_core_product or float_product.
template <class Element, int Dims, template <class> class ProductOf>
struct x_split_shape {
  using T = Element;
  using product = ProductOf<T>;
  using operand = typename product::operand;
  static constexpr int head_dim = Dims;
  static constexpr int vec = 16 / sizeof(T);
  static constexpr int chunks = x_split_positions / vec;  ///< of a partition
  static constexpr int ctas_per_sm = x_split_ctas_per_sm(head_dim);
  /// Each owns 16 dims of the output, or two times 16.
  static constexpr int warps = 16 / ctas_per_sm;
  static constexpr int threads = warps * 32;
  static constexpr int dim_tiles = head_dim / 16 / warps;
  static constexpr int max_heads = x_split_max_heads(product::on_tensor_cores);
  static constexpr int head_tiles = max_heads / product_heads;

  // Loads of 16 bytes in flight per lane, as many as there are registers for. A product takes two rows of 16 bytes
  // each.
  static constexpr int loads = product::on_tensor_cores ? 16 : 8;
  static constexpr int k_chunks = head_dim / vec / 4;  ///< of a token and lane
  static constexpr int k_batch = k_chunks < loads / 2 ? k_chunks : loads / 2;
  static constexpr int k_tiles = product::on_tensor_cores ? loads / 2 / k_batch : 1;
  static constexpr int v_step = 4 * vec;  ///< positions that a product sums over
  static constexpr int v_batch = loads / 2 / dim_tiles;

  /// Positions whose weights are computed by one warp at a time, four per lane.
  static constexpr int section = 128;
  static constexpr int sections = x_split_positions / section;

  // Shared memory. A pitch of 64 bytes more than a multiple of 128 lets eight lanes of two rows read 16 bytes each
  // from different banks; 4 floats more than a multiple of 32 lets a warp store 8 tokens of 4 heads.
  static constexpr int q_pitch = head_dim + 64 / static_cast<int>(sizeof(operand));
  static constexpr int logit_pitch = x_split_positions + 4;
  /// Weights take the place of the logits where they are of the same type.
  static constexpr int weight_pitch =
      product::on_tensor_cores ? x_split_positions + 64 / static_cast<int>(sizeof(operand)) : logit_pitch;
  struct chunk_offsets {
    std::int64_t k;
    std::int64_t v;
  };
  struct per_head {
    float maxima[warps];
    float sums[sections];
    float slope;
  };
  /// Heads in whole products.
  [[nodiscard]] static constexpr std::int32_t rows_of(std::int32_t num_heads) noexcept {
    return (num_heads + product_heads - 1) / product_heads * product_heads;
  }
  /// Bytes from the start of the CTA's shared memory, for a CTA with `num_heads` query heads.
  struct shared_layout {
    std::size_t offsets;  ///< chunk_offsets [2][chunks]
    std::size_t q;        ///< operand [rows][q_pitch]
    std::size_t logits;   ///< float [rows][logit_pitch]
    std::size_t weights;  ///< operand [rows][weight_pitch]
    std::size_t heads;    ///< per_head [rows]
    std::size_t bytes;    ///< of everything
  };
  [[nodiscard]] static constexpr shared_layout make_shared_layout(std::int32_t num_heads) noexcept {
    const auto rows = static_cast<std::size_t>(rows_of(num_heads));
    shared_layout l = {};
    l.q = l.offsets + 2 * chunks * sizeof(chunk_offsets);
    l.logits = l.q + rows * q_pitch * sizeof(operand);
    const std::size_t after_logits = l.logits + rows * logit_pitch * sizeof(float);
    l.weights = product::on_tensor_cores ? after_logits : l.logits;
    l.heads = after_logits + (product::on_tensor_cores ? rows * weight_pitch * sizeof(operand) : 0);
    l.bytes = l.heads + rows * sizeof(per_head);
    return l;
  }

  static_assert(k_chunks % k_batch == 0 && x_split_positions % (v_step * v_batch) == 0 && section % v_step == 0);
  static_assert(x_split_positions % (16 * k_tiles) == 0 && chunks <= threads && dim_tiles <= 4);
  static_assert(dim_tiles * warps * 16 == head_dim);
};

namespace x_split {

[[nodiscard]] __device__ __forceinline__ int thread() { return static_cast<int>(threadIdx.x); }
[[nodiscard]] __device__ __forceinline__ int lane() { return thread() % 32; }
[[nodiscard]] __device__ __forceinline__ int warp() { return thread() / 32; }
/// The lane's place in a product: row (and row + 8) of 16, chunk of 4.
[[nodiscard]] __device__ __forceinline__ int lane_row() { return lane() / 4; }
[[nodiscard]] __device__ __forceinline__ int lane_chunk() { return lane() % 4; }
/// The output dim of row 8 · r + lane_row() of this warp's tile.
template <class Shape>
[[nodiscard]] __device__ __forceinline__ int dim_of(int tile, int r) {
  return (warp() * Shape::dim_tiles + tile) * 16 + 8 * r + lane_row();
}

/// Maximum and sum of a head over a partition, or over several.
struct head_state {
  float m;
  float l;
};
/// Values of this lane: dims are the products' rows, heads their columns.
template <class Shape>
struct row_values {
  float at[Shape::dim_tiles][Shape::head_tiles][4];
};

}  // namespace x_split
}  // namespace bifolio::inline v0_2::cuda

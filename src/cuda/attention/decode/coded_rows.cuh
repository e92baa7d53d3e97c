// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What decode over codes adds to the mainloop: queries and products with rows of 8-bit codes, which become float16 in
/// registers, between shared memory and the tensor cores.
///
/// A register of `ldmatrix` holds four neighbouring dims of a key, where the product wants dims 2c, 2c + 1, 2c + 8 and
/// 2c + 9 of 16. So queries are put into the order of the keys, once, and the sum is that of the same 16 products.
///
/// The product with V is transposed: 16 dims of V are its rows and a group of eight queries its columns, so that where
/// an output tile has one group nothing is padded to 16, and two groups share what V becomes. Probabilities are where
/// the scores' product, whose left factor are the queries, leaves them.
///
/// Of the scores, a lane has row lane / 4 of each group. Of the output it has rows 2 · (lane % 4) and the next:
/// `out[g][n][2 · i + r]` is of group g, row 2 · (lane % 4) + r and dim 2 · (lane / 4) + i of 16, because a register of
/// V holds two neighbouring dims of two neighbouring tokens.

#include <cstdint>
#include <type_traits>

#include "cuda/attention/decode/args.hpp"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/attention/query_powers.cuh"
#include "cuda/device/code_pairs.cuh"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"
#include "cuda/device/static_loop.cuh"
#include "cuda/device/zero_codes.cuh"

namespace bifolio::inline v0_2::cuda::decode {

/// What belongs to the rows of queries that are in shared memory as float16.
struct coded_query_rows {
  float factors[decode_tile_rows];  // from products to base-2 logits or, with a soft cap, to arguments of tanh
  float sums[decode_tile_rows];     // of the elements where K has zero points, else 0
};
static_assert(decode_few_rows == 8 && decode_tile_rows == 2 * decode_few_rows);
static_assert(sizeof(coded_query_rows) <= coded_query_rows_bytes);

/// Puts 16 rows of queries in shared memory into the order of the keys and makes float16 of them. `static_scale`: of K
/// and this KV head. Barriers before and after are the caller's.
template <class Shape>
__device__ __forceinline__ void prepare_queries(const decode_args& a, std::uint32_t queries, float static_scale,
                                                coded_query_rows& rows) {
  using format = typename Shape::q_rows;
  constexpr int row_threads = Shape::threads / decode_tile_rows;  // of a warp
  constexpr int groups = Shape::k_steps;                          // of 16 dims
  constexpr int own_groups = (groups + row_threads - 1) / row_threads;
  const int row = static_cast<int>(threadIdx.x) / row_threads;
  const int first_group = static_cast<int>(threadIdx.x) % row_threads;
  const bool is_bf16 = a.q_type == dtype::bf16;

  std::uint32_t words[own_groups][8];
  std::uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < own_groups; ++i) {
    const int group = first_group + i * row_threads;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4 four = make_uint4(0, 0, 0, 0);
      if (group < groups) four = device::load_shared_16(queries + format::place(row, 2 * group + half));
      words[i][4 * half] = four.x;
      words[i][4 * half + 1] = four.y;
      words[i][4 * half + 2] = four.z;
      words[i][4 * half + 3] = four.w;
    }
#pragma unroll
    for (int w = 0; w < 8; ++w) largest = larger_magnitude(largest, words[i][w]);
  }
  query_power power;
  if (is_bf16) {
#pragma unroll
    for (int step = 1; step < row_threads; step *= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    }
    power = query_power(largest);
#pragma unroll
    for (int i = 0; i < own_groups; ++i) {
#pragma unroll
      for (int w = 0; w < 8; ++w) words[i][w] = power.divide(words[i][w]);
    }
  }
#pragma unroll
  for (int i = 0; i < own_groups; ++i) {
    const int group = first_group + i * row_threads;
    if (group >= groups) continue;
    device::store_shared_16(queries + format::place(row, 2 * group),
                            make_uint4(words[i][0], words[i][2], words[i][4], words[i][6]));
    device::store_shared_16(queries + format::place(row, 2 * group + 1),
                            make_uint4(words[i][1], words[i][3], words[i][5], words[i][7]));
  }
  if (first_group == 0) rows.factors[row] = a.product_factor * static_scale * power.value();
  float sum = 0;
  if (a.k_type == dtype::u8) {
#pragma unroll
    for (int i = 0; i < own_groups; ++i) {
#pragma unroll
      for (int w = 0; w < 8; ++w) sum += device::sum_of_halves(words[i][w]);  // zeros where there is no group
    }
#pragma unroll
    for (int step = 1; step < row_threads; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  }
  if (first_group == 0) rows.sums[row] = sum;
}

/// Of the 8-key tiles of a warp, what is taken from codes of u8: in K that of key lane / 4, in V those of two tokens.
template <class Shape>
struct u8_origins {
  std::uint32_t pairs[Shape::key_tiles];
};
/// The pairs of key tile n.
template <class Pairs>
[[nodiscard]] __device__ __forceinline__ const Pairs& pairs_of_tile(const Pairs& pairs, int /*n*/) {
  return pairs;
}
template <class Shape>
[[nodiscard]] __device__ __forceinline__ device::u8_pairs pairs_of_tile(const u8_origins<Shape>& origins, int n) {
  return {origins.pairs[n]};
}

/// s += queries · keys of codes, for the keys of a warp. `key_address(first)`: what the lane reads of vector `first` of
/// the keys and those after it. `take_q(q, kk)`: step kk of the queries.
template <class Shape, class Pairs, class KeyAddress, class TakeQ>
__device__ __forceinline__ void add_coded_scores(const Pairs& pairs, float (&s)[Shape::key_tiles][4],
                                                 const KeyAddress& key_address, const TakeQ& take_q) {
  constexpr int loads = (Shape::row_vectors * Shape::key_tiles + 3) / 4;
  constexpr int load_vectors = 4 / Shape::key_tiles;
  std::uint32_t b[loads][4];
  device::for_each_step<0, loads>([&](auto step) {
    constexpr int load = decltype(step)::value;
    device::ldmatrix_x4(b[load], key_address(std::integral_constant<int, load_vectors * load>{}));
  });
  // Of single key tiles, even and odd steps are sums of their own, as they are without codes.
  float odd[4] = {};
#pragma unroll
  for (int kk = 0; kk < Shape::k_steps; ++kk) {
    std::uint32_t q[4];
    take_q(q, kk);
    const std::uint32_t(&from)[4] = b[kk / load_vectors];
    const device::half_pairs first = pairs_of_tile(pairs, 0).neighbours(from[kk % load_vectors]);
    if constexpr (Shape::key_tiles == 2) {
      const device::half_pairs second = pairs_of_tile(pairs, 1).neighbours(from[2 + kk % load_vectors]);
      device::mma_m16n8k16<__half>(s[0], q, first.first, first.second);
      device::mma_m16n8k16<__half>(s[1], q, second.first, second.second);
    } else {
      device::mma_m16n8k16<__half>(kk % 2 == 0 ? s[0] : odd, q, first.first, first.second);
    }
  }
  if constexpr (Shape::key_tiles == 1) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[0][e] += odd[e];
  }
}

/// V's tokens of a warp as they are stored.
template <class Shape>
struct coded_values {
  using pair = std::uint32_t;  // of probabilities
  static constexpr int load_vectors = 4 / Shape::key_tiles;
  static constexpr int loads = (Shape::row_vectors + load_vectors - 1) / load_vectors;
  static constexpr int fragment = 2 * Shape::key_tiles;  // registers of 16 dims
  static constexpr bool last_is_whole = Shape::row_vectors % load_vectors == 0;
  static_assert(last_is_whole || (Shape::key_tiles == 1 && Shape::row_vectors % load_vectors == 2));
  std::uint32_t load[loads][4];

  [[nodiscard]] static __device__ __forceinline__ pair pair_of(float p0, float p1) {
    return device::pack<__half>(p0, p1);
  }
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
  __device__ __forceinline__ void multiply(const Pairs& pairs,
                                           const std::uint32_t (&p)[Shape::row_groups][Shape::key_tiles],
                                           float (&out)[Shape::row_groups][Shape::row_vectors][4]) const {
    std::uint32_t a[Shape::row_vectors][fragment];
#pragma unroll
    for (int j = 0; j < Shape::row_vectors; ++j) {
#pragma unroll
      for (int i = 0; i < Shape::key_tiles; ++i) {
        const device::half_pairs both =
            pairs_of_tile(pairs, i).alternate(load[j / load_vectors][j % load_vectors * Shape::key_tiles + i]);
        a[j][2 * i] = both.first;
        a[j][2 * i + 1] = both.second;
      }
    }
#pragma unroll
    for (int j = 0; j < Shape::row_vectors; ++j) {
#pragma unroll
      for (int g = 0; g < Shape::row_groups; ++g) {
        if constexpr (Shape::key_tiles == 2) {
          device::mma_m16n8k16<__half>(out[g][j], a[j], p[g][0], p[g][1]);
        } else {
          device::mma_m16n8k8<__half>(out[g][j], a[j][0], a[j][1], p[g][0]);
        }
      }
    }
  }
};

/// The same of V in 16 bits, in which it is multiplied: `out[g][n][2 · i + r]` is of dim lane / 4 + 8 · i of 16.
template <class Shape>
struct wide_values {
  using pair = float2;
  static constexpr int loads = Shape::row_vectors * Shape::key_tiles / 2;
  static constexpr int load_vectors = 4 / Shape::key_tiles;  // of 8 dims
  std::uint32_t load[loads][4];

  [[nodiscard]] static __device__ __forceinline__ pair pair_of(float p0, float p1) { return make_float2(p0, p1); }
  [[nodiscard]] static __device__ __forceinline__ std::uint32_t place(int warp, int lane) {
    if constexpr (Shape::key_tiles == 2) {
      return Shape::v_rows::place(warp * 16 + (lane & 7) + (lane >> 4) * 8, lane >> 3 & 1);
    } else {
      return Shape::v_rows::place(warp * 8 + (lane & 7), lane >> 3);
    }
  }
  __device__ __forceinline__ void read(std::uint32_t first) {
#pragma unroll
    for (int j = 0; j < loads; ++j) {
      device::ldmatrix_x4_trans(load[j], Shape::v_rows::vectors_later(first, j * load_vectors));
    }
  }
  /// `Type`: V's.
  template <class Type>
  __device__ __forceinline__ void multiply(std::type_identity<Type> /*of_v*/,
                                           const pair (&p)[Shape::row_groups][Shape::key_tiles],
                                           float (&out)[Shape::row_groups][Shape::row_vectors][4]) const {
#pragma unroll
    for (int g = 0; g < Shape::row_groups; ++g) {
      std::uint32_t b[Shape::key_tiles];
#pragma unroll
      for (int n = 0; n < Shape::key_tiles; ++n) b[n] = device::pack<Type>(p[g][n].x, p[g][n].y);
#pragma unroll
      for (int j = 0; j < Shape::row_vectors; ++j) {
        if constexpr (Shape::key_tiles == 2) {
          device::mma_m16n8k16<Type>(out[g][j], load[j], b[0], b[1]);
        } else {
          const std::uint32_t(&from)[4] = load[j / 2];
          device::mma_m16n8k8<Type>(out[g][j], from[j % 2 * 2], from[j % 2 * 2 + 1], b[0]);
        }
      }
    }
  }
};
template <class Shape>
using values_of = std::conditional_t<Shape::has_wide_values, wide_values<Shape>, coded_values<Shape>>;

/// Of a value that lanes have for row lane / 4 of a group, that of row 2 · (lane % 4) + r.
[[nodiscard]] __device__ __forceinline__ float of_output_row(float x, int lane, int r) {
  return __shfl_sync(0xffffffffu, x, 8 * (lane & 3) + 4 * r);
}

}  // namespace bifolio::inline v0_2::cuda::decode

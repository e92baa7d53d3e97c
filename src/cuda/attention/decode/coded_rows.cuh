// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What decode over codes adds to the mainloop: queries and products with rows of 8-bit codes, which become float16 in
/// registers, between shared memory and the tensor cores.
///
/// A register of `ldmatrix` holds four neighbouring dims of a key, where the product wants dims 2c, 2c + 1, 2c + 8 and
/// 2c + 9 of 16. So queries are put into the order of the keys, once, and the sum is that of the same 16 products.
/// Transposed, it holds two neighbouring dims of two neighbouring tokens: even and odd dims of V become two products.
/// Their columns are then dims 2c and 2c + 2 of each 16, which `first_of_four` puts right.

#include <cstdint>
#include <type_traits>

#include "cuda/attention/decode/args.hpp"
#include "cuda/attention/decode/shape.hpp"
#include "cuda/attention/query_powers.cuh"
#include "cuda/attention/value_units.cuh"
#include "cuda/device/code_pairs.cuh"
#include "cuda/device/float16_types.cuh"
#include "cuda/device/shared_vectors.cuh"
#include "cuda/device/sm80.cuh"

namespace bifolio::inline v0_2::cuda::decode {

/// Calls body(std::integral_constant<int, i>) for i in [Begin, End).
template <int Begin, int End, class Body>
__device__ __forceinline__ void for_each_step(const Body& body) {
  if constexpr (Begin < End) {
    body(std::integral_constant<int, Begin>{});
    for_each_step<Begin + 1, End>(body);
  }
}

/// What belongs to the rows of queries that are in shared memory as float16.
struct coded_query_rows {
  float factors[decode_tile_rows];  // from products to base-2 logits or, with a soft cap, to arguments of tanh
  float static_scale;               // of K and this KV head
};
static_assert(sizeof(coded_query_rows) <= coded_query_rows_bytes);

/// Puts 16 rows of queries in shared memory into the order of the keys and makes float16 of them. Barriers before and
/// after are the caller's.
template <class Shape>
__device__ __forceinline__ void prepare_queries(const decode_args& a, std::uint32_t queries, coded_query_rows& rows) {
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
  if (first_group == 0) rows.factors[row] = a.product_factor * rows.static_scale * power.value();
}

/// s += queries · keys of codes, for the keys of a warp. `key_address(row, low, first)`: where vector first + low of a
/// row is, of which `low` depends on the lane. `take_q(q, kk)`: step kk of the queries.
template <class Shape, class Pairs, class KeyAddress, class TakeQ>
__device__ __forceinline__ void add_coded_scores(const Pairs& pairs, float (&s)[Shape::key_tiles][4], int warp,
                                                 int lane, const KeyAddress& key_address, const TakeQ& take_q) {
  constexpr int loads = (Shape::row_vectors * Shape::key_tiles + 3) / 4;
  constexpr int load_vectors = 4 / Shape::key_tiles;
  const int row = Shape::key_tiles == 2 ? warp * 16 + (lane & 7) + ((lane >> 4) & 1) * 8 : warp * 8 + (lane & 7);
  const int low = Shape::key_tiles == 2 ? (lane >> 3) & 1 : lane >> 3;
  std::uint32_t b[loads][4];
  for_each_step<0, loads>([&](auto step) {
    constexpr int load = decltype(step)::value;
    device::ldmatrix_x4(b[load], key_address(row, low, std::integral_constant<int, load_vectors * load>{}));
  });
  // Of single key tiles, even and odd steps are sums of their own, as they are without codes.
  float odd[4] = {};
#pragma unroll
  for (int kk = 0; kk < Shape::k_steps; ++kk) {
    std::uint32_t q[4];
    take_q(q, kk);
    const std::uint32_t(&from)[4] = b[kk / load_vectors];
    const device::half_pairs first = pairs.neighbours(from[kk % load_vectors]);
    if constexpr (Shape::key_tiles == 2) {
      const device::half_pairs second = pairs.neighbours(from[2 + kk % load_vectors]);
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

/// out += probabilities · rows of V of codes.
template <class Shape, class Pairs>
__device__ __forceinline__ void add_coded_values(const Pairs& pairs, const std::uint32_t (&p)[Shape::key_tiles * 2],
                                                 std::uint32_t v_base, int warp, int lane,
                                                 float (&out)[Shape::n_tiles][4]) {
  if constexpr (Shape::key_tiles == 2) {
    const int row = warp * 16 + (lane & 7) + ((lane >> 3) & 1) * 8;
    const std::uint32_t first = v_base + Shape::place(row, lane >> 4);
#pragma unroll
    for (int j = 0; j < Shape::row_vectors; j += 2) {
      std::uint32_t b[4];
      device::ldmatrix_x4_trans(b, Shape::kv_rows::vectors_later(first, j));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const device::half_pairs low = pairs.alternate(b[2 * i]);
        const device::half_pairs high = pairs.alternate(b[2 * i + 1]);
        device::mma_m16n8k16<__half>(out[2 * (j + i)], p, low.first, high.first);
        device::mma_m16n8k16<__half>(out[2 * (j + i) + 1], p, low.second, high.second);
      }
    }
  } else {
    const int row = warp * 8 + (lane & 7);
    const std::uint32_t first = v_base + Shape::place(row, lane >> 3);
#pragma unroll
    for (int j = 0; j < Shape::row_vectors; j += 4) {
      std::uint32_t b[4];
      // A lane past the end of the row reads what follows it in the stage, which no product takes.
      device::ldmatrix_x4_trans(b, Shape::kv_rows::vectors_later(first, j));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (j + i >= Shape::row_vectors) break;
        const device::half_pairs both = pairs.alternate(b[i]);
        device::mma_m16n8k8<__half>(out[2 * (j + i)], p[0], p[1], both.first);
        device::mma_m16n8k8<__half>(out[2 * (j + i) + 1], p[0], p[1], both.second);
      }
    }
  }
}

/// The first of a lane's four neighbouring columns among 16, which are out[0][2i], out[1][2i], out[0][2i + 1] and
/// out[1][2i + 1] of two products' columns.
[[nodiscard]] __device__ __forceinline__ int first_of_four(int lane) { return (lane & 3) * 4; }

/// The units of what a warp accumulates, for rows lane / 4 and lane / 4 + 8.
template <bool IsCoded>
struct value_scales {
  __device__ __forceinline__ void clear(const decode_args&) {}
  [[nodiscard]] __device__ __forceinline__ float unit(int) const { return 1.0f; }
};
template <>
struct value_scales<true> : value_units {
  __device__ __forceinline__ void clear(const decode_args& a) { value_units::clear(a.v_scales.tail_floats > 0); }
};

}  // namespace bifolio::inline v0_2::cuda::decode

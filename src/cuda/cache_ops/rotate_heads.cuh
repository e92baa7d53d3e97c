// SPDX-License-Identifier: Apache-2.0
#pragma once

/// rotate_append where heads are as many whole units and come and go in aligned runs: a thread has one unit of a head.
/// Several heads a thread, which share cosines and sines, are slower (H200, bf16, 32 and 8 heads of 128, 256 and 4096
/// tokens: 3.7 and 40 µs, with two heads 4.3 and 42, with four 6.6 and 45).

#include <cstdint>
#include <type_traits>

#include "common/base/kv_code.hpp"
#include "cuda/cache_ops/code_packs.cuh"
#include "cuda/cache_ops/code_rows.cuh"
#include "cuda/cache_ops/rotate_units.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"

namespace bifolio::inline v0_2::cuda {

inline constexpr int rotate_threads = 128;

template <class Code>
__device__ __forceinline__ void store_codes(const code_side& side, const code_row& to, std::int32_t head_dim,
                                            const unit& u, detail::encoding how, unit_values<lane_dims>& x, int lane,
                                            int lanes, std::uint32_t members) {
  if (to.tail != nullptr) {
    how = encoding_of_row<Code>(x.a, x.b, lanes, members);
    if (lane == 0) {
      to.tail[0] = how.stored.scale;
      if constexpr (Code::has_zero) to.tail[1] = how.stored.zero;
    }
  }
  const auto store = [&](float(&values)[lane_dims], std::int32_t dim) {
#pragma unroll
    for (float& value : values) {
      const float shifted = Code::has_zero ? __fsub_rn(value, how.stored.zero) : value;
      value = __fmul_rn(shifted, how.inverse);
    }
    std::uint32_t words[2];
    pack_codes<Code, false>(values, words);
    const uint2 codes = how.inverse == 0.0f ? make_uint2(0, 0) : make_uint2(words[0], words[1]);
    *reinterpret_cast<uint2*>(to.data + dim_offset(side.strides, head_dim, dim)) = codes;
  };
  store(x.a, u.a);
  store(x.b, u.b);
}

template <class T>
__device__ __forceinline__ void store_plain(const code_side& side, const code_row& to, std::int32_t head_dim,
                                            const unit& u, const unit_values<lane_dims>& x) {
  const auto store = [&](const float(&values)[lane_dims], std::int32_t dim) {
    auto* const place = reinterpret_cast<uint4*>(to.data + dim_offset(side.strides, head_dim, dim) * sizeof(T));
    if constexpr (sizeof(T) == 4) {
      std::uint32_t words[lane_dims];
#pragma unroll
      for (int i = 0; i < lane_dims; ++i) words[i] = __float_as_uint(one_nan(values[i]));
      place[0] = make_uint4(words[0], words[1], words[2], words[3]);
      place[1] = make_uint4(words[4], words[5], words[6], words[7]);
    } else {
      std::uint32_t words[lane_dims / 2];
      pack_halves<T>(values, words);
      *place = make_uint4(words[0], words[1], words[2], words[3]);
    }
  };
  store(x.a, u.a);
  store(x.b, u.b);
}

__device__ __forceinline__ void store_head(const code_side& side, const code_row& to, std::int32_t head_dim,
                                           const unit& u, const detail::encoding& how, unit_values<lane_dims>& x,
                                           int lane, int lanes, std::uint32_t members) {
  const auto codes = [&](auto code) {
    store_codes<decltype(code)>(side, to, head_dim, u, how, x, lane, lanes, members);
  };
  switch (side.type) {
    case dtype::f32:
      return store_plain<float>(side, to, head_dim, u, x);
    case dtype::f16:
      return store_plain<float16>(side, to, head_dim, u, x);
    case dtype::bf16:
      return store_plain<bfloat16>(side, to, head_dim, u, x);
    case dtype::e4m3:
      return codes(e4m3_code{});
    case dtype::e5m2:
      return codes(e5m2_code{});
    case dtype::i8:
      return codes(i8_code{});
    case dtype::u8:
      return codes(u8_code{});
  }
}

/// `args.lanes` threads a head.
template <class Row>
__global__ void __launch_bounds__(rotate_threads, sizeof(Row) == 4 ? 6 : 8)
    rotate_heads(const __grid_constant__ rotate_args args) {
  constexpr int vectors = sizeof(Row) / 2;  // of 16 bytes, of a run
  device::grid_dependency_launch();
  device::grid_dependency_wait();
  const int lanes = args.lanes;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const std::int64_t index =
      (static_cast<std::int64_t>(blockIdx.x) * rotate_threads + static_cast<int>(threadIdx.x)) / lanes;
  if (index >= args.num_tokens * args.rows_per_token.value) return;  // of a whole head
  const std::uint32_t members = lanes == 32 ? 0xffffffffu : ((1u << lanes) - 1) << (threadIdx.x % 32 / lanes * lanes);
  const std::int32_t token = args.rows_per_token.quotient(static_cast<std::int32_t>(index));
  std::int32_t head = static_cast<std::int32_t>(index) - token * static_cast<std::int32_t>(args.rows_per_token.value);
  int kind = 0;
  for (; head >= args.rows[kind].num_heads; ++kind) head -= args.rows[kind].num_heads;
  const head_rows& rows = args.rows[kind];
  const bool is_v = kind == 2;
  const unit u = unit_of<lane_dims>(args.rotary, is_v ? 0 : args.rotary.rotary_dim, rows.head_dim, lane);

  // The row is on its way while slot and positions are looked up, wanted or not.
  uint4 held[2][vectors];
  const Row* const row = static_cast<const Row*>(rows.data) + token * rows.token_stride + head * rows.head_stride;
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    held[0][v] = reinterpret_cast<const uint4*>(row + u.a)[v];
    held[1][v] = reinterpret_cast<const uint4*>(row + u.b)[v];
  }
  const std::int64_t slot = kind > 0 ? args.slots[token] : 0;
  if (args.rotary.rotary_dim > 0 && !has_positions(args.rotary, args.num_tokens, token)) return;
  unit_angles<lane_dims> angles = {};
  if (!is_v && u.pair >= 0) angles = load_angles<lane_dims>(args.rotary, args.num_tokens, token, u.pair);
  std::int64_t block = 0;
  std::int64_t place = token;
  if (kind > 0 && !find_place(args, slot, block, place)) return;
  const code_row to(rows.to, block, place, head);
  if (rows.keeps_bits) {
    auto* const out = reinterpret_cast<Row*>(to.data);
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      reinterpret_cast<uint4*>(out + dim_offset(rows.to.strides, rows.head_dim, u.a))[v] = held[0][v];
      reinterpret_cast<uint4*>(out + dim_offset(rows.to.strides, rows.head_dim, u.b))[v] = held[1][v];
    }
    return;
  }
  unit_values<lane_dims> x;
  const auto widen_run = [](const uint4(&run)[vectors], float(&values)[lane_dims]) {
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      const unpacked<Row> some(run[v]);
#pragma unroll
      for (int i = 0; i < lane_dims / vectors; ++i) values[v * (lane_dims / vectors) + i] = some.values[i];
    }
  };
  widen_run(held[0], x.a);
  widen_run(held[1], x.b);
  if (!is_v) {
    const float factor =
        rows.weights == nullptr ? 1.0f : norm_factor<lane_dims>(row, rows.head_dim, args.epsilon, lane, members);
    turn_unit<lane_dims>(x, u, angles, args.rotary.pairing, rows, factor);
  }
  store_head(rows.to, to, rows.head_dim, u, {to.scales, __frcp_rn(to.scales.scale)}, x, lane, lanes, members);
}

}  // namespace bifolio::inline v0_2::cuda

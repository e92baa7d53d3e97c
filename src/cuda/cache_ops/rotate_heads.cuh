// SPDX-License-Identifier: Apache-2.0
#pragma once

/// rotate_append where heads come and go in aligned runs: a thread has one unit of several heads of a token, which are
/// all asked for before the first is rotated, and looks up its cosines and sines once.

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

/// Heads of a thread: as many as are 128 bytes of it.
template <class Row>
inline constexpr int rotated_heads = 128 / (2 * lane_dims * sizeof(Row));

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
    pack_codes<Code>(values, words);
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

/// `args.lanes` threads a group of heads, which are of one kind; rows_per_token counts groups.
template <class Row>
__global__ void __launch_bounds__(rotate_threads, 4) rotate_heads(const __grid_constant__ rotate_args args) {
  constexpr int heads = rotated_heads<Row>;
  constexpr int vectors = sizeof(Row) / 2;  // of 16 bytes, of a run
  device::grid_dependency_launch();
  device::grid_dependency_wait();
  const int lanes = args.lanes;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const std::int64_t index =
      (static_cast<std::int64_t>(blockIdx.x) * rotate_threads + static_cast<int>(threadIdx.x)) / lanes;
  if (index >= args.num_tokens * args.rows_per_token.value) return;  // of a whole group
  const std::uint32_t members = lanes == 32 ? 0xffffffffu : ((1u << lanes) - 1) << (threadIdx.x % 32 / lanes * lanes);
  const std::int32_t token = args.rows_per_token.quotient(static_cast<std::int32_t>(index));
  std::int32_t group = static_cast<std::int32_t>(index) - token * static_cast<std::int32_t>(args.rows_per_token.value);
  int kind = 0;
  const auto groups_of = [&](int k) { return (args.rows[k].num_heads + heads - 1) / heads; };
  for (; group >= groups_of(kind); ++kind) group -= groups_of(kind);
  const head_rows& rows = args.rows[kind];
  const bool is_v = kind == 2;
  const std::int32_t first_head = group * heads;
  const std::int32_t count = min(heads, rows.num_heads - first_head);
  const unit u = unit_of<lane_dims>(args.rotary, is_v ? 0 : args.rotary.rotary_dim, rows.head_dim, lane);

  // All heads are on their way while slot and positions are looked up, wanted or not.
  uint4 held[heads][2][vectors];
  const Row* const first_row =
      static_cast<const Row*>(rows.data) + token * rows.token_stride + first_head * rows.head_stride;
#pragma unroll
  for (int h = 0; h < heads; ++h) {
    const Row* const row = first_row + min(h, count - 1) * rows.head_stride;
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      held[h][0][v] = reinterpret_cast<const uint4*>(row + u.a)[v];
      held[h][1][v] = reinterpret_cast<const uint4*>(row + u.b)[v];
    }
  }
  const std::int64_t slot = kind > 0 ? args.slots[token] : 0;
  if (args.rotary.rotary_dim > 0 && !has_positions(args.rotary, args.num_tokens, token)) return;
  unit_angles<lane_dims> angles = {};
  if (!is_v && u.pair >= 0) angles = load_angles<lane_dims>(args.rotary, args.num_tokens, token, u.pair);
  std::int64_t block = 0;
  std::int64_t place = token;
  if (kind > 0) {
    if (slot < 0 || slot >= args.num_slots) return;
    block = args.num_slots <= 0x7fffffff ? std::int64_t{args.block_size.quotient(static_cast<std::int32_t>(slot))}
                                         : slot / args.block_size.value;
    place = slot - block * args.block_size.value;
  }

#pragma unroll
  for (int h = 0; h < heads; ++h) {
    if (h >= count) break;
    const std::int32_t head = first_head + h;
    const code_row to(rows.to, block, place, head);
    if (rows.keeps_bits) {
      auto* const out = reinterpret_cast<Row*>(to.data);
#pragma unroll
      for (int v = 0; v < vectors; ++v) {
        reinterpret_cast<uint4*>(out + dim_offset(rows.to.strides, rows.head_dim, u.a))[v] = held[h][0][v];
        reinterpret_cast<uint4*>(out + dim_offset(rows.to.strides, rows.head_dim, u.b))[v] = held[h][1][v];
      }
      continue;
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
    widen_run(held[h][0], x.a);
    widen_run(held[h][1], x.b);
    if (!is_v) {
      float factor = 1.0f;
      if (rows.weights != nullptr) {
        factor = norm_factor<lane_dims>(first_row + h * rows.head_stride, rows.head_dim, args.epsilon, lane, members);
      }
      turn_unit<lane_dims>(x, u, angles, args.rotary.pairing, rows, factor);
    }
    store_head(rows.to, to, rows.head_dim, u, {to.scales, __fdiv_rn(1.0f, to.scales.scale)}, x, lane, lanes, members);
  }
}

}  // namespace bifolio::inline v0_2::cuda

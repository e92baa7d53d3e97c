// SPDX-License-Identifier: Apache-2.0
#pragma once

/// rotate_append where heads are as many whole units and come and go in aligned runs: a thread has one unit of a head.
/// The kernel is bound by its instructions and by the round trip to the table, so what does not differ from thread to
/// thread is computed on the host: steps in bytes, and the shift in place of a division by the threads of a head.
/// Several heads a thread, which share cosines and sines, are slower (H200, bf16, 32 and 8 heads of 128, 256 and 4096
/// tokens: 3.7 and 40 µs, with two heads 4.3 and 42, with four 6.6 and 45; the kernel of then).

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

/// Heads of one kind. Steps are in bytes.
struct whole_heads {
  const unsigned char* from = nullptr;
  std::int64_t from_token = 0;
  std::int64_t from_head = 0;
  unsigned char* to = nullptr;
  std::int64_t to_block = 0;
  std::int64_t to_token = 0;
  std::int64_t to_head = 0;
  std::int32_t to_chunk = 0;  ///< in elements
  std::int32_t chunk = 0;     ///< dims of a chunk; 0: heads are not split
  std::int32_t num_heads = 0;
  const float* weights = nullptr;
  code_scales scales;
  dtype type = dtype::f32;
  bool keeps_bits = false;
};

struct whole_heads_args {
  whole_heads kinds[3];  ///< q, k, v
  rotary_params rotary;
  const std::int64_t* slots = nullptr;
  std::int32_t num_slots = 0;
  std::int32_t num_tokens = 0;
  std::int32_t num_heads = 0;  ///< of all kinds and tokens
  divisor heads_per_token;
  divisor block_size;
  std::int32_t head_dim = 0;
  std::int32_t lane_shift = 0;  ///< log2 of the threads of a head
  float epsilon = 0;
};

/// Where a thread's unit goes.
struct unit_place {
  unsigned char* head;  // of the token
  std::int32_t block, of_block;
  std::int32_t a, b;  // elements from the head's start to its two runs
};

/// The lanes of a warp that have a head with this one, of `lanes`.
[[nodiscard]] __device__ __forceinline__ std::uint32_t members_of_head(int lanes) {
  return lanes == 32 ? 0xffffffffu : ((1u << lanes) - 1) << (threadIdx.x & 31u & ~static_cast<unsigned>(lanes - 1));
}

template <class Code>
__device__ __forceinline__ void store_codes(const whole_heads& heads, const unit_place& place, std::int32_t head,
                                            unit_values<lane_dims>& x, int lane, int lanes) {
  detail::encoding how;
  if (heads.scales.tail_floats > 0) {
    how = encoding_of_row<Code>(x.a, x.b, lanes, members_of_head(lanes));
    if (lane == 0) {
      const kv_tail_strides& t = heads.scales.tail;
      auto* const tail = reinterpret_cast<float*>(heads.to + place.block * heads.to_block + t.offset + head * t.head +
                                                  place.of_block * t.token);
      tail[0] = how.stored.scale;
      if constexpr (Code::has_zero) tail[1] = how.stored.zero;
    }
  } else {
    const float* const scales = heads.scales.static_scales;
    if (scales != nullptr) how.stored.scale = scales[head * heads.scales.static_step];
    how.inverse = __frcp_rn(how.stored.scale);
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
    *reinterpret_cast<uint2*>(place.head + dim) = codes;
  };
  store(x.a, place.a);
  store(x.b, place.b);
}

/// `keeps_signs`: of NaN, as `append` does, in elements of 16 bits.
template <class T>
__device__ __forceinline__ void store_plain(const unit_place& place, const unit_values<lane_dims>& x,
                                            bool keeps_signs) {
  if constexpr (sizeof(T) == 4) {
    const auto store = [&](const float(&values)[lane_dims], std::int32_t dim) {
      std::uint32_t words[lane_dims];
#pragma unroll
      for (int i = 0; i < lane_dims; ++i) words[i] = __float_as_uint(one_nan(values[i]));
      auto* const to = reinterpret_cast<uint4*>(place.head + std::int64_t{dim} * 4);
      to[0] = make_uint4(words[0], words[1], words[2], words[3]);
      to[1] = make_uint4(words[4], words[5], words[6], words[7]);
    };
    store(x.a, place.a);
    store(x.b, place.b);
  } else {
    std::uint32_t words[lane_dims];
    std::uint32_t largest = 0;
    pack_run<T>(x.a, words, largest);
    pack_run<T>(x.b, words + lane_dims / 2, largest);
    if (is_special<T>(largest)) {
      pack_special<T>(x.a, words, keeps_signs);
      pack_special<T>(x.b, words + lane_dims / 2, keeps_signs);
    }
    *reinterpret_cast<uint4*>(place.head + std::int64_t{place.a} * 2) =
        make_uint4(words[0], words[1], words[2], words[3]);
    *reinterpret_cast<uint4*>(place.head + std::int64_t{place.b} * 2) =
        make_uint4(words[4], words[5], words[6], words[7]);
  }
}

/// `lanes` threads a head.
__device__ __forceinline__ void store_unit(const whole_heads& heads, const unit_place& place, std::int32_t head,
                                           bool is_v, unit_values<lane_dims>& x, int lane, int lanes) {
  const auto codes = [&](auto code) { store_codes<decltype(code)>(heads, place, head, x, lane, lanes); };
  switch (heads.type) {
    case dtype::f32:
      return store_plain<float>(place, x, is_v);
    case dtype::f16:
      return store_plain<float16>(place, x, is_v);
    case dtype::bf16:
      return store_plain<bfloat16>(place, x, is_v);
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

/// Plain: a token has one position, which all its pairs take, there is no norm, and heads are not split in chunks. So
/// more of its CTAs fit.
template <class Row, bool Plain>
__global__ void __launch_bounds__(rotate_threads, (sizeof(Row) == 4 ? 6 : 8) + (Plain ? 1 : 0))
    rotate_heads(const __grid_constant__ whole_heads_args args) {
  constexpr int vectors = sizeof(Row) / 2;  // of 16 bytes, of a run
  device::grid_dependency_launch();
  const int lanes = 1 << args.lane_shift;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const auto index =
      static_cast<std::int32_t>(blockIdx.x * (rotate_threads >> args.lane_shift) + (threadIdx.x >> args.lane_shift));
  const bool is_any = index < args.num_heads;  // all lanes of a head alike
  const std::int32_t token = args.heads_per_token.quotient(index);
  std::int32_t head = index - token * static_cast<std::int32_t>(args.heads_per_token.value);
  int kind = 0;
  if (head >= args.kinds[0].num_heads) {
    head -= args.kinds[0].num_heads;
    kind = 1;
    if (head >= args.kinds[1].num_heads) {
      head -= args.kinds[1].num_heads;
      kind = 2;
    }
  }
  const whole_heads& heads = args.kinds[kind];
  const rotary_params& rotary = args.rotary;
  // Of all kinds: those of v come in the same runs.
  const unit u = unit_of<lane_dims>(rotary, rotary.rotary_dim, args.head_dim, lane);
  const auto* const row = reinterpret_cast<const Row*>(heads.from + token * heads.from_token + head * heads.from_head);
  device::grid_dependency_wait();
  if (!is_any) return;

  // The row is on its way while slot, position and table are looked up, wanted or not.
  std::int32_t position = 0;
  if (Plain && rotary.rotary_dim > 0) position = rotary.positions[token];
  const std::int64_t slot = kind > 0 ? args.slots[token] : 0;
  uint4 held[2][vectors];
#pragma unroll
  for (int v = 0; v < vectors; ++v) {
    held[0][v] = reinterpret_cast<const uint4*>(row + u.a)[v];
    held[1][v] = reinterpret_cast<const uint4*>(row + u.b)[v];
  }
  unit_angles<lane_dims> angles = {};
  if (rotary.rotary_dim > 0) {
    if constexpr (Plain) {
      if (position < 0 || position >= rotary.num_positions) return;
      if (kind < 2 && u.pair >= 0) {
        const float* const of_position = rotary.cos_sin + std::int64_t{position} * rotary.rotary_dim + u.pair;
        load_floats<lane_dims>(of_position, angles.cosines);
        load_floats<lane_dims>(of_position + rotary.rotary_dim / 2, angles.sines);
      }
    } else {
      if (!has_positions(rotary, args.num_tokens, token)) return;
      if (kind < 2 && u.pair >= 0) angles = load_angles<lane_dims>(rotary, args.num_tokens, token, u.pair);
    }
  }
  unit_place place = {heads.to + head * heads.to_head, 0, token, u.a, u.b};  // of q: a block with all tokens
  if (kind > 0) {
    if (slot < 0 || slot >= args.num_slots) return;
    place.block = args.block_size.quotient(static_cast<std::int32_t>(slot));
    place.of_block = static_cast<std::int32_t>(slot) - place.block * static_cast<std::int32_t>(args.block_size.value);
    place.head += place.block * heads.to_block;
  }
  place.head += place.of_block * heads.to_token;
  if (!Plain && heads.chunk > 0) {
    place.a = u.a / heads.chunk * heads.to_chunk + u.a % heads.chunk;
    place.b = u.b / heads.chunk * heads.to_chunk + u.b % heads.chunk;
  }
  if (heads.keeps_bits) {
#pragma unroll
    for (int v = 0; v < vectors; ++v) {
      reinterpret_cast<uint4*>(reinterpret_cast<Row*>(place.head) + place.a)[v] = held[0][v];
      reinterpret_cast<uint4*>(reinterpret_cast<Row*>(place.head) + place.b)[v] = held[1][v];
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
  if (kind < 2) {
    const float* const weights = Plain ? nullptr : heads.weights;
    const float factor = weights == nullptr
                             ? 1.0f
                             : norm_factor<lane_dims>(row, args.head_dim, args.epsilon, lane, members_of_head(lanes));
    turn_unit<lane_dims>(x, u, angles, rotary.pairing, weights, factor);
  }
  store_unit(heads, place, head, kind == 2, x, lane, lanes);
}

}  // namespace bifolio::inline v0_2::cuda

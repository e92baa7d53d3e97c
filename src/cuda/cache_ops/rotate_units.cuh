// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the kernels of rotate_append share: their arguments, and heads in units of dims that one thread norms and
/// rotates. The arithmetic is that of rotate_append.hpp, rounding by rounding.

#include <bifolio/rotate_append.hpp>
#include <cstdint>

#include "cuda/cache_ops/code_rows.cuh"
#include "cuda/device/load.cuh"
#include "cuda/host/divisor.hpp"

namespace bifolio::inline v0_2::cuda {

inline constexpr int norm_lanes = 8;  // that a row has at the least: each adds up eight of the 64 sums of a norm

/// Heads of one kind: those of q, those of k, which are rotated alike, and those of v, which are stored alone.
struct head_rows {
  const void* data = nullptr;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  std::int32_t num_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t num_units = 0;
  const float* weights = nullptr;
  code_side to;
  bool keeps_bits = false;  ///< of v: rows and cache are of one type
};

struct rotate_args {
  head_rows rows[3];  ///< q, k, v
  rotary_params rotary;
  float epsilon = 0;
  const std::int64_t* slots = nullptr;
  std::int64_t num_slots = 0;
  std::int64_t num_tokens = 0;
  divisor rows_per_token;
  divisor block_size;
  std::int32_t lanes = norm_lanes;  ///< of a row, a power of two up to 32
};

/// Block of a slot and token in it. False: the slot is to be skipped.
__device__ __forceinline__ bool find_place(const divisor& block_size, std::int64_t num_slots, std::int64_t slot,
                                           std::int64_t& block, std::int64_t& token) {
  if (slot < 0 || slot >= num_slots) return false;
  block = num_slots <= 0x7fffffff ? std::int64_t{block_size.quotient(static_cast<std::int32_t>(slot))}
                                  : slot / block_size.value;
  token = slot - block * block_size.value;
  return true;
}

/// Dims that one thread takes at a time: two runs of Width, whose pairs are all its own. So a head is rotated in place
/// without waiting for other threads. `b` < 0: there is no second run. `pair`: the first pair, < 0: none.
struct unit {
  std::int32_t a;
  std::int32_t b;
  std::int32_t pair;
};

template <int Width>
__device__ __forceinline__ unit unit_of(const rotary_params& rotary, std::int32_t rotary_dim, std::int32_t head_dim,
                                        std::int32_t index) {
  const std::int32_t rotated = rotary_dim / (2 * Width);
  if (index < rotated) {
    const std::int32_t pair = index * Width;
    if (rotary.pairing == rope_pairing::gptj) {
      const std::int32_t a = rotary.rotary_offset + 2 * pair;
      return {a, a + Width, pair};
    }
    return {rotary.rotary_offset + pair, rotary.rotary_offset + pair + rotary_dim / 2, pair};
  }
  const auto dim_of = [&](std::int32_t run) {
    const std::int32_t dim = run * Width;
    return rotary_dim == 0 || dim < rotary.rotary_offset ? dim : dim + rotary_dim;
  };
  const std::int32_t first = 2 * (index - rotated);
  const std::int32_t b = dim_of(first + 1);
  return {dim_of(first), b < head_dim ? b : -1, -1};
}

template <int Width, class Row>
__device__ __forceinline__ void load_run_of(const Row* row, float* values) {
  if constexpr (Width == 1) {
    values[0] = convert<float>(*row);
  } else {
    const packed<Row, Width> elements = load_run<Width>(row);
#pragma unroll
    for (int i = 0; i < Width; ++i) values[i] = convert<float>(elements.values[i]);
  }
}

/// `Width` floats, at 16 bytes where there are several.
template <int Width>
__device__ __forceinline__ void load_floats(const float* from, float* values) {
  if constexpr (Width == 1) {
    values[0] = *from;
  } else {
    const packed<float, Width> elements = load_packed<Width>(from);
#pragma unroll
    for (int i = 0; i < Width; ++i) values[i] = elements.values[i];
  }
}

__device__ __forceinline__ float one_nan(float value) {
  return (__float_as_uint(value) & 0x7fffffffu) > 0x7f800000u ? __uint_as_float(0x7fc00000u) : value;
}

/// 1 / √(mean of squares + epsilon) of a row, the same in each of its lanes. The order of the sum: rotate_append.hpp.
template <int Width, class Row>
__device__ __forceinline__ float norm_factor(const Row* row, std::int32_t head_dim, float epsilon, int lane,
                                             std::uint32_t members) {
  constexpr int eight = 8;
  float sums[eight] = {};
  for (std::int32_t dim = (lane % norm_lanes) * eight; dim < head_dim; dim += norm_lanes * eight) {
    float values[eight];
    if constexpr (Width == eight) {
      load_run_of<eight>(row + dim, values);
    } else {
#pragma unroll
      for (int i = 0; i < eight; ++i) values[i] = dim + i < head_dim ? convert<float>(row[dim + i]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < eight; ++i) sums[i] = __fadd_rn(sums[i], __fmul_rn(values[i], values[i]));
  }
#pragma unroll
  for (int step = eight / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < step; ++i) sums[i] = __fadd_rn(sums[i], sums[i + step]);
  }
  float sum = sums[0];
#pragma unroll
  for (int mask = norm_lanes / 2; mask > 0; mask /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(members, sum, mask));
  const float mean = __fdiv_rn(sum, static_cast<float>(head_dim));
  return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, epsilon)));
}

/// Whether all positions of a token are in the table.
__device__ __forceinline__ bool has_positions(const rotary_params& rotary, std::int64_t num_tokens,
                                              std::int64_t token) {
  bool all = true;
  for (std::int32_t axis = 0; axis < rotary.num_axes; ++axis) {
    const std::int32_t position = rotary.positions[axis * num_tokens + token];
    all = all && position >= 0 && position < rotary.num_positions;
  }
  return all;
}

template <int Width>
struct unit_angles {
  float cosines[Width];
  float sines[Width];
};

/// Cosines and sines of the pairs of a unit that has them.
template <int Width>
__device__ __forceinline__ unit_angles<Width> load_angles(const rotary_params& rotary, std::int64_t num_tokens,
                                                          std::int64_t token, std::int32_t pair) {
  unit_angles<Width> angles;
  const std::int32_t pairs = rotary.rotary_dim / 2;
  if (rotary.axis_of_pair == nullptr) {
    const float* const row = rotary.cos_sin + std::int64_t{rotary.positions[token]} * rotary.rotary_dim + pair;
    load_floats<Width>(row, angles.cosines);
    load_floats<Width>(row + pairs, angles.sines);
    return angles;
  }
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    std::int32_t axis = rotary.axis_of_pair[pair + i];
    axis = axis < rotary.num_axes ? axis : 0;
    const std::int64_t position = rotary.positions[axis * num_tokens + token];
    const float* const row = rotary.cos_sin + position * rotary.rotary_dim + pair + i;
    angles.cosines[i] = row[0];
    angles.sines[i] = row[pairs];
  }
  return angles;
}

__device__ __forceinline__ void turn(float& a, float& b, float cosine, float sine) {
  const float x = a;
  a = __fsub_rn(__fmul_rn(x, cosine), __fmul_rn(b, sine));
  b = __fadd_rn(__fmul_rn(b, cosine), __fmul_rn(x, sine));
}

template <int Width>
struct unit_values {
  float a[Width];
  float b[Width];
};

template <int Width, class Row>
__device__ __forceinline__ unit_values<Width> load_unit(const Row* row, const unit& u) {
  unit_values<Width> x = {};
  load_run_of<Width>(row + u.a, x.a);
  if (u.b >= 0) load_run_of<Width>(row + u.b, x.b);
  return x;
}

/// Norm and rotation.
template <int Width>
__device__ __forceinline__ void turn_unit(unit_values<Width>& x, const unit& u, const unit_angles<Width>& angles,
                                          rope_pairing pairing, const float* weights, float factor) {
  if (weights != nullptr) {
    float of_run[Width];
    load_floats<Width>(weights + u.a, of_run);
#pragma unroll
    for (int i = 0; i < Width; ++i) x.a[i] = __fmul_rn(__fmul_rn(x.a[i], factor), of_run[i]);
    if (u.b >= 0) {
      load_floats<Width>(weights + u.b, of_run);
#pragma unroll
      for (int i = 0; i < Width; ++i) x.b[i] = __fmul_rn(__fmul_rn(x.b[i], factor), of_run[i]);
    }
  }
  if (u.pair >= 0) {
    if (pairing == rope_pairing::neox) {
#pragma unroll
      for (int i = 0; i < Width; ++i) turn(x.a[i], x.b[i], angles.cosines[i], angles.sines[i]);
    } else if constexpr (Width == 1) {
      turn(x.a[0], x.b[0], angles.cosines[0], angles.sines[0]);
    } else {
#pragma unroll
      for (int i = 0; i < Width / 2; ++i) turn(x.a[2 * i], x.a[2 * i + 1], angles.cosines[i], angles.sines[i]);
#pragma unroll
      for (int i = 0; i < Width / 2; ++i) {
        turn(x.b[2 * i], x.b[2 * i + 1], angles.cosines[Width / 2 + i], angles.sines[Width / 2 + i]);
      }
    }
  }
}

/// The same, and the one NaN.
template <int Width>
__device__ __forceinline__ void rotate_unit(unit_values<Width>& x, const unit& u, const unit_angles<Width>& angles,
                                            rope_pairing pairing, const float* weights, float factor) {
  turn_unit(x, u, angles, pairing, weights, factor);
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    x.a[i] = one_nan(x.a[i]);
    x.b[i] = one_nan(x.b[i]);
  }
}

}  // namespace bifolio::inline v0_2::cuda

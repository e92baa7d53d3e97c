// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "common/base/kv_code.hpp"
#include "cuda/cache_ops/code_rows.cuh"
#include "cuda/cache_ops/rotate.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/host/divisor.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

constexpr int threads = 128;
constexpr int norm_lanes = 8;  // that a row has at the least: each adds up eight of the 64 sums of a norm

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

/// Norm, rotation and the one NaN.
template <int Width>
__device__ __forceinline__ void rotate_unit(unit_values<Width>& x, const unit& u, const unit_angles<Width>& angles,
                                            rope_pairing pairing, const head_rows& rows, float factor) {
  if (rows.weights != nullptr) {
    float weights[Width];
    load_floats<Width>(rows.weights + u.a, weights);
#pragma unroll
    for (int i = 0; i < Width; ++i) x.a[i] = __fmul_rn(__fmul_rn(x.a[i], factor), weights[i]);
    if (u.b >= 0) {
      load_floats<Width>(rows.weights + u.b, weights);
#pragma unroll
      for (int i = 0; i < Width; ++i) x.b[i] = __fmul_rn(__fmul_rn(x.b[i], factor), weights[i]);
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
#pragma unroll
  for (int i = 0; i < Width; ++i) {
    x.a[i] = one_nan(x.a[i]);
    x.b[i] = one_nan(x.b[i]);
  }
}

/// A row of v whose elements stay as they are.
template <int Width, class Row>
__device__ __forceinline__ void copy_row(const head_rows& rows, const Row* row, const code_row& to, int lane,
                                         int lanes) {
  const code_side& side = rows.to;
  auto* const out = reinterpret_cast<Row*>(to.data);
  for (std::int32_t dim = lane * lane_dims; dim < rows.head_dim; dim += lanes * lane_dims) {
    if (Width == lane_dims && side.is_packed) {
      *reinterpret_cast<packed<Row, lane_dims>*>(out + dim_offset(side.strides, rows.head_dim, dim)) =
          load_run<lane_dims>(row + dim);
      continue;
    }
    for (int i = 0; i < lane_dims && dim + i < rows.head_dim; ++i) {
      out[dim_offset(side.strides, rows.head_dim, dim + i)] = row[dim + i];
    }
  }
}

/// A row is a head of a token, `args.lanes` threads wide; those of q come first, then those of k, then those of v.
/// Width: 8 where rows, tables and weights can be read in runs of eight and the rotated dims are such runs, else 1.
template <class Row, int Width>
__global__ void __launch_bounds__(threads, 5) rotate_rows(const __grid_constant__ rotate_args args) {
  device::grid_dependency_launch();
  device::grid_dependency_wait();
  const int lanes = args.lanes;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const auto rows_per_cta = static_cast<std::int32_t>(threads / lanes);
  const std::int64_t index =
      static_cast<std::int64_t>(blockIdx.x) * rows_per_cta + static_cast<int>(threadIdx.x) / lanes;
  if (index >= args.num_tokens * args.rows_per_token.value) return;  // of a whole row
  const std::uint32_t members = lanes == 32 ? 0xffffffffu : ((1u << lanes) - 1) << (threadIdx.x % 32 / lanes * lanes);
  const std::int32_t token = args.rows_per_token.quotient(static_cast<std::int32_t>(index));
  std::int32_t head = static_cast<std::int32_t>(index) - token * static_cast<std::int32_t>(args.rows_per_token.value);
  int kind = 0;
  for (; head >= args.rows[kind].num_heads; ++kind) head -= args.rows[kind].num_heads;
  const head_rows& rows = args.rows[kind];
  const bool is_v = kind == 2;
  const std::int32_t rotary_dim = is_v ? 0 : args.rotary.rotary_dim;
  const Row* const row = static_cast<const Row*>(rows.data) + token * rows.token_stride + head * rows.head_stride;

  // The first unit is on its way while slot and positions are looked up, wanted or not.
  const bool has_unit = lane < rows.num_units;
  const unit first = has_unit ? unit_of<Width>(args.rotary, rotary_dim, rows.head_dim, lane) : unit{0, -1, -1};
  unit_values<Width> held = {};
  if (has_unit) held = load_unit<Width>(row, first);

  const std::int64_t slot = kind > 0 ? args.slots[token] : 0;
  if (args.rotary.rotary_dim > 0 && !has_positions(args.rotary, args.num_tokens, token)) return;
  const auto angles_of = [&](const unit& u) {
    return u.pair >= 0 ? load_angles<Width>(args.rotary, args.num_tokens, token, u.pair) : unit_angles<Width>{};
  };
  const unit_angles<Width> first_angles = angles_of(first);
  std::int64_t block = 0;
  std::int64_t place = token;
  if (kind > 0) {
    if (slot < 0 || slot >= args.num_slots) return;
    block = args.num_slots <= 0x7fffffff ? std::int64_t{args.block_size.quotient(static_cast<std::int32_t>(slot))}
                                         : slot / args.block_size.value;
    place = slot - block * args.block_size.value;
  }
  const code_row to(rows.to, block, place, head);
  if (rows.keeps_bits) return copy_row<Width>(rows, row, to, lane, lanes);

  const float factor =
      rows.weights == nullptr ? 1.0f : norm_factor<Width>(row, rows.head_dim, args.epsilon, lane, members);
  const auto finish = [&](unit_values<Width>& x, const unit& u, const unit_angles<Width>& angles) {
    if (!is_v) rotate_unit<Width>(x, u, angles, args.rotary.pairing, rows, factor);
  };
  // Heads of more dims than the lanes of a row hold come in further units, which are loaded when it is their turn.
  const auto for_further_units = [&](const auto& body) {
    for (std::int32_t index_of = lane + lanes; index_of < rows.num_units; index_of += lanes) {
      const unit u = unit_of<Width>(args.rotary, rotary_dim, rows.head_dim, index_of);
      unit_values<Width> x = load_unit<Width>(row, u);
      finish(x, u, angles_of(u));
      body(x, u);
    }
  };
  finish(held, first, first_angles);

  detail::encoding how{to.scales, __fdiv_rn(1.0f, to.scales.scale)};
  if (to.tail != nullptr) {
    detail::dim_range range;
    const auto measure_unit = [&](const unit_values<Width>& x, const unit& u) {
      measure(x.a, Width, range);
      if (u.b >= 0) measure(x.b, Width, range);
    };
    if (has_unit) measure_unit(held, first);
    for_further_units(measure_unit);
    reduce(range, lanes, members);
    how = detail::encode_token_head<device_math>(rows.to.type, range);
    if (lane == 0) {
      to.tail[0] = how.stored.scale;
      if (rows.to.scales.tail_floats > 1) to.tail[1] = how.stored.zero;
    }
  }
  const auto store_unit = [&](unit_values<Width>& x, const unit& u) {
    store_values<Width>(rows.to, to, rows.head_dim, u.a, how, x.a);
    if (u.b >= 0) store_values<Width>(rows.to, to, rows.head_dim, u.b, how, x.b);
  };
  if (has_unit) store_unit(held, first);
  for_further_units(store_unit);
}

bool is_aligned_16(const void* pointer) noexcept { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; }

transfer_plane rows_of(const const_tensor_view& rows) noexcept {
  transfer_plane plane;
  plane.row = const_cast<void*>(rows.data);
  plane.row_token_stride = rows.token_stride;
  plane.row_head_stride = rows.head_stride;
  plane.head_dim = rows.head_dim;
  return plane;
}

std::int32_t units_of(std::int32_t head_dim, std::int32_t rotary_dim, std::int32_t width) noexcept {
  const std::int32_t runs = (head_dim - rotary_dim) / width;
  return rotary_dim / (2 * width) + (runs + 1) / 2;
}

/// Whether all that is read comes in aligned runs of eight.
bool reads_runs(const rotate_append_params& params) noexcept {
  const auto is_run = [&](const const_tensor_view& rows) {
    return rows.num_heads == 0 || rows.data == nullptr || side_of(rows_of(rows), rows.type).is_packed;
  };
  const rotary_params& rotary = params.rotary;
  const bool rotates_runs =
      rotary.rotary_dim == 0 || (rotary.rotary_dim % (2 * lane_dims) == 0 && rotary.rotary_offset % lane_dims == 0 &&
                                 is_aligned_16(rotary.cos_sin));
  return is_run(params.q) && is_run(params.append.k) && is_run(params.append.v) && rotates_runs &&
         is_aligned_16(params.norm.q_weight) && is_aligned_16(params.norm.k_weight);
}

head_rows heads_of(const const_tensor_view& rows, const code_side& to, const float* weights) noexcept {
  head_rows result;
  result.data = rows.data;
  result.token_stride = rows.token_stride;
  result.head_stride = rows.head_stride;
  result.num_heads = rows.num_heads;
  result.head_dim = rows.head_dim;
  result.weights = weights;
  result.to = to;
  return result;
}

}  // namespace

cudaError_t launch_rotate_append(const runtime_api& api, const rotate_append_params& params, bool dependent,
                                 cudaStream_t stream) noexcept {
  const append_params& stored = params.append;
  const kv_cache_view& kv = stored.kv;
  const kv_layout& layout = kv.layout;
  rotate_args args;
  args.rotary = params.rotary;
  args.epsilon = params.norm.epsilon;
  args.slots = stored.slot_mapping;
  args.num_slots = kv.num_blocks * layout.block_size;
  args.num_tokens = stored.k.num_tokens;
  args.block_size = divisor(layout.block_size);
  if (params.q.num_heads > 0) {
    args.rows[0] =
        heads_of(params.q, side_of(rows_of(as_const(params.q_out)), params.q_out.type), params.norm.q_weight);
  }
  args.rows[1] = heads_of(stored.k, side_of(kv.k, layout.k, kv.k_scales), params.norm.k_weight);
  if (!layout.v_in_k) {
    args.rows[2] = heads_of(stored.v, side_of(kv.v, layout.v, kv.v_scales), nullptr);
    args.rows[2].keeps_bits = stored.v.type == layout.v.code.type;
  }

  const bool wide = reads_runs(params);
  const std::int32_t width = wide ? lane_dims : 1;
  std::int64_t rows_per_token = 0;
  std::int32_t most_units = 1;
  for (int kind = 0; kind < 3; ++kind) {
    head_rows& rows = args.rows[kind];
    rows.num_units = units_of(rows.head_dim, kind == 2 ? 0 : params.rotary.rotary_dim, width);
    rows_per_token += rows.num_heads;
    most_units = std::max(most_units, rows.num_units);
  }
  while (args.lanes < most_units && args.lanes < 32) args.lanes *= 2;
  const std::int64_t rows_per_cta = threads / args.lanes;
  // What a thread computes with stays in 31 bits.
  if (rows_per_token > (0x7fffffff - rows_per_cta) / args.num_tokens) return cudaErrorInvalidValue;
  args.rows_per_token = divisor(static_cast<std::int32_t>(rows_per_token));
  const std::int64_t ctas = (args.num_tokens * rows_per_token + rows_per_cta - 1) / rows_per_cta;
  return visit_tensor_dtype(stored.k.type, [&](auto traits) {
    using row = typename decltype(traits)::storage;
    const auto kernel = wide ? rotate_rows<row, lane_dims> : rotate_rows<row, 1>;
    return launch(api, kernel, dim3(static_cast<unsigned>(ctas)), dim3(threads), 0, stream, dependent, args);
  });
}

}  // namespace bifolio::inline v0_2::cuda

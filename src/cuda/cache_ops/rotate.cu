// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>

#include "common/base/kv_code.hpp"
#include "cuda/cache_ops/code_rows.cuh"
#include "cuda/cache_ops/rotate.hpp"
#include "cuda/cache_ops/rotate_heads.cuh"
#include "cuda/cache_ops/rotate_records.cuh"
#include "cuda/cache_ops/rotate_units.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/host/divisor.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

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
/// Records: those of k become records.
template <class Row, int Width, bool Records>
__global__ void __launch_bounds__(rotate_threads, 5) rotate_rows(const __grid_constant__ rotate_args args) {
  device::grid_dependency_launch();
  device::grid_dependency_wait();
  const int lanes = args.lanes;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const auto rows_per_cta = static_cast<std::int32_t>(rotate_threads / lanes);
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
  if (kind > 0 && !find_place(args.block_size, args.num_slots, slot, block, place)) return;
  const code_row to(rows.to, block, place, head);
  if (rows.keeps_bits) return copy_row<Width>(rows, row, to, lane, lanes);

  const float factor =
      rows.weights == nullptr ? 1.0f : norm_factor<Width>(row, rows.head_dim, args.epsilon, lane, members);
  const auto finish = [&](unit_values<Width>& x, const unit& u, const unit_angles<Width>& angles) {
    if (!is_v) rotate_unit<Width>(x, u, angles, args.rotary.pairing, rows.weights, factor);
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

  if constexpr (Records) {
    if (kind == 1) {
      record_scales scales;
      const auto take_unit = [&](const unit_values<Width>& x, const unit& u) {
        scales.take(x.a, u.a);
        if (u.b >= 0) scales.take(x.b, u.b);
      };
      if (has_unit) take_unit(held, first);
      for_further_units(take_unit);
      scales.finish(lanes, members);
      if (lane == 0) scales.store(to.data);
      const auto store_run = [&](const unit_values<Width>& x, const unit& u) {
        store_record_run<Width>(to.data, scales, u.a, x.a);
        if (u.b >= 0) store_record_run<Width>(to.data, scales, u.b, x.b);
      };
      if (has_unit) store_run(held, first);
      for_further_units(store_run);
      return;
    }
  }
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

/// CTAs for so many rows a token, of args.lanes threads each; 0: more than a launch takes.
std::int64_t share_rows(rotate_args& args, std::int64_t rows_per_token) noexcept {
  const std::int64_t rows_per_cta = rotate_threads / args.lanes;
  // What a thread computes with stays in 31 bits.
  if (rows_per_token > (0x7fffffff - rows_per_cta) / args.num_tokens) return 0;
  args.rows_per_token = divisor(static_cast<std::int32_t>(rows_per_token));
  return (args.num_tokens * rows_per_token + rows_per_cta - 1) / rows_per_cta;
}

/// Whether every head is as many whole units, of two runs each, and comes to aligned runs; and slots and places in a
/// head are of 31 bits.
bool has_equal_units(const rotate_args& args, dtype row_type) noexcept {
  const std::int32_t units = args.rows[1].num_units;
  if (units > 32 || !std::has_single_bit(static_cast<std::uint32_t>(units))) return false;
  if (args.num_slots > 0x7fffffff) return false;
  for (const head_rows& rows : args.rows) {
    if (rows.num_heads == 0) continue;
    if (rows.num_units != units || rows.head_dim != 2 * lane_dims * units || !rows.to.is_packed) return false;
    const kv_strides& to = rows.to.strides;
    if (to.chunk < rows.head_dim && to.chunk_stride > 0x7fffffff / (rows.head_dim / to.chunk)) return false;
    if (rows.weights != nullptr && units < norm_lanes) return false;
    // A NaN of v keeps its sign, which float16 loses when it is widened.
    const bool is_narrowed = size_of(rows.to.type) == 1 || (size_of(rows.to.type) == 2 && row_type != dtype::f16);
    if (&rows == args.rows + 2 && !rows.keeps_bits && !is_narrowed) return false;
  }
  return true;
}

whole_heads whole_heads_of(const head_rows& rows, dtype row_type) noexcept {
  whole_heads heads;
  if (rows.num_heads == 0) return heads;
  const auto row_bytes = static_cast<std::int64_t>(size_of(row_type));
  const auto element = static_cast<std::int64_t>(size_of(rows.to.type));
  const kv_strides& strides = rows.to.strides;
  heads.from = static_cast<const unsigned char*>(rows.data);
  heads.from_token = rows.token_stride * row_bytes;
  heads.from_head = rows.head_stride * row_bytes;
  heads.to = static_cast<unsigned char*>(rows.to.base);
  heads.to_block = strides.block * element;
  heads.to_token = strides.token * element;
  heads.to_head = strides.head * element;
  if (strides.chunk < rows.head_dim) {
    heads.chunk = strides.chunk;
    heads.to_chunk = static_cast<std::int32_t>(strides.chunk_stride);
  }
  heads.num_heads = rows.num_heads;
  heads.weights = rows.weights;
  heads.scales = rows.to.scales;
  heads.type = rows.to.type;
  heads.keeps_bits = rows.keeps_bits;
  return heads;
}

cudaError_t launch_heads(const runtime_api& api, rotate_args& args, dtype row_type, std::int64_t heads_per_token,
                         bool dependent, cudaStream_t stream) noexcept {
  args.lanes = args.rows[1].num_units;
  const std::int64_t ctas = share_rows(args, heads_per_token);
  if (ctas == 0) return cudaErrorInvalidValue;
  whole_heads_args heads;
  for (int kind = 0; kind < 3; ++kind) heads.kinds[kind] = whole_heads_of(args.rows[kind], row_type);
  heads.rotary = args.rotary;
  heads.slots = args.slots;
  heads.num_slots = static_cast<std::int32_t>(args.num_slots);
  heads.num_tokens = static_cast<std::int32_t>(args.num_tokens);
  heads.num_heads = static_cast<std::int32_t>(args.num_tokens * heads_per_token);
  heads.heads_per_token = args.rows_per_token;
  heads.block_size = args.block_size;
  heads.head_dim = args.rows[1].head_dim;
  heads.lane_shift = std::countr_zero(static_cast<std::uint32_t>(args.lanes));
  heads.epsilon = args.epsilon;
  bool is_plain = args.rotary.num_axes == 1 && args.rotary.axis_of_pair == nullptr;
  for (const whole_heads& kind : heads.kinds) is_plain = is_plain && kind.weights == nullptr && kind.chunk == 0;
  return visit_tensor_dtype(row_type, [&](auto traits) {
    using row = typename decltype(traits)::storage;
    return launch(api, is_plain ? rotate_heads<row, true> : rotate_heads<row, false>, dim3(static_cast<unsigned>(ctas)),
                  dim3(rotate_threads), 0, stream, dependent, heads);
  });
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
  if (wide && has_equal_units(args, stored.k.type)) {
    return launch_heads(api, args, stored.k.type, rows_per_token, dependent, stream);
  }
  while (args.lanes < most_units && args.lanes < 32) args.lanes *= 2;
  const std::int64_t ctas = share_rows(args, rows_per_token);
  if (ctas == 0) return cudaErrorInvalidValue;
  return visit_tensor_dtype(stored.k.type, [&](auto traits) {
    using row = typename decltype(traits)::storage;
    const bool records = args.rows[1].to.is_record;
    const auto kernel = wide ? (records ? rotate_rows<row, lane_dims, true> : rotate_rows<row, lane_dims, false>)
                             : (records ? rotate_rows<row, 1, true> : rotate_rows<row, 1, false>);
    return launch(api, kernel, dim3(static_cast<unsigned>(ctas)), dim3(rotate_threads), 0, stream, dependent, args);
  });
}

}  // namespace bifolio::inline v0_2::cuda

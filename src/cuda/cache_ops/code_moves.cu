// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "common/base/kv_code.hpp"
#include "cuda/cache_ops/code_moves.cuh"
#include "cuda/cache_ops/code_moves.hpp"
#include "cuda/cache_ops/code_rows.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/host/divisor.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

constexpr int threads = 256;
constexpr int row_lanes = 16;                     // threads of a row
constexpr int step_dims = row_lanes * lane_dims;  // of a row at a time
constexpr int held_steps = 2;                     // of which these stay in registers
constexpr int rows_per_cta = threads / row_lanes;

template <class Bits>
__device__ __forceinline__ void copy_elements(const code_plane& plane, const code_row& dst, const code_row& src,
                                              std::int32_t dim) {
  const auto* const from = reinterpret_cast<const Bits*>(src.data);
  auto* const to = reinterpret_cast<Bits*>(dst.data);
  if (plane.src.is_packed && plane.dst.is_packed) {
    *reinterpret_cast<packed<Bits, lane_dims>*>(to + dim_offset(plane.dst.strides, plane.head_dim, dim)) =
        load_run<lane_dims>(from + dim_offset(plane.src.strides, plane.head_dim, dim));
    return;
  }
#pragma unroll
  for (int i = 0; i < lane_dims; ++i) {
    if (dim + i >= plane.head_dim) return;
    to[dim_offset(plane.dst.strides, plane.head_dim, dim + i)] =
        from[dim_offset(plane.src.strides, plane.head_dim, dim + i)];
  }
}

/// Sixteen lanes a row, two rows a warp. Grid: x over rows, y over planes.
__global__ void __launch_bounds__(threads, 4) move_codes(const __grid_constant__ code_moves_args args) {
  device::grid_dependency_launch();
  device::grid_dependency_wait();
  const code_plane& plane = args.planes[blockIdx.y];
  const int lane = static_cast<int>(threadIdx.x) % row_lanes;
  const std::int64_t wanted = static_cast<std::int64_t>(blockIdx.x) * rows_per_cta + threadIdx.x / row_lanes;
  // The lanes of a warp stay together: rows that are not there are computed and not stored.
  bool exists = wanted < args.num_rows;
  const auto row_index = static_cast<std::int32_t>(exists ? wanted : 0);
  const std::int32_t token = args.num_heads.quotient(row_index);
  const std::int32_t head = row_index - token * static_cast<std::int32_t>(args.num_heads.value);
  code_place from;
  code_place to;
  exists = find_places(args, token, from, to) && exists;
  code_row src(plane.src, from.block, from.token, head);
  code_row dst(plane.dst, to.block, to.token, head);

  const bool have_tails = src.tail != nullptr || dst.tail != nullptr;
  const bool one_code = plane.src.type == plane.dst.type && (src.tail != nullptr) == (dst.tail != nullptr);
  if (one_code && (have_tails || args.keep_bits || src.scales.scale == dst.scales.scale)) {
    if (!exists) return;
    for (std::int32_t dim = lane * lane_dims; dim < plane.head_dim; dim += step_dims) {
      switch (element_bytes(plane.src.type)) {
        case 1:
          copy_elements<std::uint8_t>(plane, dst, src, dim);
          break;
        case 2:
          copy_elements<float16>(plane, dst, src, dim);
          break;
        default:
          copy_elements<float>(plane, dst, src, dim);
      }
    }
    if (lane < plane.src.scales.tail_floats) dst.tail[lane] = src.tail[lane];
    return;
  }

  if (src.tail != nullptr) {
    src.scales.scale = src.tail[0];
    if (plane.src.scales.tail_floats > 1) src.scales.zero = src.tail[1];
  }
  const std::int32_t first_dim = lane * lane_dims;
  float held[held_steps][lane_dims];
#pragma unroll
  for (int step = 0; step < held_steps; ++step) {
    if (step * step_dims < plane.head_dim) {
      load_values(plane.src, src, plane.head_dim, first_dim + step * step_dims, held[step]);
    }
  }
  detail::encoding how{dst.scales, __fdiv_rn(1.0f, dst.scales.scale)};
  if (dst.tail != nullptr) {
    detail::dim_range range;
#pragma unroll
    for (int step = 0; step < held_steps; ++step) {
      if (step * step_dims < plane.head_dim) {
        measure(held[step], plane.head_dim - first_dim - step * step_dims, range);
      }
    }
    for (std::int32_t dim = first_dim + held_steps * step_dims; dim < plane.head_dim; dim += step_dims) {
      float values[lane_dims];
      load_values(plane.src, src, plane.head_dim, dim, values);
      measure(values, plane.head_dim - dim, range);
    }
    reduce(range, row_lanes, 0xffffffffu);
    how = detail::encode_token_head<device_math>(plane.dst.type, range);
    if (exists && lane == 0) {
      dst.tail[0] = how.stored.scale;
      if (plane.dst.scales.tail_floats > 1) dst.tail[1] = how.stored.zero;
    }
  }
  if (!exists) return;
#pragma unroll
  for (int step = 0; step < held_steps; ++step) {
    if (step * step_dims < plane.head_dim) {
      store_values(plane.dst, dst, plane.head_dim, first_dim + step * step_dims, how, held[step]);
    }
  }
  for (std::int32_t dim = first_dim + held_steps * step_dims; dim < plane.head_dim; dim += step_dims) {
    float values[lane_dims];
    load_values(plane.src, src, plane.head_dim, dim, values);
    store_values(plane.dst, dst, plane.head_dim, dim, how, values);
  }
}

cudaError_t launch_moves(const runtime_api& api, const code_moves_args& args, std::int32_t num_planes, bool dependent,
                         cudaStream_t stream) noexcept {
  if (args.planes[0].src.is_record || args.planes[0].dst.is_record) {
    return launch_record_moves(api, args, dependent, stream);
  }
  const std::int64_t ctas = (args.num_rows + rows_per_cta - 1) / rows_per_cta;
  const dim3 grid(static_cast<unsigned>(ctas), static_cast<unsigned>(num_planes));
  return launch(api, move_codes, grid, dim3(threads), 0, stream, dependent, args);
}

/// Rows of one launch: what a thread computes with stays in 31 bits.
constexpr std::int64_t max_rows = 0x7fffffff - rows_per_cta;

}  // namespace

cudaError_t launch_code_transfer(const runtime_api& api, const transfer_args& args, const kv_cache_view& kv,
                                 bool to_cache, bool dependent, cudaStream_t stream) noexcept {
  if (to_cache && appends_in_packs(args, kv)) return launch_append_codes(api, args, kv, dependent, stream);
  code_moves_args moves;
  for (std::int32_t p = 0; p < args.num_planes; ++p) {
    const kv_plane& plane = p == 0 ? kv.layout.k : kv.layout.v;
    const code_side cache = side_of(args.planes[p].cache, plane, p == 0 ? kv.k_scales : kv.v_scales);
    const code_side rows = side_of(args.planes[p], args.row_type);
    moves.planes[p] = {to_cache ? rows : cache, to_cache ? cache : rows, plane.head_dim};
  }
  if (args.num_kv_heads > max_rows / args.num_tokens) return cudaErrorInvalidValue;
  moves.num_rows = args.num_tokens * args.num_kv_heads;
  moves.slots = args.slot_mapping;
  moves.num_slots = args.num_slots;
  moves.num_heads = divisor(args.num_kv_heads);
  moves.block_size = divisor(args.block_size);
  moves.to_cache = to_cache;
  return launch_moves(api, moves, args.num_planes, dependent, stream);
}

cudaError_t launch_code_convert(const runtime_api& api, const kv_cache_view& src, const kv_cache_view& dst,
                                std::span<const block_copy> copies, bool keep_bits, bool dependent,
                                cudaStream_t stream) noexcept {
  const kv_layout& layout = src.layout;
  // Records of both sides move as bytes.
  const bool as_bytes = layout.k.code.is_record() && dst.layout.k.code.is_record();
  const kv_plane from = as_bytes ? detail::stored_plane(layout.k) : layout.k;
  const kv_plane to = as_bytes ? detail::stored_plane(dst.layout.k) : dst.layout.k;
  code_moves_args moves;
  moves.planes[0] = {side_of(src.k, from, src.k_scales), side_of(dst.k, to, dst.k_scales), from.head_dim};
  if (!layout.v_in_k) {
    moves.planes[1] = {side_of(src.v, layout.v, src.v_scales), side_of(dst.v, dst.layout.v, dst.v_scales),
                       layout.v.head_dim};
  }
  moves.num_heads = divisor(layout.num_kv_heads);
  moves.block_size = divisor(layout.block_size);
  moves.keep_bits = keep_bits;
  const std::int64_t rows_per_block = static_cast<std::int64_t>(layout.block_size) * layout.num_kv_heads;
  if (rows_per_block > max_rows) return cudaErrorInvalidValue;
  const auto most = static_cast<std::size_t>(std::min<std::int64_t>(max_rows / rows_per_block, max_pairs));
  while (!copies.empty()) {
    const auto part = copies.first(std::min(copies.size(), most));
    for (std::size_t i = 0; i < part.size(); ++i) moves.pairs[i] = {to_index(part[i].src), to_index(part[i].dst)};
    moves.num_rows = rows_per_block * static_cast<std::int64_t>(part.size());
    const cudaError_t status = launch_moves(api, moves, layout.v_in_k ? 1 : 2, dependent, stream);
    if (status != cudaSuccess) return status;
    copies = copies.subspan(part.size());
  }
  return cudaSuccess;
}

}  // namespace bifolio::inline v0_2::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The kernels of append and gather. Threads of a CTA go along a token's heads and dims first, so that hnd and nhd
/// are read and written in whole sectors. x_split goes through tile_transfer.cuh.

#include <algorithm>
#include <bifolio/dtype.hpp>
#include <cstdint>
#include <span>

#include "cuda/cache_ops/move_types.hpp"
#include "cuda/cache_ops/tile_transfer.cuh"
#include "cuda/cache_ops/transfer.hpp"
#include "cuda/device/convert.cuh"
#include "cuda/device/paged.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/host/divisor.hpp"

namespace bifolio::inline v0_2::cuda {

inline constexpr int transfer_threads = 256;

/// The list of slots, and how a slot comes apart.
struct slot_list {
  const std::int64_t* slots;  ///< [num_tokens]
  std::int64_t num_slots;

  [[nodiscard]] __device__ __forceinline__ tile_row row_of(std::int32_t token, const divisor&) const {
    return {0, token};
  }
  /// block < 0 for a slot that is to be skipped.
  [[nodiscard]] __device__ __forceinline__ tile_place place_of(std::int64_t token, const divisor& block_size) const {
    const std::int64_t slot = slots[token];
    if (slot < 0 || slot >= num_slots) return {-1, 0};
    const std::int64_t block = num_slots <= 0x7fffffff
                                   ? std::int64_t{block_size.quotient(static_cast<std::int32_t>(slot))}
                                   : slot / block_size.value;
    return {block, static_cast<std::int32_t>(slot - block * block_size.value)};
  }
};

/// Planes of one head_dim.
struct rows_args {
  transfer_plane planes[2];
  slot_list list;
  std::int64_t num_tokens;
  divisor block_size;
  divisor packs_per_head;
  std::int32_t packs_per_token;
};

/// A thread moves one pack: many small CTAs balance better than few with more loads in flight (4096 tokens, bf16,
/// H200: 9.9 µs, 11.2 with two tokens a thread, 10.2 with four). Grid: x over tokens, y over planes.
template <class Row, class Cache, int Count, bool ToCache>
__global__ void __launch_bounds__(transfer_threads, 8) transfer_rows(const __grid_constant__ rows_args args) {
  using row_pack = packed<Row, Count>;
  using cache_pack = packed<Cache, Count>;
  device::grid_dependency_launch();
  device::grid_dependency_wait();
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= args.num_tokens) return;
  const transfer_plane& plane = args.planes[blockIdx.y];
  for (auto item = static_cast<std::int32_t>(threadIdx.x); item < args.packs_per_token;
       item += static_cast<std::int32_t>(blockDim.x)) {
    const std::int32_t head = args.packs_per_head.quotient(item);
    const std::int32_t dim = (item - head * static_cast<std::int32_t>(args.packs_per_head.value)) * Count;
    Row* const row = static_cast<Row*>(plane.row) + token * plane.row_token_stride + head * plane.row_head_stride + dim;
    // An appended row is on its way while its slot is looked up, wanted or not.
    row_pack values;
    if constexpr (ToCache) values = load_packed<Count>(row);
    const tile_place place = args.list.place_of(token, args.block_size);
    if (place.block < 0) return;
    Cache* const cache = static_cast<Cache*>(plane.cache) +
                         token_offset(plane.strides, place.block, head, place.offset) +
                         dim_offset(plane.strides, plane.head_dim, dim);
    if constexpr (ToCache) {
      *reinterpret_cast<cache_pack*>(cache) = convert<Cache>(values);
    } else {
      *reinterpret_cast<row_pack*>(row) = convert<Row>(load_packed<Count>(cache));
    }
  }
}

/// Whether runs of `count` dims of one plane are contiguous and can be accessed at once.
template <class T>
[[nodiscard]] inline bool runs_of(const void* base, const kv_strides& strides, std::int32_t head_dim,
                                  std::int32_t count) noexcept {
  const std::int64_t step = count < static_cast<std::int32_t>(16 / sizeof(T)) ? count : 16 / sizeof(T);
  return (strides.chunk == 1 ? count == 1 : strides.dim == 1) && strides.chunk % count == 0 && head_dim % count == 0 &&
         strides.block % step == 0 && strides.head % step == 0 && strides.token % step == 0 &&
         (strides.chunk >= head_dim || strides.chunk_stride % step == 0) &&
         reinterpret_cast<std::uintptr_t>(base) % (static_cast<std::size_t>(step) * sizeof(T)) == 0;
}
template <class T>
[[nodiscard]] inline bool runs_of(const void* base, std::int64_t token_stride, std::int64_t head_stride,
                                  std::int32_t head_dim, std::int32_t count) noexcept {
  const std::int64_t step = count < static_cast<std::int32_t>(16 / sizeof(T)) ? count : 16 / sizeof(T);
  return head_dim % count == 0 && token_stride % step == 0 && head_stride % step == 0 &&
         reinterpret_cast<std::uintptr_t>(base) % (static_cast<std::size_t>(step) * sizeof(T)) == 0;
}

/// CTAs of transfer_threads: along x the packs of a token, as many as are a power of two, along y tokens.
struct row_grid {
  std::int64_t packs_per_token;
  unsigned lanes = 1;
  unsigned rows;
  std::int64_t blocks;

  row_grid(std::int64_t num_tokens, std::int64_t packs) noexcept : packs_per_token(packs) {
    while (lanes < packs && lanes < transfer_threads) lanes *= 2;
    rows = transfer_threads / lanes;
    blocks = (num_tokens + rows - 1) / rows;
  }
  [[nodiscard]] bool fits() const noexcept {
    return blocks <= 0x7fffffff && packs_per_token <= 0x7fffffff - transfer_threads;
  }
  [[nodiscard]] dim3 ctas(std::size_t num_planes) const noexcept {
    return {static_cast<unsigned>(blocks), static_cast<unsigned>(num_planes), 1};
  }
  [[nodiscard]] dim3 threads() const noexcept { return {lanes, rows, 1}; }
};

/// `planes` are of one head_dim, `Count` dims to a thread.
template <class Row, class Cache, int Count, bool ToCache>
[[nodiscard]] cudaError_t launch_rows(const runtime_api& api, const transfer_args& args,
                                      std::span<const transfer_plane> planes, bool dependent,
                                      cudaStream_t stream) noexcept {
  const std::int32_t packs_per_head = planes[0].head_dim / Count;
  const row_grid grid(args.num_tokens, std::int64_t{args.num_kv_heads} * packs_per_head);
  if (!grid.fits()) return cudaErrorInvalidValue;
  rows_args all = {};
  std::copy(planes.begin(), planes.end(), all.planes);
  all.list = {args.slot_mapping, args.num_slots};
  all.num_tokens = args.num_tokens;
  all.block_size = divisor(args.block_size);
  all.packs_per_head = divisor(packs_per_head);
  all.packs_per_token = static_cast<std::int32_t>(grid.packs_per_token);
  return launch(api, transfer_rows<Row, Cache, Count, ToCache>, grid.ctas(planes.size()), grid.threads(), 0, stream,
                dependent, all);
}

template <class Row, class Cache, bool ToCache>
[[nodiscard]] cudaError_t launch_tiles(const runtime_api& api, const transfer_args& args, bool dependent,
                                       cudaStream_t stream) noexcept {
  tile_args all = {};
  for (int p = 0; p < 2; ++p) {
    const transfer_plane& plane = args.planes[p];
    all.planes[p] = {plane.row, 0, plane.row_token_stride, plane.row_head_stride, plane.cache, plane.strides};
  }
  all.block_size = divisor(args.block_size);
  all.head_dim = args.planes[0].head_dim;
  all.num_tokens = static_cast<std::int32_t>(args.num_tokens);
  all.num_heads = args.num_kv_heads;
  const dim3 grid = tile_grid<ToCache>(all);
  return launch(api, transfer_tiles<Row, Cache, ToCache, slot_list>, grid, dim3(tile_threads), 0, stream, dependent,
                all, slot_list{args.slot_mapping, args.num_slots});
}

template <class Row, class Cache, bool ToCache>
[[nodiscard]] cudaError_t launch_transfer(const runtime_api& api, const transfer_args& args, bool dependent,
                                          cudaStream_t stream) noexcept {
  constexpr int wide = sizeof(Row) == 4 && sizeof(Cache) == 4 ? 4 : 8;
  const std::span<const transfer_plane> planes(args.planes, static_cast<std::size_t>(args.num_planes));
  const transfer_plane& k = args.planes[0];
  const transfer_plane& v = args.planes[1];
  const bool alike = args.num_planes == 2 && k.head_dim == v.head_dim;
  const auto rows_wide = [](const transfer_plane& plane) {
    return runs_of<Row>(plane.row, plane.row_token_stride, plane.row_head_stride, plane.head_dim, wide);
  };
  if (alike && rows_wide(k) && rows_wide(v) && fits_tile_grid(args.num_tokens, args.num_kv_heads, k.head_dim) &&
      is_tiled_x_split<Cache>(k.cache, v.cache, k.strides, v.strides, k.head_dim, args.block_size)) {
    return launch_tiles<Row, Cache, ToCache>(api, args, dependent, stream);
  }
  const auto is_wide = [&](const transfer_plane& plane) {
    return rows_wide(plane) && runs_of<Cache>(plane.cache, plane.strides, plane.head_dim, wide);
  };
  const auto launch_some = [&](std::span<const transfer_plane> some) {
    return is_wide(some[0]) ? launch_rows<Row, Cache, wide, ToCache>(api, args, some, dependent, stream)
                            : launch_rows<Row, Cache, 1, ToCache>(api, args, some, dependent, stream);
  };
  if (alike && is_wide(k) == is_wide(v)) return launch_some(planes);
  cudaError_t status = cudaSuccess;
  for (std::size_t p = 0; p < planes.size() && status == cudaSuccess; ++p) status = launch_some(planes.subspan(p, 1));
  return status;
}

template <bool ToCache>
[[nodiscard]] cudaError_t dispatch_transfer(const runtime_api& api, const transfer_args& args, bool dependent,
                                            cudaStream_t stream) noexcept {
  return visit_move(args.row_type, args.cache_type, [&]<class Row, class Cache>(move_types<Row, Cache>) {
    return launch_transfer<Row, Cache, ToCache>(api, args, dependent, stream);
  });
}

}  // namespace bifolio::inline v0_2::cuda

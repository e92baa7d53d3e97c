// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The kernels of append and gather. A thread moves `Count` dims of K and the same dims of V, so that two loads are
/// under way; threads of a block lie along a token's heads and dims first, so that hnd and nhd are read and written in
/// whole sectors.

#include <bifolio/dtype.hpp>
#include <cstdint>

#include "cuda/device/convert.cuh"
#include "cuda/device/paged.cuh"
#include "cuda/smxx/cache_ops/transfer.hpp"

namespace bifolio::cuda {

inline constexpr int transfer_threads = 256;

template <class Row, class Cache, int Count, bool ToCache>
__global__ void __launch_bounds__(transfer_threads, 4) transfer_rows(const __grid_constant__ transfer_args args) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= args.num_tokens) return;
  const std::int64_t slot = args.slot_mapping[token];
  if (slot < 0 || slot >= args.num_slots) return;
  const std::int64_t block = args.num_slots <= 0xffffffffll
                                 ? static_cast<std::uint32_t>(slot) / static_cast<std::uint32_t>(args.block_size)
                                 : slot / args.block_size;
  const auto offset = static_cast<std::int32_t>(slot - block * args.block_size);

  const std::int32_t per_head = args.head_dim / Count;
  const std::int64_t per_token = static_cast<std::int64_t>(per_head) * args.num_kv_heads;
  for (std::int64_t item = threadIdx.x; item < per_token; item += blockDim.x) {
    const auto head = static_cast<std::int32_t>(item / per_head);
    const auto dim = static_cast<std::int32_t>(item - static_cast<std::int64_t>(head) * per_head) * Count;
    using row_pack = packed<Row, Count>;
    using cache_pack = packed<Cache, Count>;
    auto* const row_k = reinterpret_cast<row_pack*>(static_cast<Row*>(args.row_k) + token * args.row_k_token_stride +
                                                    head * args.row_k_head_stride + dim);
    auto* const row_v = reinterpret_cast<row_pack*>(static_cast<Row*>(args.row_v) + token * args.row_v_token_stride +
                                                    head * args.row_v_head_stride + dim);
    auto* const cache_k = reinterpret_cast<cache_pack*>(static_cast<Cache*>(args.cache_k) +
                                                        token_offset(args.k_strides, block, head, offset) +
                                                        dim_offset(args.k_strides, args.head_dim, dim));
    auto* const cache_v = reinterpret_cast<cache_pack*>(static_cast<Cache*>(args.cache_v) +
                                                        token_offset(args.v_strides, block, head, offset) +
                                                        dim_offset(args.v_strides, args.head_dim, dim));
    row_pack k_of_row;
    row_pack v_of_row;
    cache_pack k_of_cache;
    cache_pack v_of_cache;
    if constexpr (ToCache) {
      if (args.with_k) k_of_row = *row_k;
      if (args.with_v) v_of_row = *row_v;
      if (args.with_k) *cache_k = convert<Cache>(k_of_row);
      if (args.with_v) *cache_v = convert<Cache>(v_of_row);
    } else {
      if (args.with_k) k_of_cache = *cache_k;
      if (args.with_v) v_of_cache = *cache_v;
      if (args.with_k) *row_k = convert<Row>(k_of_cache);
      if (args.with_v) *row_v = convert<Row>(v_of_cache);
    }
  }
}

/// One half whose tokens are neighbours in the cache and whose dims are not: V of x_split. A warp takes 32 tokens and
/// `Count` dims: rows are read or written in packs, the cache in runs of tokens. Grid: x over tokens, y over heads and
/// packs of dims.
template <class Row, class Cache, int Count, bool ToCache>
__global__ void __launch_bounds__(transfer_threads, 4) transfer_by_token(const __grid_constant__ transfer_args args) {
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * 32 + threadIdx.x;
  if (token >= args.num_tokens) return;
  const std::int64_t slot = args.slot_mapping[token];
  if (slot < 0 || slot >= args.num_slots) return;
  const std::int64_t block = args.num_slots <= 0xffffffffll
                                 ? static_cast<std::uint32_t>(slot) / static_cast<std::uint32_t>(args.block_size)
                                 : slot / args.block_size;
  const auto offset = static_cast<std::int32_t>(slot - block * args.block_size);
  const std::int32_t per_head = args.head_dim / Count;
  const std::int64_t num_packs = static_cast<std::int64_t>(per_head) * args.num_kv_heads;
  for (std::int64_t item = static_cast<std::int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; item < num_packs;
       item += static_cast<std::int64_t>(gridDim.y) * blockDim.y) {
    const auto head = static_cast<std::int32_t>(item / per_head);
    const auto dim = static_cast<std::int32_t>(item - static_cast<std::int64_t>(head) * per_head) * Count;
    auto* const row = reinterpret_cast<packed<Row, Count>*>(
        static_cast<Row*>(args.row_v) + token * args.row_v_token_stride + head * args.row_v_head_stride + dim);
    Cache* const cache = static_cast<Cache*>(args.cache_v) + token_offset(args.v_strides, block, head, offset);
    if constexpr (ToCache) {
      const packed<Cache, Count> values = convert<Cache>(*row);
#pragma unroll
      for (int e = 0; e < Count; ++e) cache[dim_offset(args.v_strides, args.head_dim, dim + e)] = values.values[e];
    } else {
      packed<Cache, Count> values;
#pragma unroll
      for (int e = 0; e < Count; ++e) values.values[e] = cache[dim_offset(args.v_strides, args.head_dim, dim + e)];
      *row = convert<Row>(values);
    }
  }
}

/// Whether runs of `count` dims of one half are contiguous and can be accessed at once.
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

/// The halves that args.with_k and with_v name, `Count` dims to a thread.
template <class Row, class Cache, int Count, bool ToCache>
[[nodiscard]] cudaError_t launch_rows(const runtime_api& api, const transfer_args& args, cudaStream_t stream) noexcept {
  const std::int64_t per_token = static_cast<std::int64_t>(args.num_kv_heads) * (args.head_dim / Count);
  unsigned lanes = 1;
  while (lanes < per_token && lanes < transfer_threads) lanes *= 2;
  const unsigned tokens = transfer_threads / lanes;
  const std::int64_t blocks = (args.num_tokens + tokens - 1) / tokens;
  if (blocks > 0x7fffffff) return cudaErrorInvalidValue;
  return launch(api, transfer_rows<Row, Cache, Count, ToCache>, dim3(static_cast<unsigned>(blocks)),
                dim3(lanes, tokens), 0, stream, false, args);
}

template <class Row, class Cache, bool ToCache>
[[nodiscard]] cudaError_t launch_transfer(const runtime_api& api, const transfer_args& all,
                                          cudaStream_t stream) noexcept {
  constexpr int wide = sizeof(Row) == 4 && sizeof(Cache) == 4 ? 4 : 8;
  const bool k_rows_wide = runs_of<Row>(all.row_k, all.row_k_token_stride, all.row_k_head_stride, all.head_dim, wide);
  const bool v_rows_wide = runs_of<Row>(all.row_v, all.row_v_token_stride, all.row_v_head_stride, all.head_dim, wide);
  const bool k_wide = k_rows_wide && runs_of<Cache>(all.cache_k, all.k_strides, all.head_dim, wide);
  const bool v_wide = v_rows_wide && runs_of<Cache>(all.cache_v, all.v_strides, all.head_dim, wide);
  const bool v_by_token = !v_wide && v_rows_wide && all.v_strides.token < all.v_strides.dim && all.block_size >= 8;
  if (k_wide == v_wide && !v_by_token) {
    return k_wide ? launch_rows<Row, Cache, wide, ToCache>(api, all, stream)
                  : launch_rows<Row, Cache, 1, ToCache>(api, all, stream);
  }

  transfer_args half = all;
  half.with_v = false;
  cudaError_t status = k_wide ? launch_rows<Row, Cache, wide, ToCache>(api, half, stream)
                              : launch_rows<Row, Cache, 1, ToCache>(api, half, stream);
  if (status != cudaSuccess) return status;
  half.with_k = false;
  half.with_v = true;
  if (!v_by_token) {
    return v_wide ? launch_rows<Row, Cache, wide, ToCache>(api, half, stream)
                  : launch_rows<Row, Cache, 1, ToCache>(api, half, stream);
  }
  constexpr unsigned packs = transfer_threads / 32;
  const std::int64_t num_packs = static_cast<std::int64_t>(half.head_dim / wide) * half.num_kv_heads;
  const std::int64_t token_blocks = (half.num_tokens + 31) / 32;
  if (token_blocks > 0x7fffffff) return cudaErrorInvalidValue;
  const dim3 grid(
      static_cast<unsigned>(token_blocks),
      static_cast<unsigned>((num_packs + packs - 1) / packs < 1024 ? (num_packs + packs - 1) / packs : 1024));
  return launch(api, transfer_by_token<Row, Cache, wide, ToCache>, grid, dim3(32, packs), 0, stream, false, half);
}

/// Types that keep their bits share a kernel: float16 stands for both 16-bit types.
template <bool ToCache>
[[nodiscard]] cudaError_t dispatch_transfer(const runtime_api& api, const transfer_args& args,
                                            cudaStream_t stream) noexcept {
  const dtype row = args.row_type;
  const dtype cache = args.cache_type;
  if (row == cache) {
    return row == dtype::f32 ? launch_transfer<float, float, ToCache>(api, args, stream)
                             : launch_transfer<float16, float16, ToCache>(api, args, stream);
  }
  if (row == dtype::f32) {
    return cache == dtype::f16 ? launch_transfer<float, float16, ToCache>(api, args, stream)
                               : launch_transfer<float, bfloat16, ToCache>(api, args, stream);
  }
  if (row == dtype::f16) {
    return cache == dtype::f32 ? launch_transfer<float16, float, ToCache>(api, args, stream)
                               : launch_transfer<float16, bfloat16, ToCache>(api, args, stream);
  }
  return cache == dtype::f32 ? launch_transfer<bfloat16, float, ToCache>(api, args, stream)
                             : launch_transfer<bfloat16, float16, ToCache>(api, args, stream);
}

}  // namespace bifolio::cuda

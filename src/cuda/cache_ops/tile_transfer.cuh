// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Between rows, whose dims are contiguous, and x_split, whose K has 16 bytes of dims a token and whose V has its
/// tokens side by side: 32 tokens × 128 dims of one head pass through shared memory, K and V together, so that both
/// sides are walked in accesses of 16 bytes, in the order in which each is contiguous.
///
/// Tokens come in any order. Where 16 bytes of V are one aligned run of consecutive slots of the list they are moved at
/// once, else element by element.

#include <cstdint>

#include "cuda/device/convert.cuh"
#include "cuda/device/paged.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/host/divisor.hpp"

namespace bifolio::inline v0_2::cuda {

inline constexpr int tile_tokens = 32;
inline constexpr int tile_dims = 128;
inline constexpr int tile_threads = 256;

/// Rows [token, head, dim] and the x_split cache, one plane.
struct tile_plane {
  void* row;
  std::int64_t row_block_stride;  ///< of the source's block of rows, if it has any
  std::int64_t row_token_stride;
  std::int64_t row_head_stride;
  void* cache;
  kv_strides strides;
};

struct tile_args {
  tile_plane planes[2];  ///< K, V
  divisor block_size;
  divisor fastest;  ///< of the grid: heads or tiles of tokens, see tile_grid
  std::int32_t num_heads;
  std::int32_t head_dim;
  std::int32_t num_tokens;
};

/// Whether a grid can be as large as this takes.
[[nodiscard]] inline bool fits_tile_grid(std::int64_t num_tokens, std::int32_t num_heads,
                                         std::int32_t head_dim) noexcept {
  return (num_tokens / tile_tokens + 1) * num_heads < 0x7fffffff && num_tokens < 0x7fffffff - tile_tokens &&
         head_dim <= 65535 * tile_dims;
}
/// CTAs that run at the same time write neighbouring memory: on the way to the cache all heads of some tokens,
/// on the way back all tokens of a head. (Measured; either way round costs 6 %.)
template <bool ToCache>
[[nodiscard]] inline dim3 tile_grid(tile_args& args) noexcept {
  const std::int32_t tiles = (args.num_tokens + tile_tokens - 1) / tile_tokens;
  args.fastest = divisor(ToCache ? args.num_heads : tiles);
  return {static_cast<unsigned>(tiles) * static_cast<unsigned>(args.num_heads),
          static_cast<unsigned>((args.head_dim + tile_dims - 1) / tile_dims), 1};
}

/// Where a token's row is.
struct tile_row {
  std::int64_t block;
  std::int64_t token;
};
/// Where a token is in the cache; block < 0: it is skipped.
struct tile_place {
  std::int64_t block;
  std::int32_t offset;
};

/// Whether a cache has the shape that this kernel takes.
template <class Cache>
[[nodiscard]] inline bool is_tiled_x_split(const void* cache_k, const void* cache_v, const kv_strides& k,
                                           const kv_strides& v, std::int32_t head_dim,
                                           std::int32_t block_size) noexcept {
  constexpr int run = 16 / static_cast<int>(sizeof(Cache));
  const auto aligned = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; };
  return k.chunk == run && k.dim == 1 && k.token == run && k.chunk_stride % run == 0 && k.head % run == 0 &&
         k.block % run == 0 && v.token == 1 && v.chunk >= head_dim && v.dim % run == 0 && v.head % run == 0 &&
         v.block % run == 0 && block_size % run == 0 && head_dim % 8 == 0 && aligned(cache_k) && aligned(cache_v);
}

/// Source: row_of(token, block_size) and place_of(token, block_size). Grid: x over tokens and heads, y over dims.
template <class Row, class Cache, bool ToCache, class Source>
__global__ void __launch_bounds__(tile_threads, sizeof(Row) + sizeof(Cache) == 4 ? 4 : 2)
    transfer_tiles(const __grid_constant__ tile_args args, const __grid_constant__ Source source) {
  static_assert((sizeof(Row) == 2 || sizeof(Row) == 4) && (sizeof(Cache) == 2 || sizeof(Cache) == 4));
  constexpr int count = 16 / static_cast<int>(sizeof(Row));  // dims of a row in 16 bytes
  constexpr int run = 16 / static_cast<int>(sizeof(Cache));  // tokens of V, and dims of K, in 16 bytes
  // Eight bytes more than a row: the eight tokens that a thread transposes are in different banks for its neighbours.
  constexpr int pitch = tile_dims + 8 / static_cast<int>(sizeof(Cache));
  constexpr int row_packs = tile_dims / count;
  constexpr int row_steps = tile_tokens * row_packs / tile_threads;
  constexpr int k_steps = tile_tokens * (tile_dims / run) / tile_threads;
  constexpr int dims_at_once = 4 / static_cast<int>(sizeof(Cache));  // one word of shared memory
  constexpr int v_lanes = tile_dims / dims_at_once;
  constexpr int side_by_side = sizeof(Cache) == 2 ? 2 : 4;  // runs of tokens that neighbouring threads take

  __shared__ __align__(16) Cache staged[2][tile_tokens * pitch];
  __shared__ std::int64_t offsets[2][tile_tokens];  // of a token in the cache, −1: skipped
  __shared__ std::int32_t runs[tile_tokens / run];  // first tokens
  __shared__ std::int32_t singles[tile_tokens];
  __shared__ std::int32_t num_runs_shared;
  __shared__ std::int32_t num_singles_shared;

  device::grid_dependency_launch();
  device::grid_dependency_wait();
  const int thread = static_cast<int>(threadIdx.x);
  const std::int32_t slow = args.fastest.quotient(static_cast<std::int32_t>(blockIdx.x));
  const auto fast = static_cast<std::int32_t>(blockIdx.x - static_cast<unsigned>(slow) * args.fastest.value);
  const std::int32_t head = ToCache ? fast : slow;
  const std::int32_t first_token = (ToCache ? slow : fast) * tile_tokens;
  const std::int32_t first_dim = static_cast<std::int32_t>(blockIdx.y) * tile_dims;
  const std::int32_t num_dims = min(tile_dims, args.head_dim - first_dim);

  Cache* const cache_k = static_cast<Cache*>(args.planes[0].cache) + head * args.planes[0].strides.head;
  Cache* const cache_v = static_cast<Cache*>(args.planes[1].cache) + head * args.planes[1].strides.head;
  const std::int64_t chunk_stride = args.planes[0].strides.chunk_stride;
  const std::int64_t dim_stride = args.planes[1].strides.dim;
  const auto find_places = [&] {
    if (thread >= 32) return;
    const bool exists = first_token + thread < args.num_tokens;
    const tile_place place = source.place_of(min(first_token + thread, args.num_tokens - 1), args.block_size);
    const bool valid = exists && place.block >= 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const tile_plane& plane = args.planes[h];
      offsets[h][thread] = valid ? place.block * plane.strides.block + place.offset * plane.strides.token : -1;
    }
    // Is this token one of an aligned run?
    const std::int32_t inside = place.offset % run;
    const std::int32_t start = thread - inside;
    bool whole = valid && start >= 0 && start + run <= tile_tokens;
#pragma unroll
    for (int i = 0; i < run; ++i) {
      const int lane = (start + i) & 31;
      const auto block = __shfl_sync(0xffffffffu, valid ? place.block : -1, lane);
      const auto offset = __shfl_sync(0xffffffffu, place.offset, lane);
      whole = whole && block == place.block && offset == place.offset - inside + i;
    }
    const unsigned before = (1u << thread) - 1;
    const unsigned leads = __ballot_sync(0xffffffffu, whole && inside == 0);
    const unsigned alone = __ballot_sync(0xffffffffu, valid && !whole);
    if (whole && inside == 0) runs[__popc(leads & before)] = thread;
    if (valid && !whole) singles[__popc(alone & before)] = thread;
    if (thread == 0) {
      num_runs_shared = __popc(leads);
      num_singles_shared = __popc(alone);
    }
  };
  const auto row_at = [&](int h, std::int32_t token, std::int32_t dim) {
    const tile_plane& plane = args.planes[h];
    const tile_row row = source.row_of(min(first_token + token, args.num_tokens - 1), args.block_size);
    return static_cast<Row*>(plane.row) + row.block * plane.row_block_stride + row.token * plane.row_token_stride +
           head * plane.row_head_stride + first_dim + dim;
  };
  // 8 and 16 bytes to and from shared memory, whose rows are aligned to eight.
  const auto put = [](Cache* to, const uint4& value) {
    reinterpret_cast<uint2*>(to)[0] = make_uint2(value.x, value.y);
    reinterpret_cast<uint2*>(to)[1] = make_uint2(value.z, value.w);
  };
  const auto take = [](const Cache* from) {
    const uint2 lo = reinterpret_cast<const uint2*>(from)[0];
    const uint2 hi = reinterpret_cast<const uint2*>(from)[1];
    return make_uint4(lo.x, lo.y, hi.x, hi.y);
  };
  // The i-th of a thread's runs of V and where its dims begin.
  const auto v_task = [&](int i, std::int32_t num_runs, std::int32_t& index, std::int32_t& dim) {
    const int task = thread + i * tile_threads;
    index = task / (side_by_side * v_lanes) * side_by_side + task % side_by_side;
    dim = task / side_by_side % v_lanes * dims_at_once;
    return index < num_runs && dim < num_dims;
  };
  constexpr int v_steps = (tile_tokens / run) * v_lanes / tile_threads;
  static_assert(v_steps * tile_threads == (tile_tokens / run) * v_lanes && k_steps >= 1 && row_steps >= 1);

  if constexpr (ToCache) {
    // Rows to shared memory; with two bytes an element all loads of both planes are under way together.
    constexpr int planes_at_once = sizeof(Row) == 2 ? 2 : 1;
#pragma unroll
    for (int h0 = 0; h0 < 2; h0 += planes_at_once) {
      packed<Row, count> held[planes_at_once][row_steps];
#pragma unroll
      for (int h = 0; h < planes_at_once; ++h)
#pragma unroll
        for (int i = 0; i < row_steps; ++i) {
          const int task = thread + i * tile_threads;
          const int dim = min(task % row_packs * count, num_dims - count);
          held[h][i] = load_packed<count>(row_at(h0 + h, task / row_packs, dim));
        }
      if (h0 == 0) find_places();
#pragma unroll
      for (int h = 0; h < planes_at_once; ++h)
#pragma unroll
        for (int i = 0; i < row_steps; ++i) {
          const int task = thread + i * tile_threads;
          const packed<Cache, count> values = convert<Cache>(held[h][i]);
          Cache* const to = &staged[h0 + h][task / row_packs * pitch + task % row_packs * count];
          if constexpr (count < run) {
            *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(values.values);
          } else {
#pragma unroll
            for (int e = 0; e < count; e += run) put(to + e, *reinterpret_cast<const uint4*>(values.values + e));
          }
        }
    }
    __syncthreads();

    const std::int32_t num_runs = num_runs_shared;
    const std::int32_t num_singles = num_singles_shared;
#pragma unroll
    for (int i = 0; i < k_steps; ++i) {
      const int task = thread + i * tile_threads;
      const int token = task % tile_tokens;
      const int dim = task / tile_tokens * run;
      if (offsets[0][token] < 0 || dim >= num_dims) continue;
      *reinterpret_cast<uint4*>(cache_k + offsets[0][token] + (first_dim + dim) / run * chunk_stride) =
          take(&staged[0][token * pitch + dim]);
    }
#pragma unroll
    for (int i = 0; i < v_steps; ++i) {
      std::int32_t index;
      std::int32_t dim;
      if (!v_task(i, num_runs, index, dim)) continue;
      const std::int32_t token = runs[index];
      std::uint32_t words[run];
#pragma unroll
      for (int t = 0; t < run; ++t) {
        words[t] = *reinterpret_cast<const std::uint32_t*>(&staged[1][(token + t) * pitch + dim]);
      }
      Cache* const to = cache_v + offsets[1][token] + (first_dim + dim) * dim_stride;
      if constexpr (sizeof(Cache) == 4) {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
        uint4 even;
        uint4 odd;
        even.x = __byte_perm(words[0], words[1], 0x5410), odd.x = __byte_perm(words[0], words[1], 0x7632);
        even.y = __byte_perm(words[2], words[3], 0x5410), odd.y = __byte_perm(words[2], words[3], 0x7632);
        even.z = __byte_perm(words[4], words[5], 0x5410), odd.z = __byte_perm(words[4], words[5], 0x7632);
        even.w = __byte_perm(words[6], words[7], 0x5410), odd.w = __byte_perm(words[6], words[7], 0x7632);
        *reinterpret_cast<uint4*>(to) = even;
        *reinterpret_cast<uint4*>(to + dim_stride) = odd;
      }
    }
    for (int task = thread; task < num_singles * tile_dims; task += tile_threads) {
      const std::int32_t token = singles[task / tile_dims];
      const int dim = task % tile_dims;
      if (dim < num_dims) {
        cache_v[offsets[1][token] + (first_dim + dim) * dim_stride] = staged[1][token * pitch + dim];
      }
    }
  } else {
    find_places();
    __syncthreads();
    const std::int32_t num_runs = num_runs_shared;
    const std::int32_t num_singles = num_singles_shared;
    uint4 k_held[k_steps];
    uint4 v_held[v_steps][dims_at_once];
#pragma unroll
    for (int i = 0; i < k_steps; ++i) {
      const int task = thread + i * tile_threads;
      const std::int64_t offset = offsets[0][task % tile_tokens];
      const int dim = min(task / tile_tokens * run, num_dims - run);
      // A token that is skipped reads the cache's first place, which is there.
      k_held[i] =
          *reinterpret_cast<const uint4*>(cache_k + (offset < 0 ? 0 : offset) + (first_dim + dim) / run * chunk_stride);
    }
#pragma unroll
    for (int i = 0; i < v_steps; ++i) {
      std::int32_t index;
      std::int32_t dim;
      const bool there = v_task(i, num_runs, index, dim);
      const Cache* const from =
          cache_v + (there ? offsets[1][runs[index]] + (first_dim + dim) * dim_stride : first_dim * dim_stride);
#pragma unroll
      for (int d = 0; d < dims_at_once; ++d) v_held[i][d] = *reinterpret_cast<const uint4*>(from + d * dim_stride);
    }
#pragma unroll
    for (int i = 0; i < k_steps; ++i) {
      const int task = thread + i * tile_threads;
      put(&staged[0][task % tile_tokens * pitch + task / tile_tokens * run], k_held[i]);
    }
#pragma unroll
    for (int i = 0; i < v_steps; ++i) {
      std::int32_t index;
      std::int32_t dim;
      if (!v_task(i, num_runs, index, dim)) continue;
      const std::int32_t token = runs[index];
      std::uint32_t words[run];
      if constexpr (sizeof(Cache) == 4) {
        words[0] = v_held[i][0].x, words[1] = v_held[i][0].y, words[2] = v_held[i][0].z, words[3] = v_held[i][0].w;
      } else {
        const uint4 even = v_held[i][0];
        const uint4 odd = v_held[i][1];
        words[0] = __byte_perm(even.x, odd.x, 0x5410), words[1] = __byte_perm(even.x, odd.x, 0x7632);
        words[2] = __byte_perm(even.y, odd.y, 0x5410), words[3] = __byte_perm(even.y, odd.y, 0x7632);
        words[4] = __byte_perm(even.z, odd.z, 0x5410), words[5] = __byte_perm(even.z, odd.z, 0x7632);
        words[6] = __byte_perm(even.w, odd.w, 0x5410), words[7] = __byte_perm(even.w, odd.w, 0x7632);
      }
#pragma unroll
      for (int t = 0; t < run; ++t) {
        *reinterpret_cast<std::uint32_t*>(&staged[1][(token + t) * pitch + dim]) = words[t];
      }
    }
    for (int task = thread; task < num_singles * tile_dims; task += tile_threads) {
      const std::int32_t token = singles[task / tile_dims];
      const int dim = task % tile_dims;
      if (dim < num_dims) {
        staged[1][token * pitch + dim] = cache_v[offsets[1][token] + (first_dim + dim) * dim_stride];
      }
    }
    __syncthreads();

#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < row_steps; ++i) {
        const int task = thread + i * tile_threads;
        const int token = task / row_packs;
        const int dim = task % row_packs * count;
        if (offsets[h][token] < 0 || dim >= num_dims) continue;
        packed<Cache, count> values;
        if constexpr (count < run) {
          *reinterpret_cast<uint2*>(values.values) = *reinterpret_cast<const uint2*>(&staged[h][token * pitch + dim]);
        } else {
#pragma unroll
          for (int e = 0; e < count; e += run) {
            *reinterpret_cast<uint4*>(values.values + e) = take(&staged[h][token * pitch + dim + e]);
          }
        }
        *reinterpret_cast<packed<Row, count>*>(row_at(h, token, dim)) = convert<Row>(values);
      }
  }
}

}  // namespace bifolio::inline v0_2::cuda

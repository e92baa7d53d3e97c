// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/cache_ops/block_ops.hpp"
#include "cuda/cache_ops/move_types.hpp"
#include "cuda/cache_ops/transfer.cuh"

namespace bifolio::inline v0_2::cuda {
namespace {

constexpr int threads = 256;
constexpr int tile_tokens = 32;
constexpr int tile_dims = 128;
constexpr int max_pairs = 430;

/// How one side of a tile is walked.
enum class walk : std::int32_t {
  packs,   ///< packs of dims, dims fastest
  dims,    ///< single dims, dims fastest
  tokens,  ///< single dims, tokens fastest: V of x_split
};

struct id_pair {
  std::int32_t src;
  std::int32_t dst;
};

struct plane {
  const void* src;
  void* dst;
  kv_strides src_strides;
  kv_strides dst_strides;
  walk src_walk;
  walk dst_walk;
};

/// One plane, or two of one head_dim.
struct convert_args {
  plane planes[2];
  std::int32_t num_kv_heads;
  std::int32_t head_dim;
  std::int32_t block_size;
  std::int32_t token_tiles;
  std::int32_t dim_tiles;
  divisor chunks_per_block;  ///< of convert_packs, like the two below
  divisor packs_per_row;
  divisor packs_per_head;
  std::int32_t num_pairs;
  id_pair pairs[max_pairs];
};
static_assert(sizeof(convert_args) <= 4096);

/// A tile of one head of one block: [tile_tokens, tile_dims] at most.
struct tile {
  id_pair pair;
  std::int32_t head;
  std::int32_t first_token;
  std::int32_t first_dim;
  std::int32_t num_tokens;
  std::int32_t num_dims;
};

__device__ __forceinline__ tile tile_of(const convert_args& args, std::int64_t index) {
  tile t;
  const auto dims = static_cast<std::int32_t>(index % args.dim_tiles);
  index /= args.dim_tiles;
  const auto tokens = static_cast<std::int32_t>(index % args.token_tiles);
  index /= args.token_tiles;
  t.head = static_cast<std::int32_t>(index % args.num_kv_heads);
  t.pair = args.pairs[index / args.num_kv_heads];
  t.first_token = tokens * tile_tokens;
  t.first_dim = dims * tile_dims;
  t.num_tokens = min(tile_tokens, args.block_size - t.first_token);
  t.num_dims = min(tile_dims, args.head_dim - t.first_dim);
  return t;
}

/// Calls body(token, dim) for every single element of the tile, or every pack's first, in the order of `how`.
template <int Count, class Body>
__device__ __forceinline__ void walk_tile(const tile& t, walk how, Body body) {
  if (how == walk::tokens) {
    for (int i = threadIdx.x; i < t.num_tokens * t.num_dims; i += threads) body(i % t.num_tokens, i / t.num_tokens);
  } else {
    const int per_token = how == walk::packs ? t.num_dims / Count : t.num_dims;
    const int step = how == walk::packs ? Count : 1;
    for (int i = threadIdx.x; i < t.num_tokens * per_token; i += threads) {
      body(i / per_token, i % per_token * step);
    }
  }
}

/// Both sides in packs of dims, one to a thread. Grid: x over pairs and chunks of a block, y over planes.
template <class Src, class Dst>
__global__ void __launch_bounds__(threads, 8) convert_packs(const __grid_constant__ convert_args args) {
  constexpr int count = sizeof(Src) == 4 && sizeof(Dst) == 4 ? 4 : 8;
  device::grid_dependency_launch();
  device::grid_dependency_wait();
  const plane& side = args.planes[blockIdx.y];
  const auto per_row = static_cast<std::int32_t>(args.packs_per_row.value);
  const auto per_head = static_cast<std::int32_t>(args.packs_per_head.value);
  const std::int32_t index = args.chunks_per_block.quotient(static_cast<std::int32_t>(blockIdx.x));
  const std::int32_t chunk =
      static_cast<std::int32_t>(blockIdx.x) - index * static_cast<std::int32_t>(args.chunks_per_block.value);
  const id_pair pair = args.pairs[index];
  const std::int32_t item = chunk * threads + static_cast<std::int32_t>(threadIdx.x);
  if (item >= per_head * args.num_kv_heads) return;
  const std::int32_t head = args.packs_per_head.quotient(item);
  const std::int32_t in_head = item - head * per_head;
  const std::int32_t token = args.packs_per_row.quotient(in_head);
  const std::int32_t dim = (in_head - token * per_row) * count;
  const Src* const src = static_cast<const Src*>(side.src) + token_offset(side.src_strides, pair.src, head, token) +
                         dim_offset(side.src_strides, args.head_dim, dim);
  Dst* const dst = static_cast<Dst*>(side.dst) + token_offset(side.dst_strides, pair.dst, head, token) +
                   dim_offset(side.dst_strides, args.head_dim, dim);
  *reinterpret_cast<packed<Dst, count>*>(dst) = convert<Dst>(load_packed<count>(src));
}

/// Anything else, through shared memory, so that each side is walked in the order in which it is contiguous. Grid: x
/// over tiles, y over planes.
template <class Src, class Dst>
__global__ void __launch_bounds__(threads, 4) convert_tiles(const __grid_constant__ convert_args args) {
  constexpr int count = sizeof(Src) == 4 && sizeof(Dst) == 4 ? 4 : 8;
  // A row of packs plus one: neighbouring tokens start in different banks.
  constexpr int row = tile_dims + 16 / static_cast<int>(sizeof(Src));
  __shared__ __align__(16) Src staged[tile_tokens * row];

  device::grid_dependency_launch();
  device::grid_dependency_wait();
  const plane& side = args.planes[blockIdx.y];
  const tile t = tile_of(args, blockIdx.x);
  const Src* const src = static_cast<const Src*>(side.src);
  Dst* const dst = static_cast<Dst*>(side.dst);
  const auto src_at = [&](int token, int dim) {
    return token_offset(side.src_strides, t.pair.src, t.head, t.first_token + token) +
           dim_offset(side.src_strides, args.head_dim, t.first_dim + dim);
  };
  const auto dst_at = [&](int token, int dim) {
    return token_offset(side.dst_strides, t.pair.dst, t.head, t.first_token + token) +
           dim_offset(side.dst_strides, args.head_dim, t.first_dim + dim);
  };
  if (side.src_walk == walk::packs) {
    walk_tile<count>(t, walk::packs, [&](int token, int dim) {
      *reinterpret_cast<packed<Src, count>*>(staged + token * row + dim) = load_packed<count>(src + src_at(token, dim));
    });
  } else {
    walk_tile<1>(t, side.src_walk, [&](int token, int dim) { staged[token * row + dim] = src[src_at(token, dim)]; });
  }
  __syncthreads();
  if (side.dst_walk == walk::packs) {
    walk_tile<count>(t, walk::packs, [&](int token, int dim) {
      *reinterpret_cast<packed<Dst, count>*>(dst + dst_at(token, dim)) =
          convert<Dst>(load_packed<count>(staged + token * row + dim));
    });
  } else {
    walk_tile<1>(t, side.dst_walk,
                 [&](int token, int dim) { dst[dst_at(token, dim)] = convert<Dst>(staged[token * row + dim]); });
  }
}

template <class T>
walk walk_of(const void* base, const kv_strides& strides, std::int32_t head_dim, std::int32_t count) noexcept {
  if (runs_of<T>(base, strides, head_dim, count)) return walk::packs;
  return strides.token < strides.dim ? walk::tokens : walk::dims;
}

/// Planes `first_plane` (0: K) … `last_plane`, which are of one head_dim.
template <class Src, class Dst>
cudaError_t launch_planes(const runtime_api& api, const kv_cache_view& src, const kv_cache_view& dst, int first_plane,
                          int last_plane, std::span<const block_copy> copies, bool dependent,
                          cudaStream_t stream) noexcept {
  constexpr int count = sizeof(Src) == 4 && sizeof(Dst) == 4 ? 4 : 8;
  const kv_plane& first = first_plane == 0 ? src.layout.k : src.layout.v;
  const std::int32_t dims = first.head_dim;
  convert_args args;
  bool packed_everywhere = true;
  for (int p = first_plane; p <= last_plane; ++p) {
    const void* const from = p == 0 ? src.k : src.v;
    void* const to = p == 0 ? dst.k : dst.v;
    const kv_strides& from_strides = (p == 0 ? src.layout.k : src.layout.v).strides;
    const kv_strides& to_strides = (p == 0 ? dst.layout.k : dst.layout.v).strides;
    plane& out = args.planes[p - first_plane];
    out = {from,
           to,
           from_strides,
           to_strides,
           walk_of<Src>(from, from_strides, dims, count),
           walk_of<Dst>(to, to_strides, dims, count)};
    packed_everywhere = packed_everywhere && out.src_walk == walk::packs && out.dst_walk == walk::packs;
  }
  args.num_kv_heads = src.layout.num_kv_heads;
  args.head_dim = dims;
  args.block_size = src.layout.block_size;
  args.token_tiles = (args.block_size - 1) / tile_tokens + 1;
  args.dim_tiles = (dims - 1) / tile_dims + 1;
  const std::int64_t num_packs = src.layout.block_elements(first) / count;
  const bool direct = packed_everywhere && num_packs <= 0x3fffffff;
  const std::int64_t chunks = direct ? (num_packs + threads - 1) / threads : 0;
  if (direct) {
    args.chunks_per_block = divisor(static_cast<std::int32_t>(chunks));
    args.packs_per_row = divisor(dims / count);
    args.packs_per_head = divisor(dims / count * args.block_size);
  }
  const std::int64_t parts_per_pair =
      direct ? chunks : static_cast<std::int64_t>(args.token_tiles) * args.dim_tiles * args.num_kv_heads;
  if (parts_per_pair > 0x7fffffff) return cudaErrorInvalidValue;
  const std::int64_t most = std::clamp<std::int64_t>(0x7fffffff / parts_per_pair, 1, max_pairs);
  while (!copies.empty()) {
    const auto part = copies.first(std::min(copies.size(), static_cast<std::size_t>(most)));
    args.num_pairs = static_cast<std::int32_t>(part.size());
    for (std::size_t i = 0; i < part.size(); ++i) args.pairs[i] = {to_index(part[i].src), to_index(part[i].dst)};
    const dim3 grid(static_cast<unsigned>(parts_per_pair * args.num_pairs),
                    static_cast<unsigned>(last_plane - first_plane + 1));
    const cudaError_t status =
        direct ? launch(api, convert_packs<Src, Dst>, grid, dim3(threads), 0, stream, dependent, args)
               : launch(api, convert_tiles<Src, Dst>, grid, dim3(threads), 0, stream, dependent, args);
    if (status != cudaSuccess) return status;
    copies = copies.subspan(part.size());
  }
  return cudaSuccess;
}

template <class Src, class Dst>
cudaError_t launch_types(const runtime_api& api, const kv_cache_view& src, const kv_cache_view& dst,
                         std::span<const block_copy> copies, bool dependent, cudaStream_t stream) noexcept {
  const kv_layout& layout = src.layout;
  if (!layout.v_in_k && layout.k.head_dim == layout.v.head_dim) {
    return launch_planes<Src, Dst>(api, src, dst, 0, 1, copies, dependent, stream);
  }
  const cudaError_t status = launch_planes<Src, Dst>(api, src, dst, 0, 0, copies, dependent, stream);
  if (status != cudaSuccess || layout.v_in_k) return status;
  return launch_planes<Src, Dst>(api, src, dst, 1, 1, copies, dependent, stream);
}

}  // namespace

cudaError_t launch_convert_blocks(const runtime_api& api, const kv_cache_view& src, const kv_cache_view& dst,
                                  std::span<const block_copy> copies, bool dependent, cudaStream_t stream) noexcept {
  if (cudaError_t status = cudaSuccess; try_launch_convert_x_split(api, src, dst, copies, dependent, stream, status)) {
    return status;
  }
  return visit_move(src.layout.k.code.type, dst.layout.k.code.type, [&]<class Src, class Dst>(move_types<Src, Dst>) {
    return launch_types<Src, Dst>(api, src, dst, copies, dependent, stream);
  });
}

}  // namespace bifolio::inline v0_2::cuda

// SPDX-License-Identifier: Apache-2.0
// Blocks of x_split caches to and from caches whose dims are contiguous.
#include <algorithm>

#include "cuda/cache_ops/block_ops.hpp"
#include "cuda/cache_ops/move_types.hpp"
#include "cuda/cache_ops/tile_transfer.cuh"

namespace bifolio::inline v0_2::cuda {
namespace {

constexpr int max_pairs = 400;

/// The tokens of one block after another.
struct pair_list {
  struct pair {
    std::int32_t row_block;
    std::int32_t cache_block;
  };
  pair pairs[max_pairs];

  [[nodiscard]] __device__ __forceinline__ tile_row row_of(std::int32_t token, const divisor& block_size) const {
    const std::int32_t index = block_size.quotient(token);
    return {pairs[index].row_block, token - index * static_cast<std::int32_t>(block_size.value)};
  }
  [[nodiscard]] __device__ __forceinline__ tile_place place_of(std::int32_t token, const divisor& block_size) const {
    const std::int32_t index = block_size.quotient(token);
    return {pairs[index].cache_block, token - index * static_cast<std::int32_t>(block_size.value)};
  }
};
static_assert(sizeof(pair_list) + sizeof(tile_args) <= 4096);

/// Whether packs of dims of the other side can be accessed at once.
template <class T>
bool has_packed_rows(const void* k, const void* v, const kv_layout& layout) noexcept {
  constexpr std::int64_t step = 16 / static_cast<std::int64_t>(sizeof(T));
  const auto packed = [&](const void* base, const kv_plane& plane) {
    const kv_strides& s = plane.strides;
    return s.dim == 1 && s.chunk >= plane.head_dim && s.block % step == 0 && s.head % step == 0 &&
           s.token % step == 0 && reinterpret_cast<std::uintptr_t>(base) % 16 == 0;
  };
  return packed(k, layout.k) && packed(v, layout.v);
}

template <class Row, class Cache, bool ToCache>
bool try_launch(const runtime_api& api, const kv_cache_view& rows, const kv_cache_view& cache,
                std::span<const block_copy> copies, bool dependent, cudaStream_t stream, cudaError_t& status) noexcept {
  const kv_layout& layout = cache.layout;
  const kv_strides& k = layout.k.strides;
  const kv_strides& v = layout.v.strides;
  const std::int32_t head_dim = layout.k.head_dim;
  if (layout.v_in_k || head_dim != layout.v.head_dim || !has_packed_rows<Row>(rows.k, rows.v, rows.layout) ||
      !is_tiled_x_split<Cache>(cache.k, cache.v, k, v, head_dim, layout.block_size) ||
      !fits_tile_grid(std::int64_t{layout.block_size} * max_pairs, layout.num_kv_heads, head_dim)) {
    return false;
  }
  tile_args args = {};
  const kv_strides& row_k = rows.layout.k.strides;
  const kv_strides& row_v = rows.layout.v.strides;
  args.planes[0] = {rows.k, row_k.block, row_k.token, row_k.head, cache.k, k};
  args.planes[1] = {rows.v, row_v.block, row_v.token, row_v.head, cache.v, v};
  args.block_size = divisor(layout.block_size);
  args.num_heads = layout.num_kv_heads;
  args.head_dim = head_dim;
  status = cudaSuccess;
  while (!copies.empty() && status == cudaSuccess) {
    const auto part = copies.first(std::min<std::size_t>(copies.size(), max_pairs));
    pair_list list = {};
    for (std::size_t i = 0; i < part.size(); ++i) {
      const std::int32_t src = to_index(part[i].src);
      const std::int32_t dst = to_index(part[i].dst);
      list.pairs[i] = ToCache ? pair_list::pair{src, dst} : pair_list::pair{dst, src};
    }
    args.num_tokens = static_cast<std::int32_t>(part.size()) * layout.block_size;
    const dim3 grid = tile_grid<ToCache>(args);
    status = launch(api, transfer_tiles<Row, Cache, ToCache, pair_list>, grid, dim3(tile_threads), 0, stream, dependent,
                    args, list);
    copies = copies.subspan(part.size());
  }
  return true;
}

}  // namespace

bool try_launch_convert_x_split(const runtime_api& api, const kv_cache_view& src, const kv_cache_view& dst,
                                std::span<const block_copy> copies, bool dependent, cudaStream_t stream,
                                cudaError_t& status) noexcept {
  const bool to_cache = dst.layout.k.strides.chunk < dst.layout.k.head_dim;
  const dtype rows = to_cache ? src.layout.k.code.type : dst.layout.k.code.type;
  const dtype cache = to_cache ? dst.layout.k.code.type : src.layout.k.code.type;
  return visit_move(rows, cache, [&]<class Row, class Cache>(move_types<Row, Cache>) {
    return to_cache ? try_launch<Row, Cache, true>(api, src, dst, copies, dependent, stream, status)
                    : try_launch<Row, Cache, false>(api, dst, src, copies, dependent, stream, status);
  });
}

}  // namespace bifolio::inline v0_2::cuda

// SPDX-License-Identifier: Apache-2.0

/// Append to planes of 8-bit codes whose rows come and go in runs of 16 dims: a thread reads 16 elements and stores 16
/// bytes. Codes and scales are those of move_codes, which does what does not come in runs.

#include <bit>
#include <type_traits>

#include "common/base/kv_code.hpp"
#include "cuda/cache_ops/code_moves.hpp"
#include "cuda/cache_ops/code_packs.cuh"
#include "cuda/cache_ops/code_rows.cuh"
#include "cuda/cache_ops/transfer.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/host/divisor.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

constexpr int pack_dims = 16;

struct append_plane {
  const void* rows = nullptr;
  std::int64_t row_token_stride = 0;
  std::int64_t row_head_stride = 0;
  code_side to;
};

/// Planes of one head_dim and one code.
struct append_args {
  append_plane planes[2];
  slot_list list;
  std::int64_t num_tokens;
  divisor block_size;
  divisor packs_per_head;
  std::int32_t packs_per_token;
  std::int32_t head_dim;
};

enum class scaling { none, fixed, by_row };

/// A thread takes 16 dims of a row; the threads of a row are neighbours in a warp where it has a tail. Grid: x over
/// tokens, y over planes.
template <class Row, class Code, scaling Scaling>
__global__ void __launch_bounds__(transfer_threads, 5) append_codes(const __grid_constant__ append_args args) {
  device::grid_dependency_launch();
  device::grid_dependency_wait();
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (token >= args.num_tokens) return;
  const append_plane& plane = args.planes[blockIdx.y];
  const auto packs_per_head = static_cast<std::int32_t>(args.packs_per_head.value);
  for (auto item = static_cast<std::int32_t>(threadIdx.x); item < args.packs_per_token;
       item += static_cast<std::int32_t>(blockDim.x)) {
    const std::int32_t head = args.packs_per_head.quotient(item);
    const std::int32_t pack = item - head * packs_per_head;
    // A row is on its way while its slot is looked up, wanted or not.
    const packed<Row, pack_dims> elements =
        load_packed<pack_dims>(static_cast<const Row*>(plane.rows) + token * plane.row_token_stride +
                               head * plane.row_head_stride + pack * pack_dims);
    detail::encoding how;
    if constexpr (Scaling == scaling::fixed) {
      how.inverse = __frcp_rn(__ldg(plane.to.scales.static_scales + head * plane.to.scales.static_step));
    }
    const tile_place place = args.list.place_of(token, args.block_size);
    if (place.block < 0) return;
    auto* const cache = static_cast<unsigned char*>(plane.to.base);
    float values[pack_dims];
#pragma unroll
    for (int i = 0; i < pack_dims; ++i) values[i] = widen(elements.values[i]);
    if constexpr (Scaling == scaling::by_row) {
      const int lane = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x) & 31;
      const std::uint32_t members = packs_per_head == 32 ? 0xffffffffu : ((1u << packs_per_head) - 1) << (lane - pack);
      how = encoding_of_row<Code>(values, values, packs_per_head, members);
      if (pack == 0) {
        const kv_tail_strides& t = plane.to.scales.tail;
        auto* const tail = reinterpret_cast<float*>(cache + place.block * plane.to.strides.block + t.offset +
                                                    head * t.head + place.offset * t.token);
        tail[0] = how.stored.scale;
        if constexpr (Code::has_zero) tail[1] = how.stored.zero;
      }
    }
    if constexpr (Scaling != scaling::none) {
#pragma unroll
      for (int i = 0; i < pack_dims; ++i) {
        const float shifted = Code::has_zero ? __fsub_rn(values[i], how.stored.zero) : values[i];
        values[i] = __fmul_rn(shifted, how.inverse);
      }
    }
    std::uint32_t words[pack_dims / 4];
    pack_codes<Code, Scaling == scaling::by_row>(values, words);
    uint4 codes = make_uint4(words[0], words[1], words[2], words[3]);
    if (Scaling != scaling::none && how.inverse == 0.0f) codes = make_uint4(0, 0, 0, 0);
    *reinterpret_cast<uint4*>(cache + token_offset(plane.to.strides, place.block, head, place.offset) +
                              dim_offset(plane.to.strides, args.head_dim, pack * pack_dims)) = codes;
  }
}

template <class Row, class Code, scaling Scaling>
cudaError_t launch_planes(const runtime_api& api, const transfer_args& args, std::span<const append_plane> planes,
                          std::int32_t head_dim, bool dependent, cudaStream_t stream) noexcept {
  append_args all = {};
  const row_grid grid(args.num_tokens, std::int64_t{args.num_kv_heads} * (head_dim / pack_dims));
  if (!grid.fits()) return cudaErrorInvalidValue;
  std::copy(planes.begin(), planes.end(), all.planes);
  all.list = {args.slot_mapping, args.num_slots};
  all.num_tokens = args.num_tokens;
  all.block_size = divisor(args.block_size);
  all.packs_per_head = divisor(head_dim / pack_dims);
  all.packs_per_token = static_cast<std::int32_t>(grid.packs_per_token);
  all.head_dim = head_dim;
  return launch(api, append_codes<Row, Code, Scaling>, grid.ctas(planes.size()), grid.threads(), 0, stream, dependent,
                all);
}

template <class Row>
cudaError_t launch_of_rows(const runtime_api& api, const transfer_args& args, std::span<const append_plane> planes,
                           std::int32_t head_dim, bool dependent, cudaStream_t stream) noexcept {
  const auto go = [&]<class Code, scaling Scaling>(Code, std::integral_constant<scaling, Scaling>) {
    return launch_planes<Row, Code, Scaling>(api, args, planes, head_dim, dependent, stream);
  };
  constexpr std::integral_constant<scaling, scaling::none> none;
  constexpr std::integral_constant<scaling, scaling::fixed> fixed;
  constexpr std::integral_constant<scaling, scaling::by_row> by_row;
  const code_scales& scales = planes[0].to.scales;
  const bool is_fixed = scales.static_scales != nullptr;
  const bool has_tail = scales.tail_floats > 0;
  switch (planes[0].to.type) {
    case dtype::e4m3:
      return has_tail ? go(e4m3_code{}, by_row) : is_fixed ? go(e4m3_code{}, fixed) : go(e4m3_code{}, none);
    case dtype::e5m2:
      return is_fixed ? go(e5m2_code{}, fixed) : go(e5m2_code{}, none);
    case dtype::i8:
      return has_tail ? go(i8_code{}, by_row) : go(i8_code{}, fixed);
    case dtype::u8:
      return go(u8_code{}, by_row);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace

bool appends_in_packs(const transfer_args& args, const kv_cache_view& kv) noexcept {
  for (std::int32_t p = 0; p < args.num_planes; ++p) {
    const transfer_plane& plane = args.planes[p];
    const kv_code& code = (p == 0 ? kv.layout.k : kv.layout.v).code;
    if (size_of(code.type) != 1 || code.is_record()) return false;
    const bool rows_are_runs = visit_tensor_dtype(args.row_type, [&](auto traits) {
      using row = typename decltype(traits)::storage;
      return runs_of<row>(plane.row, plane.row_token_stride, plane.row_head_stride, plane.head_dim, pack_dims);
    });
    if (!rows_are_runs || !runs_of<std::uint8_t>(plane.cache, plane.strides, plane.head_dim, pack_dims)) return false;
    const std::int32_t packs = plane.head_dim / pack_dims;
    const bool lanes_fit = packs <= 32 && std::has_single_bit(static_cast<std::uint32_t>(packs));
    if (code.tail_floats() > 0 && !lanes_fit) return false;
  }
  return true;
}

cudaError_t launch_append_codes(const runtime_api& api, const transfer_args& args, const kv_cache_view& kv,
                                bool dependent, cudaStream_t stream) noexcept {
  append_plane planes[2];
  for (std::int32_t p = 0; p < args.num_planes; ++p) {
    const transfer_plane& from = args.planes[p];
    planes[p] = {from.row, from.row_token_stride, from.row_head_stride,
                 side_of(from.cache, p == 0 ? kv.layout.k : kv.layout.v, p == 0 ? kv.k_scales : kv.v_scales)};
  }
  const auto go = [&](std::int32_t first, std::int32_t count) {
    const std::span<const append_plane> some(planes + first, static_cast<std::size_t>(count));
    return visit_tensor_dtype(args.row_type, [&](auto traits) {
      return launch_of_rows<typename decltype(traits)::storage>(api, args, some, args.planes[first].head_dim, dependent,
                                                                stream);
    });
  };
  const bool alike = args.num_planes == 2 && args.planes[0].head_dim == args.planes[1].head_dim &&
                     planes[0].to.type == planes[1].to.type &&
                     planes[0].to.scales.tail_floats == planes[1].to.scales.tail_floats &&
                     (planes[0].to.scales.static_scales == nullptr) == (planes[1].to.scales.static_scales == nullptr);
  if (alike || args.num_planes == 1) return go(0, args.num_planes);
  const cudaError_t status = go(0, 1);
  return status == cudaSuccess ? go(1, 1) : status;
}

}  // namespace bifolio::inline v0_2::cuda

// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/cache_ops.hpp"

#include <algorithm>

#include "common/base/kv_code.hpp"
#include "common/engine/validate_cache.hpp"
#include "common/engine/validate_rotate.hpp"
#include "cuda/cache_ops/block_ops.hpp"
#include "cuda/cache_ops/code_moves.hpp"
#include "cuda/cache_ops/rotate.hpp"
#include "cuda/cache_ops/transfer.hpp"
#include "cuda/host/block_moves.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

template <class Void>
transfer_plane plane_of(const basic_tensor_view<Void>& rows, void* cache, const kv_plane& plane) noexcept {
  void* const row = const_cast<void*>(static_cast<const void*>(rows.data));
  return {row, rows.token_stride, rows.head_stride, cache, plane.strides, plane.head_dim};
}

template <class Params>
transfer_args transfer_of(const Params& params) noexcept {
  const kv_layout& layout = params.kv.layout;
  transfer_args args;
  args.planes[0] = plane_of(params.k, params.kv.k, layout.k);
  if (!layout.v_in_k) args.planes[1] = plane_of(params.v, params.kv.v, layout.v);
  args.num_planes = layout.v_in_k ? 1 : 2;
  args.slot_mapping = params.slot_mapping;
  args.num_slots = params.kv.num_blocks * layout.block_size;
  args.num_tokens = params.k.num_tokens;
  args.num_kv_heads = layout.num_kv_heads;
  args.block_size = layout.block_size;
  args.row_type = params.k.type;
  args.cache_type = layout.k.code.type;
  return args;
}

std::int64_t element_bytes(const kv_plane& plane) noexcept {
  return static_cast<std::int64_t>(size_of(plane.code.type));
}

/// Whether a block of a plane is one run of bytes, its tail and what is before it included.
bool is_dense(const kv_layout& layout, const kv_plane& plane) noexcept {
  const bool has_tail = plane.code.tail_floats() > 0;
  return shape_of(layout, plane).num_loops == 0 && (!has_tail || layout.kind != layout_kind::strided);
}
bool is_dense(const kv_layout& layout) noexcept {
  return is_dense(layout, layout.k) && (layout.v_in_k || is_dense(layout, layout.v));
}

/// Whether the kernels that know no codes take a cache.
bool is_plain(const kv_layout& layout) noexcept { return detail::is_plain_and_alike(layout.k.code, layout.v.code); }

/// Elements of one layer across layouts; blocks of one code on both sides keep their bits with `keep_bits`.
cudaError_t convert_layer(const runtime_api& api, const kv_cache_view& src, const kv_cache_view& dst,
                          std::span<const block_copy> copies, bool keep_bits, bool dependent,
                          cudaStream_t stream) noexcept {
  if (is_plain(src.layout) && is_plain(dst.layout)) {
    return launch_convert_blocks(api, src, dst, copies, dependent, stream);
  }
  return launch_code_convert(api, src, dst, copies, keep_bits, dependent, stream);
}

run_geometry geometry_of(const kv_layout& src, const kv_layout& dst) noexcept {
  const auto step = [](const kv_plane& plane) { return plane.strides.block * element_bytes(plane); };
  run_geometry geometry;
  geometry.src_k_step = step(src.k);
  geometry.dst_k_step = step(dst.k);
  geometry.k_bytes = src.block_bytes(src.k);
  if (src.v_in_k) return geometry;
  geometry.src_v_step = step(src.v);
  geometry.dst_v_step = step(dst.v);
  geometry.v_bytes = src.block_bytes(src.v);
  return geometry;
}

/// Launches of copy_runs take layers in groups of this many from a list on the stack.
constexpr std::size_t layer_group = 128;

/// Moves `copies`, which are independent, in all layers. Layers whose blocks are runs of bytes and alike share
/// launches; others go element by element.
cudaError_t move_blocks(const runtime_api& api, const copy_launch& how, std::span<const kv_cache_view> src,
                        std::span<const kv_cache_view> dst, std::span<const block_copy> copies,
                        cudaStream_t stream) noexcept {
  layer_move moves[layer_group];
  for (std::size_t layer = 0; layer < src.size();) {
    if (!is_dense(src[layer].layout)) {
      const cudaError_t status = convert_layer(api, src[layer], dst[layer], copies, true, how.dependent, stream);
      if (status != cudaSuccess) return status;
      ++layer;
      continue;
    }
    const run_geometry geometry = geometry_of(src[layer].layout, dst[layer].layout);
    std::size_t count = 0;
    for (; layer < src.size() && count < layer_group; ++layer, ++count) {
      if (!is_dense(src[layer].layout) || geometry != geometry_of(src[layer].layout, dst[layer].layout)) break;
      moves[count] = {src[layer].k, src[layer].v, dst[layer].k, dst[layer].v};
    }
    const cudaError_t status = launch_copy_runs(api, {moves, count}, geometry, copies, how, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}

/// One plane of blocks on both sides. The inside of a block is alike on both.
struct plane_pair {
  char* dst = nullptr;
  const char* src = nullptr;
  block_shape shape;
  std::int64_t element = 0;   ///< bytes
  std::int64_t dst_step = 0;  ///< bytes from a block to the next
  std::int64_t src_step = 0;
};

/// Copies the inside of `num_blocks` ≥ 1 blocks that follow each other on both sides, one plane, by the copy engine.
cudaError_t transfer_run(const runtime_api& api, const plane_pair& plane, std::int64_t first_src,
                         std::int64_t first_dst, std::int64_t num_blocks, cudaStream_t stream) noexcept {
  const std::int64_t element = plane.element;
  const block_shape& shape = plane.shape;
  const std::int64_t run = shape.run * element;
  const std::int64_t src_step = plane.src_step;
  const std::int64_t dst_step = plane.dst_step;
  const char* const src = plane.src + first_src * src_step;
  char* const dst = plane.dst + first_dst * dst_step;
  if (shape.num_loops == 0) {
    if (num_blocks == 1 || (src_step == run && dst_step == run)) {
      return api.memcpy_async(dst, src, static_cast<std::size_t>(run * num_blocks), cudaMemcpyDefault, stream);
    }
    return api.memcpy_2d_async(dst, static_cast<std::size_t>(dst_step), src, static_cast<std::size_t>(src_step),
                               static_cast<std::size_t>(run), static_cast<std::size_t>(num_blocks), cudaMemcpyDefault,
                               stream);
  }
  // The innermost loop is a pitch; the others are walked here.
  const block_shape::loop& pitch = shape.loops[shape.num_loops - 1];
  std::int64_t outer = 1;
  for (std::int32_t i = 0; i + 1 < shape.num_loops; ++i) outer *= shape.loops[i].count;
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    for (std::int64_t index = 0; index < outer; ++index) {
      std::int64_t offset = 0;
      std::int64_t rest = index;
      for (std::int32_t i = shape.num_loops - 2; i >= 0; --i) {
        offset += rest % shape.loops[i].count * shape.loops[i].stride;
        rest /= shape.loops[i].count;
      }
      const cudaError_t status = api.memcpy_2d_async(
          dst + block * dst_step + offset * element, static_cast<std::size_t>(pitch.stride * element),
          src + block * src_step + offset * element, static_cast<std::size_t>(pitch.stride * element),
          static_cast<std::size_t>(run), static_cast<std::size_t>(pitch.count), cudaMemcpyDefault, stream);
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

cudaError_t transfer_blocks(const runtime_api& api, std::span<const kv_cache_view> src,
                            std::span<const kv_cache_view> dst, std::span<const block_copy> copies,
                            cudaStream_t stream) noexcept {
  for (std::size_t layer = 0; layer < src.size(); ++layer) {
    const kv_layout& from = src[layer].layout;
    const kv_layout& to = dst[layer].layout;
    plane_pair planes[4];  // each with its tail where that is not part of the same run
    int num_planes = 0;
    const auto add = [&](const kv_plane& src_plane, const void* src_data, const kv_plane& dst_plane, void* dst_data) {
      const std::int64_t element = element_bytes(src_plane);
      plane_pair& pair = planes[num_planes++];
      pair = {static_cast<char*>(dst_data),      static_cast<const char*>(src_data), shape_of(from, src_plane), element,
              dst_plane.strides.block * element, src_plane.strides.block * element};
      if (src_plane.code.tail_floats() == 0) return;
      if (is_dense(from, src_plane)) {
        pair.shape.run = from.block_bytes(src_plane);  // in bytes, as its elements are
        return;
      }
      planes[num_planes++] = {pair.dst + dst_plane.tail.offset,
                              pair.src + src_plane.tail.offset,
                              shape_of(from, detail::tail_plane(src_plane)),
                              sizeof(float),
                              pair.dst_step,
                              pair.src_step};
    };
    add(from.k, src[layer].k, to.k, dst[layer].k);
    if (!from.v_in_k) add(from.v, src[layer].v, to.v, dst[layer].v);
    for (std::span<const block_copy> rest = copies; !rest.empty();) {
      const std::size_t count = consecutive_prefix(rest);
      for (int plane = 0; plane < num_planes; ++plane) {
        const cudaError_t status = transfer_run(api, planes[plane], to_index(rest[0].src), to_index(rest[0].dst),
                                                static_cast<std::int64_t>(count), stream);
        if (status != cudaSuccess) return status;
      }
      rest = rest.subspan(count);
    }
  }
  return cudaSuccess;
}

/// The same for blocks that are runs of bytes, in as few calls as hold `copies`, which are independent. Memory of the
/// host is pinned.
cudaError_t transfer_batches(const runtime_api& api, std::span<const kv_cache_view> src,
                             std::span<const kv_cache_view> dst, std::span<const block_copy> copies,
                             cudaStream_t stream) noexcept {
  constexpr std::size_t most = 256;
  void* dsts[most];
  void* srcs[most];
  std::size_t sizes[most];
  std::size_t held = 0;
  const auto flush = [&] {
    const cudaError_t status = held == 0 ? cudaSuccess : api.memcpy_batch_async(dsts, srcs, sizes, held, stream);
    held = 0;
    return status;
  };
  for (std::size_t layer = 0; layer < src.size(); ++layer) {
    const run_geometry g = geometry_of(src[layer].layout, dst[layer].layout);
    for (std::span<const block_copy> rest = copies; !rest.empty();) {
      // Blocks that follow each other on both sides are one copy where nothing is between them.
      const bool has_v = g.v_bytes > 0;
      const bool close = g.src_k_step == g.k_bytes && g.dst_k_step == g.k_bytes &&
                         (!has_v || (g.src_v_step == g.v_bytes && g.dst_v_step == g.v_bytes));
      const std::size_t count = close ? consecutive_prefix(rest) : 1;
      const std::int64_t from = to_index(rest[0].src);
      const std::int64_t to = to_index(rest[0].dst);
      for (const bool is_v : {false, true}) {
        if (is_v && !has_v) continue;
        dsts[held] = static_cast<char*>(is_v ? dst[layer].v : dst[layer].k) + to * (is_v ? g.dst_v_step : g.dst_k_step);
        srcs[held] =
            static_cast<char*>(is_v ? src[layer].v : src[layer].k) + from * (is_v ? g.src_v_step : g.src_k_step);
        sizes[held++] = static_cast<std::size_t>(is_v ? g.v_bytes : g.k_bytes) * count;
      }
      if (held + 2 > most) {
        if (const cudaError_t status = flush(); status != cudaSuccess) return status;
      }
      rest = rest.subspan(count);
    }
  }
  return flush();
}

/// Whether kernels of this device can read and write where `pointer` points, at the same address.
bool is_reachable(const runtime_api& api, const device_state& state, const void* pointer) noexcept {
  cudaPointerAttributes attributes = {};
  if (const cudaError_t status = api.pointer_attributes(&attributes, pointer); status != cudaSuccess) {
    (void)state.report(status);
    return false;
  }
  if (attributes.type == cudaMemoryTypeDevice) return attributes.device == state.index();
  return (attributes.type == cudaMemoryTypeHost || attributes.type == cudaMemoryTypeManaged) &&
         attributes.devicePointer == pointer;
}

bool are_reachable(const runtime_api& api, const device_state& state, std::span<const kv_cache_view> layers) noexcept {
  return std::all_of(layers.begin(), layers.end(), [&](const kv_cache_view& layer) {
    return is_reachable(api, state, layer.k) && is_reachable(api, state, layer.v_data());
  });
}

}  // namespace

errc append(const device_state& state, const append_params& params, stream_ref stream) noexcept {
  if (const errc code = validate::append_on_device(params); code != errc::ok) return code;
  if (params.k.num_tokens == 0 || params.kv.num_blocks == 0) return errc::ok;
  const bool dependent = state.numbers().dependent_launch;
  if (!is_plain(params.kv.layout)) {
    return state.report(
        launch_code_transfer(state.api(), transfer_of(params), params.kv, true, dependent, handle_of(stream)));
  }
  return state.report(launch_append(state.api(), transfer_of(params), dependent, handle_of(stream)));
}

errc gather(const device_state& state, const gather_params& params, stream_ref stream) noexcept {
  if (const errc code = validate::gather_on_device(params); code != errc::ok) return code;
  if (params.k.num_tokens == 0 || params.kv.num_blocks == 0) return errc::ok;
  const bool dependent = state.numbers().dependent_launch;
  if (!is_plain(params.kv.layout)) {
    return state.report(
        launch_code_transfer(state.api(), transfer_of(params), params.kv, false, dependent, handle_of(stream)));
  }
  return state.report(launch_gather(state.api(), transfer_of(params), dependent, handle_of(stream)));
}

errc rotate_append(const device_state& state, const rotate_append_params& params, stream_ref stream) noexcept {
  if (const errc code = validate::rotate_append(params); code != errc::ok) return code;
  if (params.append.k.num_tokens == 0) return errc::ok;
  return state.report(launch_rotate_append(state.api(), params, state.numbers().dependent_launch, handle_of(stream)));
}

errc copy_blocks(const device_state& state, std::span<const kv_cache_view> layers, std::span<const block_copy> copies,
                 stream_ref stream) noexcept {
  if (const errc code = validate::copy_blocks(layers, copies); code != errc::ok) return code;
  if (layers.empty()) return errc::ok;
  while (!copies.empty()) {
    const auto wave = copies.first(independent_prefix(copies, true));
    const cudaError_t status =
        move_blocks(state.api(), {state.numbers().dependent_launch}, layers, layers, wave, handle_of(stream));
    if (status != cudaSuccess) return state.report(status);
    copies = copies.subspan(wave.size());
  }
  return errc::ok;
}

errc convert_blocks(const device_state& state, const kv_cache_view& src, const kv_cache_view& dst,
                    std::span<const block_copy> copies, stream_ref stream) noexcept {
  if (const errc code = validate::convert_blocks(src, dst, copies); code != errc::ok) return code;
  while (!copies.empty()) {
    const auto wave = copies.first(independent_prefix(copies, false));
    const cudaError_t status =
        convert_layer(state.api(), src, dst, wave, false, state.numbers().dependent_launch, handle_of(stream));
    if (status != cudaSuccess) return state.report(status);
    copies = copies.subspan(wave.size());
  }
  return errc::ok;
}

errc swap_blocks(const device_state& state, std::span<const kv_cache_view> src, std::span<const kv_cache_view> dst,
                 std::span<const block_copy> copies, stream_ref stream) noexcept {
  if (const errc code = validate::swap_blocks(src, dst, copies); code != errc::ok) return code;
  if (src.empty() || copies.empty()) return errc::ok;
  const runtime_api& api = state.api();

  // The copy engine costs half a microsecond per run or more, and leaves the SMs alone; below this average a
  // kernel that reads and writes pinned host memory itself is faster (32 KiB: 52 instead of 26 GB/s; 256 KiB: 48).
  constexpr std::int64_t worth_a_transfer = std::int64_t{256} << 10;
  std::size_t num_runs = 0;
  for (auto rest = copies; !rest.empty(); ++num_runs) rest = rest.subspan(consecutive_prefix(rest));
  const std::int64_t plane_bytes = src[0].layout.block_bytes(src[0].layout.k);
  const std::int64_t bytes_per_run =
      plane_bytes * static_cast<std::int64_t>(copies.size()) / static_cast<std::int64_t>(num_runs);
  const auto all_dense = [](std::span<const kv_cache_view> layers) {
    return std::all_of(layers.begin(), layers.end(), [](const kv_cache_view& layer) { return is_dense(layer.layout); });
  };
  const bool reachable = are_reachable(api, state, src) && are_reachable(api, state, dst);
  // The question itself may have met a lost device.
  if (const errc code = state.health(); code != errc::ok) return code;
  const bool by_engine = bytes_per_run >= worth_a_transfer && all_dense(src);
  if (!reachable) return state.report(transfer_blocks(api, src, dst, copies, handle_of(stream)));
  while (!copies.empty()) {
    const auto wave = copies.first(independent_prefix(copies, false));
    const cudaError_t status =
        by_engine ? transfer_batches(api, src, dst, wave, handle_of(stream))
                  : move_blocks(api, {state.numbers().dependent_launch, true}, src, dst, wave, handle_of(stream));
    if (status != cudaSuccess) return state.report(status);
    copies = copies.subspan(wave.size());
  }
  return errc::ok;
}

}  // namespace bifolio::inline v0_2::cuda

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cuda/cache_ops/block_ops.hpp"
#include "cuda/device/ptx.cuh"
#include "cuda/host/divisor.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

constexpr int threads = 256;
constexpr int units_per_thread = 4;  // independent 16-byte loads in flight: 16 KiB per CTA

struct id_pair {
  std::int32_t src;
  std::int32_t dst;
};

template <int MaxLayers, int MaxPairs>
struct copy_runs_args {
  run_geometry geometry;
  std::int64_t run_bytes;
  std::int32_t first_plane;  // 0: K, 1: V
  std::int32_t num_pairs;
  std::int32_t chunks_per_run;
  layer_move layers[MaxLayers];
  id_pair pairs[MaxPairs];
};

// Parameters of a kernel: 4 KB everywhere, 32 KB since CUDA 12.1.
using few_args = copy_runs_args<32, 360>;
static_assert(sizeof(few_args) <= 4096);
#if CUDART_VERSION >= 12010
using many_args = copy_runs_args<128, max_wave>;
static_assert(sizeof(many_args) <= 32000);
#else
using many_args = few_args;
#endif

/// Grid: x over pairs and the chunks of a run, y over layers, z over planes.
template <class Unit, class Args>
__global__ void __launch_bounds__(threads, 8) copy_runs(const __grid_constant__ Args args) {
  device::grid_dependency_launch();
  device::grid_dependency_wait();
  const layer_move& layer = args.layers[blockIdx.y];
  const bool is_v = static_cast<std::int32_t>(blockIdx.z) + args.first_plane != 0;
  const char* const src_base = static_cast<const char*>(is_v ? layer.src_v : layer.src_k);
  char* const dst_base = static_cast<char*>(is_v ? layer.dst_v : layer.dst_k);
  const std::int64_t src_step = is_v ? args.geometry.src_v_step : args.geometry.src_k_step;
  const std::int64_t dst_step = is_v ? args.geometry.dst_v_step : args.geometry.dst_k_step;
  const std::int64_t units = args.run_bytes / static_cast<std::int64_t>(sizeof(Unit));
  const std::int64_t num_items = static_cast<std::int64_t>(args.num_pairs) * args.chunks_per_run;
  for (std::int64_t item = blockIdx.x; item < num_items; item += gridDim.x) {
    const auto pair_index = static_cast<std::int32_t>(item / args.chunks_per_run);
    const std::int64_t chunk = item - static_cast<std::int64_t>(pair_index) * args.chunks_per_run;
    const id_pair pair = args.pairs[pair_index];
    const auto* const src = reinterpret_cast<const Unit*>(src_base + pair.src * src_step);
    auto* const dst = reinterpret_cast<Unit*>(dst_base + pair.dst * dst_step);
    const std::int64_t first = chunk * (threads * units_per_thread) + threadIdx.x;
    Unit held[units_per_thread];
#pragma unroll
    for (int i = 0; i < units_per_thread; ++i) {
      held[i] = src[min(first + i * threads, units - 1)];  // no branch, which would be waited for
    }
#pragma unroll
    for (int i = 0; i < units_per_thread; ++i) {
      if (first + i * threads < units) dst[first + i * threads] = held[i];
    }
  }
}

/// The planes of one launch: their runs are of one length.
struct plane_range {
  std::int32_t first = 0;
  std::int32_t count = 0;
  std::int64_t run_bytes = 0;
};

template <class Unit, class Args>
cudaError_t launch_part(const runtime_api& api, std::span<const layer_move> layers, const run_geometry& geometry,
                        const plane_range& planes, std::span<const block_copy> copies, const copy_launch& how,
                        cudaStream_t stream) noexcept {
  constexpr std::int64_t chunk_bytes = threads * units_per_thread * sizeof(Unit);
  const std::int64_t chunks = (planes.run_bytes + chunk_bytes - 1) / chunk_bytes;
  if (chunks > 0x7fffffff) return cudaErrorInvalidValue;
  Args args;
  args.geometry = geometry;
  args.run_bytes = planes.run_bytes;
  args.first_plane = planes.first;
  args.num_pairs = static_cast<std::int32_t>(copies.size());
  args.chunks_per_run = static_cast<std::int32_t>(chunks);
  std::copy(layers.begin(), layers.end(), args.layers);
  for (std::size_t i = 0; i < copies.size(); ++i) args.pairs[i] = {to_index(copies[i].src), to_index(copies[i].dst)};
  const std::int64_t items = chunks * args.num_pairs;
  // A few CTAs fill the bus; more would only delay other kernels.
  constexpr std::int64_t bus_blocks = 8;
  const std::int64_t num_planes = planes.count * static_cast<std::int64_t>(layers.size());
  const std::int64_t most = how.shares_device ? std::max<std::int64_t>(bus_blocks / num_planes, 1) : 1 << 20;
  const dim3 grid(static_cast<unsigned>(std::min(items, most)), static_cast<unsigned>(layers.size()),
                  static_cast<unsigned>(planes.count));
  return launch(api, copy_runs<Unit, Args>, grid, dim3(threads), 0, stream, how.dependent, args);
}

template <class Unit>
cudaError_t launch_units(const runtime_api& api, std::span<const layer_move> layers, const run_geometry& geometry,
                         const plane_range& planes, std::span<const block_copy> copies, const copy_launch& how,
                         cudaStream_t stream) noexcept {
  constexpr std::size_t few_layers = std::size(few_args{}.layers);
  constexpr std::size_t few_pairs = std::size(few_args{}.pairs);
  const bool is_few = layers.size() <= few_layers && copies.size() <= few_pairs;
  const std::size_t layer_step = is_few ? few_layers : std::size(many_args{}.layers);
  const std::size_t pair_step = is_few ? few_pairs : std::size(many_args{}.pairs);
  for (std::size_t l = 0; l < layers.size(); l += layer_step) {
    const auto some_layers = layers.subspan(l, std::min(layer_step, layers.size() - l));
    for (std::size_t p = 0; p < copies.size(); p += pair_step) {
      const auto some_copies = copies.subspan(p, std::min(pair_step, copies.size() - p));
      const cudaError_t status =
          is_few ? launch_part<Unit, few_args>(api, some_layers, geometry, planes, some_copies, how, stream)
                 : launch_part<Unit, many_args>(api, some_layers, geometry, planes, some_copies, how, stream);
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

cudaError_t launch_planes(const runtime_api& api, std::span<const layer_move> layers, const run_geometry& geometry,
                          const plane_range& planes, std::span<const block_copy> copies, const copy_launch& how,
                          cudaStream_t stream) noexcept {
  auto bits = static_cast<std::uintptr_t>(planes.run_bytes);
  const auto add_plane = [&](std::int64_t src_step, std::int64_t dst_step, auto src, auto dst) {
    bits |= static_cast<std::uintptr_t>(src_step | dst_step);
    for (const layer_move& layer : layers) {
      bits |= reinterpret_cast<std::uintptr_t>(layer.*src) | reinterpret_cast<std::uintptr_t>(layer.*dst);
    }
  };
  const bool has_v = planes.first + planes.count == 2;
  if (planes.first == 0) add_plane(geometry.src_k_step, geometry.dst_k_step, &layer_move::src_k, &layer_move::dst_k);
  if (has_v) add_plane(geometry.src_v_step, geometry.dst_v_step, &layer_move::src_v, &layer_move::dst_v);
  if (bits % 16 == 0) return launch_units<uint4>(api, layers, geometry, planes, copies, how, stream);
  if (bits % 4 == 0) return launch_units<unsigned>(api, layers, geometry, planes, copies, how, stream);
  if (bits % 2 == 0) return launch_units<unsigned short>(api, layers, geometry, planes, copies, how, stream);
  return launch_units<unsigned char>(api, layers, geometry, planes, copies, how, stream);
}

}  // namespace

cudaError_t launch_copy_runs(const runtime_api& api, std::span<const layer_move> layers, const run_geometry& geometry,
                             std::span<const block_copy> copies, const copy_launch& how, cudaStream_t stream) noexcept {
  if (geometry.k_bytes == geometry.v_bytes) {
    return launch_planes(api, layers, geometry, {0, 2, geometry.k_bytes}, copies, how, stream);
  }
  const cudaError_t status = launch_planes(api, layers, geometry, {0, 1, geometry.k_bytes}, copies, how, stream);
  if (status != cudaSuccess || geometry.v_bytes == 0) return status;
  return launch_planes(api, layers, geometry, {1, 1, geometry.v_bytes}, copies, how, stream);
}

}  // namespace bifolio::inline v0_2::cuda

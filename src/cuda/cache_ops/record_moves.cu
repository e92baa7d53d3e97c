// SPDX-License-Identifier: Apache-2.0
#include <bifolio/kv_layout.hpp>

#include "common/base/kv_code.hpp"
#include "cuda/cache_ops/code_moves.cuh"
#include "cuda/cache_ops/code_packs.cuh"
#include "cuda/cache_ops/code_rows.cuh"
#include "cuda/device/load.cuh"
#include "cuda/device/ptx.cuh"
#include "cuda/device/records.cuh"
#include "cuda/device/softmax.cuh"

namespace bifolio::inline v0_2::cuda {
namespace {

constexpr int threads = 256;
constexpr int rows_per_cta = threads / 32;
constexpr int latent_dims = kv_record::v_head_dim / 32;               // of a lane
constexpr int scale_lanes = kv_record::dims_per_scale / latent_dims;  // lanes that share a scale
constexpr int rotated_lanes = kv_record::rotated_dims / lane_dims;    // that have eight rotated dims as well
static_assert(latent_dims == 2 * lane_dims);

/// What a lane has of a row.
struct record_part {
  float latent[2][lane_dims];  // from dim lane · latent_dims
  float rotated[lane_dims];    // of the first rotated_lanes
};

__device__ __forceinline__ void load_part(const code_side& side, const code_row& row, int lane, record_part& part) {
  const int first = lane * latent_dims;
  if (!side.is_record) {
    load_values(side, row, kv_record::head_dim, first, part.latent[0]);
    load_values(side, row, kv_record::head_dim, first + lane_dims, part.latent[1]);
    if (lane < rotated_lanes) {
      load_values(side, row, kv_record::head_dim, kv_record::v_head_dim + lane * lane_dims, part.rotated);
    }
    return;
  }
  const unpacked<float8_e4m3> codes(load_record_16(row.data, first, side.is_packed));
  const detail::scale_pair scales{record_scale(row.data, first), 0.0f};
#pragma unroll
  for (int i = 0; i < latent_dims; ++i) {
    part.latent[i / lane_dims][i % lane_dims] = decoded(codes.values[i], scales, false);
  }
  if (lane < rotated_lanes) {
    const unpacked<bfloat16> values(load_record_16(row.data, kv_record::rotated_offset + lane * 16, side.is_packed));
#pragma unroll
    for (int i = 0; i < lane_dims; ++i) part.rotated[i] = values.values[i];
  }
}

__device__ __forceinline__ void store_record(const code_side& side, const code_row& row, int lane, record_part& part) {
  std::uint32_t magnitude = 0;
  const auto for_latent = [&](const auto& body) {
#pragma unroll
    for (auto& half : part.latent) {
#pragma unroll
      for (float& value : half) body(value);
    }
  };
  for_latent([&](float value) { magnitude = max(magnitude, magnitude_of(value)); });
#pragma unroll
  for (int mask = scale_lanes / 2; mask > 0; mask /= 2) {
    magnitude = max(magnitude, __shfl_xor_sync(0xffffffffu, magnitude, mask));
  }
  const detail::encoding how = detail::encode_record_dims<device_math>(range_within(magnitude));
  for_latent([&](float& value) { value = __fmul_rn(value, how.inverse); });
  std::uint32_t words[4];
  pack_codes<e4m3_code, true>(part.latent[0], words);
  pack_codes<e4m3_code, true>(part.latent[1], words + 2);
  const uint4 codes = how.inverse == 0.0f ? make_uint4(0, 0, 0, 0) : make_uint4(words[0], words[1], words[2], words[3]);
  store_record_16(row.data, lane * latent_dims, side.is_packed, codes);
  if (lane % scale_lanes == 0) {
    reinterpret_cast<float*>(row.data + kv_record::scales_offset)[lane / scale_lanes] = how.stored.scale;
  }
  if (lane < rotated_lanes) {
    pack_halves<bfloat16>(part.rotated, words);
    store_record_16(row.data, kv_record::rotated_offset + lane * 16, side.is_packed,
                    make_uint4(words[0], words[1], words[2], words[3]));
  }
}

__device__ __forceinline__ void store_elements(const code_side& side, const code_row& row, int lane,
                                               record_part& part) {
  detail::encoding how{row.scales, __fdiv_rn(1.0f, row.scales.scale)};
  if (row.tail != nullptr) {
    detail::dim_range range;
    measure(part.latent[0], lane_dims, range);
    measure(part.latent[1], lane_dims, range);
    if (lane < rotated_lanes) measure(part.rotated, lane_dims, range);
    reduce(range, 32, 0xffffffffu);
    how = detail::encode_token_head<device_math>(side.type, range);
    if (lane == 0) {
      row.tail[0] = how.stored.scale;
      if (side.scales.tail_floats > 1) row.tail[1] = how.stored.zero;
    }
  }
  const int first = lane * latent_dims;
  store_values(side, row, kv_record::head_dim, first, how, part.latent[0]);
  store_values(side, row, kv_record::head_dim, first + lane_dims, how, part.latent[1]);
  if (lane < rotated_lanes) {
    store_values(side, row, kv_record::head_dim, kv_record::v_head_dim + lane * lane_dims, how, part.rotated);
  }
}

/// A warp moves a row: of each 128 dims that share a scale, eight lanes have 16.
__global__ void __launch_bounds__(threads, 4) move_records(const __grid_constant__ code_moves_args args) {
  device::grid_dependency_launch();
  device::grid_dependency_wait();
  const code_plane& plane = args.planes[0];
  const int lane = static_cast<int>(threadIdx.x) & 31;
  const std::int64_t row_index = static_cast<std::int64_t>(blockIdx.x) * rows_per_cta + threadIdx.x / 32;
  if (row_index >= args.num_rows) return;
  const std::int32_t token = args.num_heads.quotient(static_cast<std::int32_t>(row_index));
  const auto head = static_cast<std::int32_t>(row_index) - token * static_cast<std::int32_t>(args.num_heads.value);
  code_place from;
  code_place to;
  if (!find_places(args, token, from, to)) return;
  code_row src(plane.src, from.block, from.token, head);
  const code_row dst(plane.dst, to.block, to.token, head);
  if (src.tail != nullptr) {
    src.scales.scale = src.tail[0];
    if (plane.src.scales.tail_floats > 1) src.scales.zero = src.tail[1];
  }
  record_part part;
  load_part(plane.src, src, lane, part);
  if (plane.dst.is_record) {
    store_record(plane.dst, dst, lane, part);
  } else {
    store_elements(plane.dst, dst, lane, part);
  }
}

}  // namespace

cudaError_t launch_record_moves(const runtime_api& api, const code_moves_args& args, bool dependent,
                                cudaStream_t stream) noexcept {
  const std::int64_t ctas = (args.num_rows + rows_per_cta - 1) / rows_per_cta;
  return launch(api, move_records, dim3(static_cast<unsigned>(ctas)), dim3(threads), 0, stream, dependent, args);
}

}  // namespace bifolio::inline v0_2::cuda

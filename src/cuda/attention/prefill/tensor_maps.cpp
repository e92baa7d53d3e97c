// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/prefill/tensor_maps.hpp"

#include <cuda.h>

#include <cstddef>
#include <cstring>

#include "cuda/host/plan_input.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

using encode_function = decltype(&cuTensorMapEncodeTiled);

/// One dimension of a map: its extent, the bytes from one element to the next, and how many a box takes.
struct dimension {
  cuuint64_t extent;
  cuuint64_t stride_bytes;
  cuuint32_t box;
};

CUtensorMapDataType map_type(dtype type) noexcept {
  switch (type) {
    case dtype::f32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case dtype::f16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case dtype::bf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case dtype::e4m3:
    case dtype::e5m2:
    case dtype::i8:
    case dtype::u8:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
  __builtin_unreachable();
}

template <std::size_t Rank>
bool encode(encode_function function, tensor_map& map, dtype type, const void* base, const dimension (&dims)[Rank]) {
  cuuint64_t extents[Rank];
  cuuint64_t strides[Rank];
  cuuint32_t box[Rank];
  cuuint32_t steps[Rank];
  for (std::size_t i = 0; i < Rank; ++i) {
    extents[i] = dims[i].extent;
    if (i > 0) strides[i - 1] = dims[i].stride_bytes;
    box[i] = dims[i].box;
    steps[i] = 1;
  }
  CUtensorMap encoded;
  const CUresult result =
      function(&encoded, map_type(type), static_cast<cuuint32_t>(Rank), const_cast<void*>(base), extents, strides, box,
               steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  static_assert(sizeof(encoded) == sizeof(map));
  std::memcpy(&map, &encoded, sizeof(map));
  return result == CUDA_SUCCESS;
}

constexpr cuuint64_t bytes_of(std::int64_t elements) noexcept { return static_cast<cuuint64_t>(elements) * 2; }

}  // namespace

bool encode_query_map(const device_numbers& device, const prefill_args& args, tensor_map& map) noexcept {
  const dimension dims[] = {{static_cast<cuuint64_t>(args.head_dim), 2, 64},
                            {static_cast<cuuint64_t>(args.num_q_heads), bytes_of(args.q_head_stride),
                             static_cast<cuuint32_t>(args.packed_heads)},
                            {static_cast<cuuint64_t>(args.num_tokens), bytes_of(args.q_token_stride),
                             static_cast<cuuint32_t>(args.tokens_per_warpgroup)}};
  return encode(reinterpret_cast<encode_function>(device.encode_tensor_map), map, args.q_type, args.q, dims);
}

bool encode_kv_map(const device_numbers& device, const prefill_args& args, const void* base, const kv_strides& strides,
                   tensor_map& map) noexcept {
  if (args.loading.by_copy) return true;
  const auto chunks = static_cast<cuuint64_t>(args.head_dim / 64);
  const auto groups = static_cast<cuuint64_t>(args.block_size / 8);
  const auto heads = static_cast<cuuint64_t>(args.num_kv_heads);
  const dimension dims[] = {
      {64, 2, 64},
      {8, bytes_of(strides.token), 8},
      {args.loading.head_chunks > 0 ? chunks * heads : chunks, 128, static_cast<cuuint32_t>(chunks)},
      {args.loading.head_groups > 0 ? groups * heads : groups, 8 * bytes_of(strides.token),
       static_cast<cuuint32_t>(args.loading.box_tokens / 8)},
      {static_cast<cuuint64_t>(args.num_blocks), bytes_of(strides.block), 1}};
  return encode(reinterpret_cast<encode_function>(device.encode_tensor_map), map, args.kv_type, base, dims);
}

}  // namespace bifolio::inline v0_2::cuda

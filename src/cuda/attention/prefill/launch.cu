// SPDX-License-Identifier: Apache-2.0
#include <cuda.h>

#include <algorithm>
#include <cstring>

#include "common/attention/implementations.hpp"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/launch.hpp"
#include "cuda/attention/prefill/shape.hpp"

namespace bifolio::cuda {
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

template <int Rank>
bool encode(encode_function function, tensor_map& map, dtype type, const void* base, const dimension (&dims)[Rank]) {
  cuuint64_t extents[Rank];
  cuuint64_t strides[Rank];
  cuuint32_t box[Rank];
  cuuint32_t steps[Rank];
  for (int i = 0; i < Rank; ++i) {
    extents[i] = dims[i].extent;
    if (i > 0) strides[i - 1] = dims[i].stride_bytes;
    box[i] = dims[i].box;
    steps[i] = 1;
  }
  CUtensorMap encoded;
  const CUresult result = function(&encoded, map_type(type), Rank, const_cast<void*>(base), extents, strides, box,
                                   steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  static_assert(sizeof(encoded) == sizeof(map));
  std::memcpy(&map, &encoded, sizeof(map));
  return result == CUDA_SUCCESS;
}

constexpr cuuint64_t bytes_of(std::int64_t elements) noexcept { return static_cast<cuuint64_t>(elements) * 2; }

}  // namespace

const prefill_entry* find_prefill_entry(dtype type, std::int32_t head_dim) noexcept {
  const auto one_of = [head_dim](const prefill_entry& d64, const prefill_entry& d128) {
    return head_dim == 64 ? &d64 : head_dim == 128 ? &d128 : nullptr;
  };
  switch (type) {
    case dtype::f32:
      return nullptr;
    case dtype::f16:
      return one_of(prefill_f16_64, prefill_f16_128);
    case dtype::bf16:
      return one_of(prefill_bf16_64, prefill_bf16_128);
    case dtype::e4m3:
    case dtype::e5m2:
    case dtype::i8:
    case dtype::u8:
      return nullptr;
  }
  return nullptr;
}

bool prefill_accepts_call(const attention_kernel_args& args, std::string* why) noexcept {
  constexpr std::int64_t max_stride = std::int64_t{1} << 38;  // elements; the map's limit is 2^40 bytes
  if (!suits_tensor_cores(args, why)) return false;
  for (const std::int64_t stride :
       {args.k_strides.block, args.k_strides.head, args.k_strides.token, args.v_strides.block, args.v_strides.head,
        args.v_strides.token, args.q_token_stride, args.q_head_stride}) {
    if (stride > 0 && stride < max_stride) continue;
    return detail::declines(why, "a stride of q, K or V is ", stride, "; tensor maps hold 1 to ", max_stride - 1);
  }
  return true;
}

cudaError_t launch_prefill(const runtime_api& api, const attention_kernel_args& args, const prefill_metadata& metadata,
                           const device_numbers& device, cudaStream_t stream) noexcept {
  const prefill_entry& entry = *find_prefill_entry(args.kv_type, args.head_dim);
  const auto function = reinterpret_cast<encode_function>(device.encode_tensor_map);
  const prefill_args p{with_clamped_windows(args), metadata, prefill_packed_heads(args.group_size),
                       std::min(args.block_size, prefill_tile_keys)};

  const bool pairs = prefill_takes_pairs(args.block_size);
  const auto chunks = static_cast<cuuint32_t>(args.head_dim / 64);
  const auto packed = static_cast<cuuint32_t>(p.packed_heads);
  const auto make_kv = [&](tensor_map& map, const void* base, const kv_strides& s, bool whole_head) {
    const dimension dims[] = {
        {64, 2, 64},
        {static_cast<cuuint64_t>(args.block_size), bytes_of(s.token), static_cast<cuuint32_t>(p.box_tokens)},
        {chunks, 128, whole_head ? chunks : 1},
        {static_cast<cuuint64_t>(args.num_kv_heads), bytes_of(s.head), 1},
        {static_cast<cuuint64_t>(args.num_blocks), bytes_of(s.block), 1}};
    return encode(function, map, args.kv_type, base, dims);
  };
  const dimension q_dims[] = {{static_cast<cuuint64_t>(args.head_dim), 2, 64},
                              {static_cast<cuuint64_t>(args.num_q_heads), bytes_of(args.q_head_stride), packed},
                              {static_cast<cuuint64_t>(args.num_tokens), bytes_of(args.q_token_stride), 64 / packed}};
  tensor_map q;
  tensor_map k;
  tensor_map v;
  if (!encode(function, q, args.q_type, args.q, q_dims) || !make_kv(k, args.k, args.k_strides, pairs) ||
      !make_kv(v, args.v, args.v_strides, true)) {
    return cudaErrorInvalidValue;
  }

  const prefill_function kernel = (pairs ? entry.pairs : entry.rows)[has_options(args) ? 1 : 0];
  const cudaError_t status = api.func_set_attribute(reinterpret_cast<const void*>(kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize, entry.shared_bytes);
  if (status != cudaSuccess) return status;
  return launch(api, kernel, dim3(static_cast<unsigned>(device.num_sms)), dim3(prefill::num_threads),
                static_cast<std::size_t>(entry.shared_bytes), stream, device.dependent_launch, p, q, k, v);
}

}  // namespace bifolio::cuda

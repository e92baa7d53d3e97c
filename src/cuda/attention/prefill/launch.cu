// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "common/attention/implementations.hpp"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/launch.hpp"
#include "cuda/attention/prefill/plan.hpp"
#include "cuda/attention/prefill/shape.hpp"
#include "cuda/attention/prefill/tensor_maps.hpp"
#include "cuda/host/plan_input.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {
const prefill_entry* find_prefill_entry(dtype type, std::int32_t head_dim) noexcept {
  const std::int32_t tile_dims = prefill_tiling_of(type, head_dim, false).dims;
  if (type == dtype::f32) {
    return head_dim % 4 != 0 || tile_dims == 0 ? nullptr : tile_dims == 64 ? &prefill_f32_64 : &prefill_f32_128;
  }
  if (head_dim % 8 != 0) return nullptr;
  // Without kernels over codes: null.
  const auto of = [&](const prefill_entry& f16, const prefill_entry& bf16,
                      const prefill_entry* coded) -> const prefill_entry* {
    switch (type) {
      case dtype::f16:
        return &f16;
      case dtype::bf16:
        return &bf16;
      case dtype::e4m3:
      case dtype::e5m2:
      case dtype::i8:
      case dtype::u8:
        return head_dim % 16 == 0 ? coded : nullptr;
      case dtype::f32:
        break;
    }
    return nullptr;
  };
  switch (tile_dims) {
    case 64:
      return of(prefill_f16_64, prefill_bf16_64, &prefill_coded_64);
    case 96:
      return of(prefill_f16_96, prefill_bf16_96, &prefill_coded_96);
    case 128:
      return of(prefill_f16_128, prefill_bf16_128, &prefill_coded_128);
    case 192:
      return of(prefill_f16_192, prefill_bf16_192, &prefill_coded_192);
    case 256:
      return of(prefill_f16_256, prefill_bf16_256, &prefill_coded_256);
    case 512:
      return of(prefill_f16_512, prefill_bf16_512, nullptr);
    default:
      return nullptr;
  }
}

const prefill_entry* find_prefill_entry(dtype k_type, dtype v_type, std::int32_t head_dim) noexcept {
  const bool has_wide_plane = size_of(k_type) != size_of(v_type);
  if (!has_wide_plane) return find_prefill_entry(k_type, head_dim);
  const bool is_taken = size_of(k_type) + size_of(v_type) == 3 &&
                        prefill_takes_wide_planes(prefill_tiling_of(dtype::f16, head_dim, false).dims);
  return is_taken ? find_prefill_entry(size_of(k_type) == 1 ? k_type : v_type, head_dim) : nullptr;
}

prefill_choice prefill_entry::choose(prefill_kind kind, bool transforms) const noexcept {
  switch (kind) {
    case prefill_kind::plain:
      return plain[transforms ? 1 : 0];
    case prefill_kind::tree:
      return deterministic;
    case prefill_kind::parts:
      return transforms ? deterministic_transform : deterministic;
    case prefill_kind::coded:
      return coded[transforms ? 1 : 0];
    case prefill_kind::coded_by_token:
      return coded_by_token[transforms ? 1 : 0];
    case prefill_kind::coded_by_zero:
      return coded_by_zero[transforms ? 1 : 0];
  }
  return {};
}

prefill_kind prefill_kind_of(const attention_kernel_args& args) noexcept {
  if (!args.is_coded) return prefill_kind_without_codes(args.q_type, args.head_dim, args.deterministic);
  return coded_prefill_kind(std::max(args.k_scales.tail_floats, args.v_scales.tail_floats),
                            size_of(args.k_type) != size_of(args.v_type));
}

kv_loading prefill_loading(const attention_kernel_args& args) noexcept {
  const kv_strides& s = args.k_strides;
  const prefill_tiling tiling = prefill_tiling_of(args.q_type, args.head_dim, args.deterministic);
  kv_loading loading;
  loading.box_tokens = std::gcd(args.block_size, tiling.keys);
  // The dimensions of a box are 64 dims, 8 tokens, chunks, groups, blocks. There is none left for heads, so they must
  // follow one another as groups do (hnd) or as chunks do (nhd).
  if (s.head == std::int64_t{args.block_size} * s.token) {
    loading.head_groups = args.block_size / 8;
  } else if (s.head == args.head_dim) {
    loading.head_chunks = args.head_dim / 64;
  } else {
    loading.by_copy = args.num_kv_heads > 1;
  }
  // A box has the chunks that a row has; a stage is full when it has those of the tile. Codes are widened and float32
  // is split on its way; boxes of 8 tokens take TMA longer than the copies take the producer.
  if (args.head_dim != tiling.dims || args.head_dim % 64 != 0 || loading.box_tokens % 16 != 0 || args.is_coded ||
      args.q_type == dtype::f32) {
    loading.by_copy = true;
  }
  return loading;
}

bool prefill_accepts_call(const attention_kernel_args& args, std::string* why) noexcept {
  constexpr std::int64_t max_stride = std::int64_t{1} << 38;        // elements; the map's limit is 2^40 bytes
  if (!suits_tensor_cores(args, why, args.is_coded)) return false;  // tails of blocks may differ in length
  if (prefill_kind_of(args) == prefill_kind::coded && args.k_strides.block != args.v_strides.block) {
    return detail::declines(why, "blocks of K and V are ", args.k_strides.block, " and ", args.v_strides.block,
                            " bytes apart; without scales per token it takes equal ones");
  }
  if (args.soft_cap > 0 && args.soft_cap < 0x1p-40f) {
    return detail::declines(why, "the soft cap is ", args.soft_cap, "; it takes 2^-40 and more");
  }
  for (const std::int64_t stride :
       {args.k_strides.block, args.k_strides.head, args.k_strides.token, args.v_strides.block, args.v_strides.head,
        args.v_strides.token, args.q_token_stride, args.q_head_stride}) {
    if (stride > 0 && stride < max_stride) continue;
    return detail::declines(why, "a stride of q, K or V is ", stride, "; tensor maps hold 1 to ", max_stride - 1);
  }
  // Producers of codes count bytes in 32 bits, 16 at a time, from the beginning of the plane. Any stride may be the
  // largest.
  constexpr std::int64_t max_plane_bytes = std::int64_t{1} << 36;
  const auto bytes_of = [](std::int64_t stride, dtype type) {
    return stride * static_cast<std::int64_t>(size_of(type));
  };
  const auto reach = [](std::int64_t count, std::int64_t stride) {
    return count > max_plane_bytes / stride ? max_plane_bytes + 1 : count * stride;
  };
  const std::int64_t block_stride =
      std::max(bytes_of(args.k_strides.block, args.k_type), bytes_of(args.v_strides.block, args.v_type));
  const dtype wider = size_of(args.k_type) > size_of(args.v_type) ? args.k_type : args.v_type;
  const std::int64_t head_stride = bytes_of(args.k_strides.head, wider);
  const std::int64_t token_stride = bytes_of(args.k_strides.token, wider);
  if (args.is_coded && reach(args.num_blocks, block_stride) + reach(args.num_kv_heads, head_stride) +
                               reach(args.block_size, token_stride) >
                           max_plane_bytes) {
    return detail::declines(why, "a plane beside codes or of codes has ", args.num_blocks, " blocks, ",
                            args.num_kv_heads, " heads and ", args.block_size, " tokens at strides of ", block_stride,
                            ", ", head_stride, " and ", token_stride, " bytes; it takes 2^36 bytes");
  }
  return true;
}

namespace {

coded_tokens coded_tokens_of(const attention_kernel_args& args) noexcept {
  const auto vectors = [](std::int64_t bytes) { return static_cast<std::uint32_t>(bytes / 16); };
  constexpr std::int64_t most_ids = std::int64_t{1} << 31;
  return {static_cast<std::uint32_t>(std::min(args.num_blocks, most_ids)),
          vectors(args.k_strides.block * static_cast<std::int64_t>(size_of(args.k_type))),
          vectors(args.v_strides.block * static_cast<std::int64_t>(size_of(args.v_type))),
          vectors(args.k_strides.head),
          vectors(args.k_strides.token),
          divisor(args.block_size)};
}

}  // namespace

cudaError_t launch_prefill(const runtime_api& api, const attention_kernel_args& args, const prefill_plan& plan,
                           const prefill_metadata& metadata, const device_numbers& device,
                           cudaStream_t stream) noexcept {
  const prefill_entry& entry = args.is_coded ? *find_prefill_entry(args.k_type, args.v_type, args.head_dim)
                                             : *find_prefill_entry(args.q_type, args.head_dim);
  const auto [kernel, shared_bytes, threads] = entry.choose(prefill_kind_of(args), prefill_transforms(args));
  prefill_args p{with_clamped_windows(args),
                 metadata,
                 plan.packing.heads,
                 plan.packing.tokens_per_warpgroup,
                 prefill_warpgroup_rows * plan.packing.num_consumers,
                 prefill_max_partials(device.num_sms, args.deterministic),
                 prefill_loading(args),
                 coded_tokens_of(args)};
  if (args.is_coded) {  // the producer finds a scale for each token of bfloat16
    if (args.k_type == dtype::bf16) p.k_scales.tail_floats = 1;
    if (args.v_type == dtype::bf16) p.v_scales.tail_floats = 1;
  }

  tensor_map q = {};
  tensor_map k = {};
  tensor_map v = {};
  const bool has_maps = args.q_type != dtype::f32;
  if (has_maps && (!encode_query_map(device, p, q) || !encode_kv_map(device, p, args.k, args.k_strides, k) ||
                   !encode_kv_map(device, p, args.v, args.v_strides, v))) {
    return cudaErrorInvalidValue;
  }

  const cudaError_t status = api.func_set_attribute(reinterpret_cast<const void*>(kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status != cudaSuccess) return status;
  const cudaError_t launched =
      launch(api, kernel, dim3(static_cast<unsigned>(device.num_sms)), dim3(static_cast<unsigned>(threads)),
             static_cast<std::size_t>(shared_bytes), stream, device.dependent_launch, p, q, k, v);
  if (launched != cudaSuccess || !plan.combines) return launched;
  return launch_prefill_combine(api, p, device, stream);
}

}  // namespace bifolio::inline v0_2::cuda

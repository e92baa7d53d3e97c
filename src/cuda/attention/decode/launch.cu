// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/args.hpp"
#include "cuda/attention/decode/launch.hpp"
#include "cuda/attention/decode/plan.hpp"
#include "cuda/host/plan_input.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

/// Compiled shapes of the types of 16 bits and of codes.
struct shape_entries {
  const decode_entry* f16;
  const decode_entry* bf16;
  const decode_entry* coded;
};

shape_entries entries_for(dtype type, std::int32_t head_dim) noexcept {
  switch (head_dim) {
    case 64:
      return {&decode_f16_64, &decode_bf16_64, &decode_coded_64};
    case 128:
      return {&decode_f16_128, &decode_bf16_128, &decode_coded_128};
    case 256:
      return {&decode_f16_256, &decode_bf16_256, &decode_coded_256};
    default:
      break;
  }
  if (head_dim % 8 != 0) return {};
  switch (decode_padded_dim(type, head_dim)) {
    case 64:
      return {&decode_f16_64_padded, &decode_bf16_64_padded, &decode_coded_64_padded};
    case 80:
      return {&decode_f16_80_padded, &decode_bf16_80_padded, nullptr};
    case 96:
      return {&decode_f16_96_padded, &decode_bf16_96_padded, &decode_coded_96_padded};
    case 128:
      return {&decode_f16_128_padded, &decode_bf16_128_padded, &decode_coded_128_padded};
    case 160:
      return {&decode_f16_160_padded, &decode_bf16_160_padded, &decode_coded_160_padded};
    case 192:
      return {&decode_f16_192_padded, &decode_bf16_192_padded, &decode_coded_192_padded};
    case 256:
      return {&decode_f16_256_padded, &decode_bf16_256_padded, &decode_coded_256_padded};
    default:
      return {};
  }
}

const decode_entry* f32_entry_for(std::int32_t head_dim) noexcept {
  if (head_dim % 4 != 0) return nullptr;
  switch (decode_padded_dim(dtype::f32, head_dim)) {
    case 64:
      return &decode_f32_64_padded;
    case 128:
      return &decode_f32_128_padded;
    default:
      return nullptr;
  }
}

decode_args args_of(const attention_kernel_args& call, const decode_metadata& metadata) noexcept {
  constexpr float log2e = 1.4426950408889634f;
  decode_args args;
  static_cast<attention_kernel_args&>(args) = with_clamped_windows(call);
  args.metadata = metadata;
  args.by_block_size = divisor(call.block_size);
  args.by_group_size = divisor(call.group_size);
  const dtype v_type = call.is_coded ? call.v_type : call.kv_type;
  args.by_row_vectors = divisor(call.head_dim * static_cast<std::int32_t>(size_of(v_type)) / 16);
  args.by_key_vectors = divisor(call.head_dim * static_cast<std::int32_t>(size_of(call.kv_type)) / 16);
  args.product_factor = call.soft_cap > 0 ? call.scale / call.soft_cap : call.scale * log2e;
  args.cap_log2e = call.soft_cap * log2e;
  return args;
}

}  // namespace

const decode_entry* find_decode_entry(dtype type, std::int32_t head_dim) noexcept {
  switch (type) {
    case dtype::f32:
      return f32_entry_for(head_dim);
    case dtype::f16:
      return entries_for(type, head_dim).f16;
    case dtype::bf16:
      return entries_for(type, head_dim).bf16;
    case dtype::e4m3:
    case dtype::e5m2:
    case dtype::i8:
    case dtype::u8:
      return head_dim % 16 == 0 ? entries_for(type, head_dim).coded : nullptr;
  }
  return nullptr;
}

const decode_entry* find_decode_entry(dtype k_type, dtype v_type, std::int32_t head_dim) noexcept {
  if (size_of(k_type) == size_of(v_type)) return find_decode_entry(k_type, head_dim);
  if (k_type == dtype::f32 || v_type == dtype::f32 || head_dim % 16 != 0) return nullptr;
  const bool of_keys = size_of(k_type) == 1;
  switch (decode_padded_dim(decode_shape_type(k_type, v_type), head_dim)) {
    case 64:
      return of_keys ? &decode_coded_k_64_padded : &decode_coded_v_64_padded;
    case 96:
      return of_keys ? &decode_coded_k_96_padded : &decode_coded_v_96_padded;
    case 128:
      return of_keys ? &decode_coded_k_128_padded : &decode_coded_v_128_padded;
    case 160:
      return of_keys ? &decode_coded_k_160_padded : &decode_coded_v_160_padded;
    case 192:
      return of_keys ? &decode_coded_k_192_padded : &decode_coded_v_192_padded;
    case 256:
      return of_keys ? &decode_coded_k_256_padded : &decode_coded_v_256_padded;
    default:
      return nullptr;
  }
}

cudaError_t launch_decode(const runtime_api& api, const attention_kernel_args& args, const decode_plan& plan,
                          const decode_metadata& metadata, const device_numbers& device, cudaStream_t stream) noexcept {
  const decode_entry& entry =
      *find_decode_entry(args.kv_type, args.is_coded ? args.v_type : args.kv_type, args.head_dim);
  const bool deterministic = plan.header.split_tiles != 0;
  const auto kernel = (plan.few_rows ? entry.few_rows : entry.kernels)[deterministic ? 1 : 0];
  const cudaError_t status = api.func_set_attribute(reinterpret_cast<const void*>(kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize, entry.shared_bytes);
  if (status != cudaSuccess) return status;
  return launch(api, kernel, dim3(static_cast<unsigned>(plan.grid)), dim3(static_cast<unsigned>(entry.threads)),
                static_cast<std::size_t>(entry.shared_bytes), stream, device.dependent_launch, args_of(args, metadata));
}

}  // namespace bifolio::inline v0_2::cuda

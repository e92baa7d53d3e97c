// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/kernel.cuh"
#include "cuda/attention/decode/launch.hpp"

namespace bifolio::cuda {

const decode_entry* find_decode_entry(dtype type, std::int32_t head_dim) noexcept {
  if (type == dtype::f32) return nullptr;
  const bool bf16 = type == dtype::bf16;
  switch (head_dim) {
    case 64:
      return bf16 ? &decode_bf16_64 : &decode_f16_64;
    case 128:
      return bf16 ? &decode_bf16_128 : &decode_f16_128;
    case 256:
      return bf16 ? &decode_bf16_256 : &decode_f16_256;
    default:
      return nullptr;
  }
}

cudaError_t launch_decode(const runtime_api& api, const attention_kernel_args& args, const decode_plan& plan,
                          const decode_metadata& metadata, const device_numbers& device, cudaStream_t stream) noexcept {
  const decode_entry& entry = *find_decode_entry(args.kv_type, args.head_dim);
  const decode_args all{with_clamped_windows(args), metadata};
  const auto kernel = has_options(args) ? entry.masked : entry.plain;
  const cudaError_t status = api.func_set_attribute(reinterpret_cast<const void*>(kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize, entry.shared_bytes);
  if (status != cudaSuccess) return status;
  return launch(api, kernel, dim3(static_cast<unsigned>(plan.grid)), dim3(static_cast<unsigned>(entry.threads)),
                static_cast<std::size_t>(entry.shared_bytes), stream, device.dependent_launch, all);
}

}  // namespace bifolio::cuda

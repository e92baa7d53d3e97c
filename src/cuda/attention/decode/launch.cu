// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/decode/args.hpp"
#include "cuda/attention/decode/launch.hpp"

namespace bifolio::cuda {

const decode_entry* find_decode_entry(dtype type, std::int32_t head_dim) noexcept {
  const auto one_of = [head_dim](const decode_entry& d64, const decode_entry& d128, const decode_entry& d256) {
    return head_dim == 64 ? &d64 : head_dim == 128 ? &d128 : head_dim == 256 ? &d256 : nullptr;
  };
  switch (type) {
    case dtype::f32:
      return nullptr;
    case dtype::f16:
      return one_of(decode_f16_64, decode_f16_128, decode_f16_256);
    case dtype::bf16:
      return one_of(decode_bf16_64, decode_bf16_128, decode_bf16_256);
    case dtype::e4m3:
    case dtype::e5m2:
    case dtype::i8:
    case dtype::u8:
      return nullptr;
  }
  return nullptr;
}

cudaError_t launch_decode(const runtime_api& api, const attention_kernel_args& args, const decode_plan& plan,
                          const decode_metadata& metadata, const device_numbers& device, cudaStream_t stream) noexcept {
  const decode_entry& entry = *find_decode_entry(args.kv_type, args.head_dim);
  const decode_args all{with_clamped_windows(args), metadata};
  const bool deterministic = plan.header.split_tiles != 0;
  const auto kernel = entry.kernels[has_options(args) ? 1 : 0][deterministic ? 1 : 0];
  const cudaError_t status = api.func_set_attribute(reinterpret_cast<const void*>(kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize, entry.shared_bytes);
  if (status != cudaSuccess) return status;
  return launch(api, kernel, dim3(static_cast<unsigned>(plan.grid)), dim3(static_cast<unsigned>(entry.threads)),
                static_cast<std::size_t>(entry.shared_bytes), stream, device.dependent_launch, all);
}

}  // namespace bifolio::cuda

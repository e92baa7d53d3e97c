// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>

#include "common/attention/implementations.hpp"
#include "cuda/attention/latent/launch.hpp"
#include "cuda/attention/latent/plan.hpp"
#include "cuda/attention/latent/shape.hpp"
#include "cuda/attention/prefill/args.hpp"
#include "cuda/attention/prefill/tensor_maps.hpp"
#include "cuda/host/plan_input.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {

const latent_entry* find_latent_entry(const kv_code& code, dtype type) noexcept {
  if (code.is_record()) return type == dtype::bf16 ? &latent_records : nullptr;
  if (code.type != type) return nullptr;
  switch (type) {
    case dtype::f32:
    case dtype::e4m3:
    case dtype::e5m2:
    case dtype::i8:
    case dtype::u8:
      return nullptr;
    case dtype::f16:
      return &latent_f16;
    case dtype::bf16:
      return &latent_bf16;
  }
  return nullptr;
}

kv_loading latent_loading(const attention_kernel_args& args) noexcept {
  constexpr std::int32_t largest_box = 32;  // tokens
  kv_loading loading;
  loading.box_tokens = std::gcd(args.block_size, largest_box);
  // Smaller boxes take TMA longer than the copies take the producer.
  loading.by_copy = loading.box_tokens % 16 != 0 || args.is_record;
  return loading;
}

bool latent_accepts_call(const attention_kernel_args& args, std::string* why) noexcept {
  if (!(args.scale > 0)) return detail::declines(why, "the scale is ", args.scale, "; it takes positive ones");
  if (args.soft_cap > 0) return detail::declines(why, "the call has a soft cap");
  if (args.alibi_slopes != nullptr) return detail::declines(why, "the call has ALiBi slopes");
  return prefill_accepts_call(args, why);
}

cudaError_t launch_latent(const runtime_api& api, const attention_kernel_args& args, const latent_plan& plan,
                          const prefill_metadata& metadata, const device_numbers& device,
                          cudaStream_t stream) noexcept {
  const latent_entry& both = *find_latent_entry(
      args.is_record ? kv_code{dtype::e4m3, scale_granularity::record} : kv_code{args.kv_type}, args.q_type);
  const latent_kernel_entry& entry = plan.few_rows ? both.few_rows : both.many_rows;
  prefill_args p{with_clamped_windows(args), metadata,
                 plan.packing.heads,         plan.packing.tokens_per_warpgroup,
                 latent_tile_rows,           prefill_max_partials(device.num_sms),
                 latent_loading(args)};
  tensor_map q;
  tensor_map k = {};
  if (!encode_query_map(device, p, q) || !encode_kv_map(device, p, args.k, args.k_strides, k)) {
    return cudaErrorInvalidValue;
  }
  // From here on it is of rows of the output, as the epilogue and the combine take them.
  p.head_dim = latent_v_dims;
  const cudaError_t status = api.func_set_attribute(reinterpret_cast<const void*>(entry.kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize, entry.shared_bytes);
  if (status != cudaSuccess) return status;
  const cudaError_t launched = launch(
      api, entry.kernel, dim3(static_cast<unsigned>(device.num_sms)), dim3(static_cast<unsigned>(entry.num_threads)),
      static_cast<std::size_t>(entry.shared_bytes), stream, device.dependent_launch, p, q, k);
  if (launched != cudaSuccess || !plan.combines) return launched;
  return launch_prefill_combine(api, p, device, stream);
}

}  // namespace bifolio::inline v0_2::cuda

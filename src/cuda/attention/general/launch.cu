// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/general/kernel.cuh"
#include "cuda/attention/general/launch.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

load_mode load_mode_of(const void* base, dtype type, const kv_strides& strides, std::int32_t head_dim) noexcept {
  const auto count = static_cast<std::int64_t>(16 / size_of(type));
  if (strides.dim == 1 && strides.chunk % count == 0 && head_dim % count == 0 && strides.block % count == 0 &&
      strides.head % count == 0 && strides.token % count == 0 &&
      (strides.chunk >= head_dim || strides.chunk_stride % count == 0) &&
      reinterpret_cast<std::uintptr_t>(base) % 16 == 0) {
    return load_mode::vectorised;
  }
  return strides.chunk > 1 && strides.token < strides.dim ? load_mode::strided_tokens : load_mode::strided_dims;
}

template <class T, int Rows>
cudaError_t launch_rows(const runtime_api& api, const general_args& args, const device_numbers& device,
                        cudaStream_t stream) noexcept {
  constexpr std::size_t shared_bytes = sizeof(general_shared<Rows>);
  static_assert(shared_bytes <= 99 * 1024);  // sm_86, sm_89
  const void* const kernel = reinterpret_cast<const void*>(attention_general<T, Rows>);
  const cudaError_t status =
      api.func_set_attribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (status != cudaSuccess) return status;
  // As many as can run at once, whatever the plan holds: a captured launch serves later plans too.
  const dim3 grid(static_cast<unsigned>(device.num_sms * 3));
  return launch(api, attention_general<T, Rows>, grid, dim3(general_threads), shared_bytes, stream, false, args);
}

template <class T>
cudaError_t launch_type(const runtime_api& api, general_args& args, const general_plan& plan,
                        const device_numbers& device, cudaStream_t stream) noexcept {
  args.k_mode = load_mode_of(args.call.k, args.call.k_type, args.call.k_strides, args.call.head_dim);
  args.v_mode = load_mode_of(args.call.v, args.call.v_type, args.call.v_strides, args.call.v_head_dim);
  return plan.rows_per_tile == few_rows ? launch_rows<T, few_rows>(api, args, device, stream)
                                        : launch_rows<T, many_rows>(api, args, device, stream);
}

}  // namespace

cudaError_t launch_general(const runtime_api& api, const attention_kernel_args& call, const general_plan& plan,
                           const general_metadata& metadata, const device_numbers& device,
                           cudaStream_t stream) noexcept {
  general_args args;
  args.call = call;
  args.metadata = metadata;
  args.num_dim_tiles = plan.num_dim_tiles;
  if (call.is_record) return launch_type<records>(api, args, plan, device, stream);
  if (call.is_coded) return launch_type<any_code>(api, args, plan, device, stream);
  return visit_tensor_dtype(call.kv_type, [&](auto traits) {
    return launch_type<typename decltype(traits)::storage>(api, args, plan, device, stream);
  });
}

}  // namespace bifolio::inline v0_2::cuda

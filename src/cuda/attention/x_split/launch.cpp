// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/x_split/launch.hpp"

#include "common/attention/implementations.hpp"
#include "cuda/attention/x_split/args.hpp"

namespace bifolio::inline v0_2::cuda {

bool x_split_accepts_call(const attention_kernel_args& args, std::string* why) noexcept {
  if (args.bias != nullptr) return detail::declines(why, "the call has a bias");
  const auto vec = static_cast<std::int32_t>(16 / size_of(args.kv_type));
  const kv_strides& k = args.k_strides;
  const kv_strides& v = args.v_strides;
  const auto aligned = [](const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer) % 16 == 0; };
  const bool k_is_split = k.chunk == vec && k.dim == 1 && k.token == vec && k.chunk_stride % vec == 0;
  const bool v_is_transposed = v.token == 1 && v.chunk == args.head_dim && v.dim % vec == 0;
  if (!k_is_split || !v_is_transposed) {
    return detail::declines(why, "the cache does not have the strides of layout_kind::x_split (K: chunk ", k.chunk,
                            ", dim ", k.dim, ", token ", k.token, "; V: token ", v.token, ", dim ", v.dim, ")");
  }
  if (k.head % vec == 0 && k.block % vec == 0 && v.head % vec == 0 && v.block % vec == 0 && aligned(args.k) &&
      aligned(args.v)) {
    return true;
  }
  return detail::declines(why, "blocks or heads of the cache are not aligned to 16 bytes");
}

namespace {

x_split_launcher& launcher_of(dtype kv_type) noexcept {
  switch (kv_type) {
    case dtype::f32:
      return launch_x_split_f32;
    case dtype::f16:
      return launch_x_split_f16;
    case dtype::bf16:
      return launch_x_split_bf16;
    case dtype::e4m3:
    case dtype::e5m2:
    case dtype::i8:
    case dtype::u8:
      break;  // declined when planned
  }
  __builtin_unreachable();
}

}  // namespace

cudaError_t launch_x_split(const runtime_api& api, const attention_kernel_args& args, const x_split_plan& plan,
                           const device_numbers& device, cudaStream_t stream) noexcept {
  x_split_args all;
  all.call = args;
  all.max_partitions = plan.max_partitions;
  all.num_splits = plan.num_splits;
  const cudaError_t status = launcher_of(args.kv_type)(api, all, device.dependent_launch, stream);
  if (status != cudaSuccess || plan.num_splits == 1) return status;
  return launch_x_split_reduce(api, all, device.dependent_launch, stream);
}

}  // namespace bifolio::inline v0_2::cuda

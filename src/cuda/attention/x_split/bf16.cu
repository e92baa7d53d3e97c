// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/x_split/kernel.cuh"

namespace bifolio::inline v0_2::cuda {

cudaError_t launch_x_split_bf16(const runtime_api& api, const x_split_args& args, bool dependent,
                                cudaStream_t stream) noexcept {
  return launch_x_split_16_bit<bfloat16>(api, args, dependent, stream);
}

}  // namespace bifolio::inline v0_2::cuda

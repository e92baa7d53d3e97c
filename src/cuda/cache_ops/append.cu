// SPDX-License-Identifier: Apache-2.0
#include "cuda/cache_ops/transfer.cuh"

namespace bifolio::inline v0_2::cuda {

cudaError_t launch_append(const runtime_api& api, const transfer_args& args, bool dependent,
                          cudaStream_t stream) noexcept {
  return dispatch_transfer<true>(api, args, dependent, stream);
}

}  // namespace bifolio::inline v0_2::cuda

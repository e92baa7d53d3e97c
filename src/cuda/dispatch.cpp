// SPDX-License-Identifier: Apache-2.0
#include "cuda/dispatch.hpp"

namespace bifolio::cuda {

void plan_fast(const plan_input&, fast_plan& plan) {
  plan.usable = false;
  plan.words.clear();
  plan.workspace_bytes = 0;
  plan.num_counters = 0;
}

bool try_launch_fast(const runtime_api&, const attention_kernel_args&, const fast_plan&, const device_numbers&,
                     cudaStream_t, cudaError_t&) noexcept {
  return false;
}

}  // namespace bifolio::cuda

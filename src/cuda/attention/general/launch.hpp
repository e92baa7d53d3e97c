// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention that is right for every shape, layout, dtype and option, on CUDA cores. What the tensor-core kernels do
/// not take comes here, and it is what they are tested against.

#include "cuda/attention/general/plan.hpp"
#include "cuda/host/kernel_args.hpp"
#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {

/// One launch, of a grid that does not depend on the plan's lengths. `metadata`: that of the plan on the device.
[[nodiscard]] cudaError_t launch_general(const runtime_api& api, const attention_kernel_args& args,
                                         const general_plan& plan, const general_metadata& metadata,
                                         const device_numbers& device, cudaStream_t stream) noexcept;

}  // namespace bifolio::inline v0_2::cuda

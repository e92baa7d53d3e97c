// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Joins two partial attention results of the same rows (see `backend::merge_states`). Arguments have been checked.

#include <bifolio/attention.hpp>

#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {

[[nodiscard]] cudaError_t launch_merge_states(const runtime_api& api, const merge_params& params,
                                              cudaStream_t stream) noexcept;

}  // namespace bifolio::inline v0_2::cuda

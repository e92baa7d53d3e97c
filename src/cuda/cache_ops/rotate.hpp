// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Launcher of rotate_append. Arguments have been checked, but for what only the device can see: tokens without a slot,
/// or with one past the end, are not stored; of tokens with a position outside the table nothing is written.

#include <bifolio/rotate_append.hpp>

#include "cuda/host/runtime.hpp"

namespace bifolio::inline v0_2::cuda {

/// `params` has tokens. `dependent`: see `launch`; the kernel waits for the one before it itself.
[[nodiscard]] cudaError_t launch_rotate_append(const runtime_api& api, const rotate_append_params& params,
                                               bool dependent, cudaStream_t stream) noexcept;

}  // namespace bifolio::inline v0_2::cuda

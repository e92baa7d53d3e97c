// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace bifolio::cpu {

/// Kernels of attention and merge_states.
struct attention_kernels {};

}  // namespace bifolio::cpu

// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace bifolio::cpu {

/// Kernels of append, gather, copy, convert and swap.
struct cache_kernels {};

}  // namespace bifolio::cpu

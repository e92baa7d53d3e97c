// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Whether the system would create more threads. A threading runtime that ends the process when it cannot create a
/// thread is asked for no more than these.

#include <cstdint>

namespace bifolio::inline v0_2::cpu {

/// How many threads, at most `wanted` ≥ 0, can be created at once in addition to the existing ones, with the default
/// stack. They are created, wait for one another, and have ended when this returns; other threads may take their places
/// after that.
[[nodiscard]] std::int32_t num_spare_threads(std::int32_t wanted) noexcept;

}  // namespace bifolio::inline v0_2::cpu

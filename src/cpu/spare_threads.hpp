// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Whether the system would make more threads. A runtime that ends the process when it cannot have a thread is asked
/// for no more than these.

#include <cstdint>

namespace bifolio::cpu {

/// How many threads, at most `wanted` ≥ 0, could be made at once beside those that are there, with the default stack.
/// They are made, wait for each other, and are gone when this returns; somebody else may take their places after that.
[[nodiscard]] std::int32_t num_spare_threads(std::int32_t wanted) noexcept;

}  // namespace bifolio::cpu

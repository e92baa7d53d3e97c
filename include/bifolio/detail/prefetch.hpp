// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace bifolio::inline v0_2::detail {

/// Prefetches a cache line that is about to be written. The empty asm keeps GCC 12 from deleting functions that do
/// nothing else.
[[gnu::always_inline]] inline void prefetch_to_write(const void* address) noexcept {
  __builtin_prefetch(address, 1);
  asm volatile("" : : "r"(address));
}

}  // namespace bifolio::inline v0_2::detail

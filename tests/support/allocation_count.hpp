// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Global operator new, counted, and made to fail on request. Link allocation_count.cpp into an executable to replace
/// its operator new; what malloc is asked for directly is not seen.

#include <cstdint>

namespace bifolio::test {

/// Calls of any operator new so far, in all threads.
[[nodiscard]] std::int64_t num_allocations() noexcept;

/// While it lives, the N-th allocation of this thread, counted from its making (1 = the next), throws std::bad_alloc,
/// once. 0 = none. Not to be nested.
class failing_new {
 public:
  explicit failing_new(std::int64_t nth) noexcept;
  ~failing_new();
  failing_new(const failing_new&) = delete;
  failing_new& operator=(const failing_new&) = delete;
  /// Whether the failure has happened.
  [[nodiscard]] bool happened() const noexcept;

 private:
  std::int64_t nth_;
};

}  // namespace bifolio::test

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The sentence for a number outside its range.

#include <bifolio/error.hpp>
#include <cstdint>
#include <string>

namespace bifolio::detail {

/// Throws `error` (invalid_argument) unless low ≤ value ≤ high.
inline void require_between(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  throw error(errc::invalid_argument, std::string(name) + " " + std::to_string(value) + " is not between " +
                                          std::to_string(low) + " and " + std::to_string(high));
}

}  // namespace bifolio::detail

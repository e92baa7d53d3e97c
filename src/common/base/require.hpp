// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The sentence for a number outside its range.

#include <bifolio/error.hpp>
#include <cstdint>
#include <string>

#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2::detail {

/// Throws `error` (invalid_argument) unless low ≤ value ≤ high.
inline void require_between(const char* name, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  refuse(errc::invalid_argument, name, " ", value, " is not between ", low, " and ", high);
}

}  // namespace bifolio::inline v0_2::detail

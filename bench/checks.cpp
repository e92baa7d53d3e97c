// SPDX-License-Identifier: Apache-2.0
#include "checks.hpp"

#include <string>

namespace bifolio::bench {

void require_range(const char* option, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  throw error(errc::invalid_argument, std::string(option) + " is " + std::to_string(value) + "; it must be " +
                                          std::to_string(low) + " to " + std::to_string(high));
}

void require_min_time(double seconds) {
  if (seconds >= 0) return;
  throw error(errc::invalid_argument, "--min-time is " + std::to_string(seconds) + "; it must be 0 or more");
}

void require_ok(errc code, std::string_view what) {
  if (code == errc::ok) return;
  throw error(code, std::string(what) + " was refused: " + std::string(to_string(code)));
}

}  // namespace bifolio::bench

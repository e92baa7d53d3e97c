// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What every subcommand refuses. All throw `error`.

#include <bifolio/error.hpp>
#include <cstdint>
#include <string_view>

namespace bifolio::bench {

/// invalid_argument, naming the option, when `value` is outside [low, high].
void require_range(const char* option, std::int64_t value, std::int64_t low, std::int64_t high);

/// invalid_argument when --min-time is negative or no number.
void require_min_time(double seconds);

/// `code` itself, naming the call, when it is not ok.
void require_ok(errc code, std::string_view what);

}  // namespace bifolio::bench

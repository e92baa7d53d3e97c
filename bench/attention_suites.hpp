// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Named lists of attention rows, each line in the options of `bifolio_bench attention`.

#include <span>
#include <string>
#include <string_view>

namespace bifolio::bench {

/// Throws `error` (invalid_argument) for a name that is not one of `suite_names()`.
[[nodiscard]] std::span<const char* const> suite_lines(std::string_view name);
/// Comma-separated.
[[nodiscard]] std::string suite_names();

}  // namespace bifolio::bench

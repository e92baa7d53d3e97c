// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bifolio/log.hpp>
#include <string>

namespace bifolio::inline v0_2::detail {

/// Whether anybody listens: ask before a message is put together.
[[nodiscard]] BIFOLIO_API bool is_logging() noexcept;
BIFOLIO_API void log(log_level level, const std::string& message) noexcept;

}  // namespace bifolio::inline v0_2::detail

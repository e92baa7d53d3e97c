// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Models that speak in bytes can stop in the middle of a character, or write what is none.

#include <string_view>

namespace tools {

/// Bytes at the start of `text`, which is not empty, that form one character of well-formed UTF-8; 0 when none does.
[[nodiscard]] std::size_t character_length(std::string_view text) noexcept;

/// The leading bytes of `text` that can be printed now: all but a character at the end whose rest may still come.
[[nodiscard]] std::size_t complete_utf8(std::string_view text) noexcept;

}  // namespace tools

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Models that speak in bytes can stop in the middle of a character, or write what is none.

#include <string>
#include <string_view>

namespace tools {

/// The leading bytes of `text` that can be printed now: all but a character at the end whose rest may still come.
[[nodiscard]] std::size_t complete_utf8(std::string_view text) noexcept;

/// `text` with every byte that belongs to no character replaced by U+FFFD, and control characters other than line feed
/// and tab by '?', so that a model cannot drive the terminal.
[[nodiscard]] std::string printable_utf8(std::string_view text);

}  // namespace tools

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a tokenizer.json needs of Unicode: characters of UTF-8, letters, numbers and spaces (Unicode 16.0), and
/// normalization form C (of the characters of Unicode 9.0; later ones stay as they are). These are the versions that
/// the `tokenizers` package goes by. Bytes that are not UTF-8 pass through everything, each a character of its own that
/// is neither letter, number nor space.

#include <cstdint>
#include <string>
#include <string_view>

namespace generate {

enum class character_kind : std::uint8_t { letter, number, space, other };

inline constexpr char32_t not_utf8 = 0xFFFFFFFF;

struct character {
  char32_t code = not_utf8;
  std::size_t num_bytes = 0;  ///< 0 at the end of a text
};

/// The character that begins at byte `at`.
[[nodiscard]] character character_at(std::string_view text, std::size_t at) noexcept;

/// General category L*, N*, or the property White_Space.
[[nodiscard]] character_kind kind_of(char32_t code) noexcept;

void append_utf8(std::string& text, char32_t code);

/// Normalization form C (Unicode Standard Annex #15).
[[nodiscard]] std::string to_nfc(std::string_view text);

}  // namespace generate

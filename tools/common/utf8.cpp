// SPDX-License-Identifier: Apache-2.0
#include "tools/common/utf8.hpp"

#include <algorithm>

namespace tools {
namespace {

bool is_continuation(char c) noexcept { return (static_cast<unsigned char>(c) & 0xc0u) == 0x80u; }

/// Bytes of the character that starts with `lead`; 0 when none does.
std::size_t announced_length(char lead) noexcept {
  const auto byte = static_cast<unsigned char>(lead);
  if (byte < 0x80) return 1;
  if (byte >= 0xc2 && byte < 0xe0) return 2;
  if (byte >= 0xe0 && byte < 0xf0) return 3;
  return byte >= 0xf0 && byte < 0xf5 ? 4 : 0;
}

/// Overlong forms, surrogates and numbers past U+10FFFF show in the second byte (Unicode 15, table 3-7).
bool is_allowed_second(char lead, char second) noexcept {
  const auto a = static_cast<unsigned char>(lead);
  const auto b = static_cast<unsigned char>(second);
  if (a == 0xe0) return b >= 0xa0;
  if (a == 0xed) return b < 0xa0;
  if (a == 0xf0) return b >= 0x90;
  if (a == 0xf4) return b < 0x90;
  return true;
}

}  // namespace

std::size_t character_length(std::string_view text) noexcept {
  const std::size_t length = announced_length(text[0]);
  if (length == 0 || length > text.size()) return 0;
  if (length > 1 && !is_allowed_second(text[0], text[1])) return 0;
  return std::all_of(text.begin() + 1, text.begin() + static_cast<std::ptrdiff_t>(length), is_continuation) ? length
                                                                                                            : 0;
}

std::size_t complete_utf8(std::string_view text) noexcept {
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
    const char c = text[text.size() - back];
    if (is_continuation(c)) continue;
    return announced_length(c) > back ? text.size() - back : text.size();
  }
  return text.size();
}

}  // namespace tools

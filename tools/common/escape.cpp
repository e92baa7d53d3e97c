// SPDX-License-Identifier: Apache-2.0
#include "tools/common/escape.hpp"

#include <algorithm>

#include "tools/common/utf8.hpp"

namespace tools {
namespace {

constexpr std::size_t excerpt_bytes = 60;

void append_hex(std::string& to, unsigned char byte) {
  constexpr std::string_view digits = "0123456789abcdef";
  to += digits[byte >> 4];
  to += digits[byte & 15];
}

/// C0, DEL, and C1 (U+0080 … U+009F), which terminals read as ESC and a letter.
bool is_control(std::string_view character) noexcept {
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) return first < 0x20 || first == 0x7f;
  return first == 0xc2 && static_cast<unsigned char>(character[1]) < 0xa0;
}

/// Escapes what is no character and the control characters that are not among `kept`.
std::string escaped(std::string_view text, std::string_view kept) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const std::size_t length = character_length(text);
    const std::string_view character = text.substr(0, std::max<std::size_t>(length, 1));
    const bool is_shown = length > 0 && (!is_control(character) || kept.find(character) != std::string_view::npos);
    if (is_shown) {
      result += character;
    } else {
      for (const char byte : character) append_hex(result += "\\x", static_cast<unsigned char>(byte));
    }
    text.remove_prefix(character.size());
  }
  return result;
}

}  // namespace

std::string printable_text(std::string_view text) { return escaped(text, "\n\t"); }

std::string printable_line(std::string_view text) { return escaped(text, {}); }

std::string excerpt(std::string_view text) {
  if (text.size() <= excerpt_bytes) return printable_line(text);
  const std::string_view beginning = text.substr(0, excerpt_bytes);
  return printable_line(beginning.substr(0, complete_utf8(beginning))) + "...";
}

std::string md_cell(std::string_view text) {
  std::string result;
  for (const char c : printable_line(text)) {
    if (c == '|') result += '\\';
    result += c;
  }
  return result;
}

std::string csv_cell(std::string_view text) {
  std::string cell = printable_text(text);
  if (cell.find_first_of(",\"\n") == std::string::npos) return cell;
  std::string quoted = "\"";
  for (const char c : cell) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

std::string svg_text(std::string_view text) {
  std::string result;
  for (const char c : printable_line(text)) {
    switch (c) {
      case '&':
        result += "&amp;";
        break;
      case '<':
        result += "&lt;";
        break;
      case '>':
        result += "&gt;";
        break;
      case '"':
        result += "&quot;";
        break;
      default:
        result += c;
    }
  }
  return result;
}

std::string printable_json(std::string_view json) {
  std::string result;
  result.reserve(json.size());
  for (std::size_t at = 0; at < json.size(); ++at) {
    const auto byte = static_cast<unsigned char>(json[at]);
    const auto next = at + 1 < json.size() ? static_cast<unsigned char>(json[at + 1]) : static_cast<unsigned char>(0);
    if (byte == 0x7f) {
      append_hex(result += "\\u00", byte);
    } else if (byte == 0xc2 && next >= 0x80 && next < 0xa0) {
      append_hex(result += "\\u00", next);
      ++at;
    } else {
      result += json[at];
    }
  }
  return result;
}

}  // namespace tools

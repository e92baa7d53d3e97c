// SPDX-License-Identifier: Apache-2.0
#include "unicode.hpp"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <vector>

#include "tools/common/utf8.hpp"
#include "unicode_tables.hpp"

namespace generate {
namespace {

// Hangul syllables are composed by arithmetic: the Unicode Standard, section 3.12.
constexpr char32_t syllable_base = 0xAC00, lead_base = 0x1100, vowel_base = 0x1161, tail_base = 0x11A7;
constexpr char32_t num_leads = 19, num_vowels = 21, num_tails = 28, num_syllables = num_leads * num_vowels * num_tails;

template <class Table>
auto find_range(const Table& table, char32_t code) noexcept {
  const auto after = std::upper_bound(table.begin(), table.end(), code,
                                      [](char32_t wanted, const auto& range) { return wanted < range.first; });
  if (after == table.begin() || code > std::prev(after)->last) return table.end();
  return std::prev(after);
}

/// 0: a character that begins a sequence.
std::uint8_t combining_class(char32_t code) noexcept {
  if (code < 0x300) return 0;
  const auto found = find_range(combining_classes, code);
  return found == combining_classes.end() ? std::uint8_t{0} : found->combining_class;
}

void decompose(char32_t code, std::vector<char32_t>& to) {
  if (code >= syllable_base && code < syllable_base + num_syllables) {
    const char32_t index = code - syllable_base;
    to.push_back(lead_base + index / (num_vowels * num_tails));
    to.push_back(vowel_base + index % (num_vowels * num_tails) / num_tails);
    if (index % num_tails != 0) to.push_back(tail_base + index % num_tails);
    return;
  }
  const auto found = std::ranges::lower_bound(decompositions, code, {}, &decomposition::from);
  if (found == decompositions.end() || found->from != code) {
    to.push_back(code);
    return;
  }
  decompose(found->first, to);
  if (found->second != 0) decompose(found->second, to);
}

std::optional<char32_t> compose(char32_t a, char32_t b) {
  static const auto pairs = [] {
    std::unordered_map<std::uint64_t, char32_t> result;
    for (const decomposition& row : decompositions) {
      if (row.composes) result.emplace(std::uint64_t{row.first} << 32 | row.second, row.from);
    }
    return result;
  }();
  if (a >= lead_base && a < lead_base + num_leads && b >= vowel_base && b < vowel_base + num_vowels) {
    return syllable_base + ((a - lead_base) * num_vowels + (b - vowel_base)) * num_tails;
  }
  const bool has_no_tail =
      a >= syllable_base && a < syllable_base + num_syllables && (a - syllable_base) % num_tails == 0;
  if (has_no_tail && b > tail_base && b < tail_base + num_tails) return a + (b - tail_base);
  const auto found = pairs.find(std::uint64_t{a} << 32 | b);
  return found == pairs.end() ? std::nullopt : std::optional(found->second);
}

/// Marks after a character in the order of their classes.
void order_marks(std::vector<char32_t>& codes) {
  for (std::size_t begin = 0; begin < codes.size(); ++begin) {
    if (combining_class(codes[begin]) == 0) continue;
    std::size_t end = begin;
    while (end < codes.size() && combining_class(codes[end]) != 0) ++end;
    std::stable_sort(codes.begin() + static_cast<std::ptrdiff_t>(begin),
                     codes.begin() + static_cast<std::ptrdiff_t>(end),
                     [](char32_t a, char32_t b) { return combining_class(a) < combining_class(b); });
    begin = end;
  }
}

/// In place: each character joins the last one of class 0 before it, unless one of its class or above is between.
void compose_all(std::vector<char32_t>& codes) {
  std::optional<std::size_t> starter;
  std::size_t num_kept = 0;
  std::uint8_t last_class = 0;
  for (const char32_t code : codes) {
    const std::uint8_t its_class = combining_class(code);
    const bool is_next = starter && *starter + 1 == num_kept;
    if (starter && (is_next || last_class < its_class)) {
      if (const auto composed = compose(codes[*starter], code)) {
        codes[*starter] = *composed;
        continue;
      }
    }
    if (its_class == 0) starter = num_kept;
    last_class = its_class;
    codes[num_kept++] = code;
  }
  codes.resize(num_kept);
}

}  // namespace

character character_at(std::string_view text, std::size_t at) noexcept {
  if (at >= text.size()) return {not_utf8, 0};
  const auto byte = [&](std::size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[at + i])); };
  if (byte(0) < 0x80) return {byte(0), 1};
  switch (tools::character_length(text.substr(at))) {
    case 2:
      return {(byte(0) & 0x1F) << 6 | (byte(1) & 0x3F), 2};
    case 3:
      return {(byte(0) & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F), 3};
    case 4:
      return {(byte(0) & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F), 4};
    default:
      return {not_utf8, 1};
  }
}

character_kind kind_of(char32_t code) noexcept {
  switch (code) {
    case 0x85:
    case 0xA0:
    case 0x1680:
    case 0x2028:
    case 0x2029:
    case 0x202F:
    case 0x205F:
    case 0x3000:
      return character_kind::space;
    default:
      break;
  }
  if ((code >= 0x09 && code <= 0x0D) || code == 0x20 || (code >= 0x2000 && code <= 0x200A)) {
    return character_kind::space;
  }
  if (code < 0x80) {  // most of most texts
    if ((code >= 'a' && code <= 'z') || (code >= 'A' && code <= 'Z')) return character_kind::letter;
    return code >= '0' && code <= '9' ? character_kind::number : character_kind::other;
  }
  if (find_range(letters, code) != letters.end()) return character_kind::letter;
  return find_range(numbers, code) != numbers.end() ? character_kind::number : character_kind::other;
}

void append_utf8(std::string& text, char32_t code) {
  const auto add = [&](char32_t byte) { text += static_cast<char>(static_cast<unsigned char>(byte)); };
  if (code < 0x80) {
    add(code);
  } else if (code < 0x800) {
    add(0xC0 | code >> 6);
    add(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    add(0xE0 | code >> 12);
    add(0x80 | (code >> 6 & 0x3F));
    add(0x80 | (code & 0x3F));
  } else {
    add(0xF0 | code >> 18);
    add(0x80 | (code >> 12 & 0x3F));
    add(0x80 | (code >> 6 & 0x3F));
    add(0x80 | (code & 0x3F));
  }
}

std::string to_nfc(std::string_view text) {
  // Nothing below U+0300 composes with what is before it or changes its own form.
  if (std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0xCC; })) return std::string(text);
  std::string result;
  std::vector<char32_t> codes;
  const auto flush = [&] {
    order_marks(codes);
    compose_all(codes);
    for (const char32_t code : codes) append_utf8(result, code);
    codes.clear();
  };
  for (std::size_t at = 0; at < text.size();) {
    const character next = character_at(text, at);
    if (next.code == not_utf8) {
      flush();
      result += text[at];
    } else {
      decompose(next.code, codes);
    }
    at += next.num_bytes;
  }
  flush();
  return result;
}

}  // namespace generate

// SPDX-License-Identifier: Apache-2.0
#include "pre_tokenizer.hpp"

#include <array>

#include "unicode.hpp"

namespace generate {
namespace {

using enum character_kind;

struct known_pattern {
  split_rule rule;
  std::string_view pattern;
};
constexpr std::array<known_pattern, 3> known_patterns{{
    {split_rule::gpt2, R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)"},
    {split_rule::llama3, R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
                         R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
    {split_rule::qwen2, R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|)"
                        R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)"},
}};

/// A text and where its characters end. The alternatives of an expression are tried in its order; each returns the end
/// of its match that begins at `at`, or `at` when it does not match.
class matcher {
 public:
  matcher(split_rule rule, std::string_view text) : rule_(rule), text_(text) {}

  [[nodiscard]] std::size_t end_of_match(std::size_t at) const {
    const bool is_gpt2 = rule_ == split_rule::gpt2;
    if (const std::size_t end = contraction(at, !is_gpt2); end > at) return end;
    if (const std::size_t end = is_gpt2 ? after_space(at, letter) : word(at); end > at) return end;
    if (const std::size_t end =
            is_gpt2 ? after_space(at, number) : run(at, number, rule_ == split_rule::llama3 ? 3 : 1);
        end > at) {
      return end;
    }
    if (const std::size_t end = after_space(at, other); end > at) return is_gpt2 ? end : line_ends(end);
    return spaces(at, !is_gpt2);
  }

 private:
  static constexpr std::size_t no_limit = SIZE_MAX;

  [[nodiscard]] bool is_line_end(std::size_t at) const {
    return at < text_.size() && (text_[at] == '\n' || text_[at] == '\r');
  }
  [[nodiscard]] bool is(std::size_t at, character_kind kind) const {
    return at < text_.size() && kind_of(character_at(text_, at).code) == kind;
  }
  /// Characters of a kind, `most` at most.
  [[nodiscard]] std::size_t run(std::size_t at, character_kind kind, std::size_t most = no_limit) const {
    for (std::size_t count = 0; count < most && is(at, kind); ++count) at += character_at(text_, at).num_bytes;
    return at;
  }
  [[nodiscard]] std::size_t line_ends(std::size_t at) const {
    while (is_line_end(at)) ++at;
    return at;
  }

  /// 's|'t|'re|'ve|'m|'ll|'d, in any case for (?i:…); the long s is an s in another case.
  [[nodiscard]] std::size_t contraction(std::size_t at, bool any_case) const {
    if (at >= text_.size() || text_[at] != '\'') return at;
    const auto letter_at = [&](std::size_t i) {
      const char c = i < text_.size() ? text_[i] : '\0';
      return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    };
    const char first = letter_at(at + 1), second = letter_at(at + 2);
    if (first == 's' || first == 't') return at + 2;
    if ((first == 'r' || first == 'v') && second == 'e') return at + 3;
    if (first == 'm') return at + 2;
    if (first == 'l' && second == 'l') return at + 3;
    if (first == 'd') return at + 2;
    return any_case && text_.substr(at + 1, 2) == "\u017F" ? at + 3 : at;
  }

  /// " ?\p{L}+" and the like.
  [[nodiscard]] std::size_t after_space(std::size_t at, character_kind kind) const {
    const std::size_t begin = at < text_.size() && text_[at] == ' ' ? at + 1 : at;
    const std::size_t end = run(begin, kind);
    return end > begin ? end : at;
  }

  /// [^\r\n\p{L}\p{N}]?\p{L}+
  [[nodiscard]] std::size_t word(std::size_t at) const {
    const bool has_prefix = !is_line_end(at) && (is(at, space) || is(at, other));
    const std::size_t begin = has_prefix ? at + character_at(text_, at).num_bytes : at;
    const std::size_t end = run(begin, letter);
    return end > begin ? end : at;
  }

  /// \s*[\r\n]+ if `lines`, then \s+(?!\S)|\s+: all but the last character of spaces that something follows.
  [[nodiscard]] std::size_t spaces(std::size_t at, bool lines) const {
    std::size_t end = at, last = at, after_line = at;
    while (is(end, space)) {
      if (is_line_end(end)) after_line = end + 1;
      last = end;
      end += character_at(text_, end).num_bytes;
    }
    if (lines && after_line > at) return after_line;
    return end == text_.size() || last == at ? end : last;
  }

  split_rule rule_;
  std::string_view text_;
};

std::vector<std::string_view> split_digits(std::string_view text) {
  std::vector<std::string_view> parts;
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const character next = character_at(text, at);
    if (kind_of(next.code) == number) {
      if (at > begin) parts.push_back(text.substr(begin, at - begin));
      parts.push_back(text.substr(at, next.num_bytes));
      begin = at + next.num_bytes;
    }
    at += next.num_bytes;
  }
  if (begin < text.size()) parts.push_back(text.substr(begin));
  return parts;
}

}  // namespace

std::optional<split_rule> rule_of_pattern(std::string_view pattern) noexcept {
  for (const known_pattern& row : known_patterns) {
    if (row.pattern == pattern) return row.rule;
  }
  return std::nullopt;
}

std::vector<std::string_view> split(split_rule rule, std::string_view text) {
  if (rule == split_rule::digits) return split_digits(text);
  const matcher words(rule, text);
  std::vector<std::string_view> parts;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = words.end_of_match(at);
    parts.push_back(text.substr(at, end - at));
    at = end;
  }
  return parts;
}

}  // namespace generate

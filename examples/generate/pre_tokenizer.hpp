// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Cutting a text into the words that a byte-pair encoding merges within, as the regular expressions of published
/// tokenizers do. Each expression is matched by code of its own: C++'s std::regex knows no Unicode categories.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace generate {

enum class split_rule : std::uint8_t {
  gpt2,    ///< GPT-2's, built into the ByteLevel pre-tokenizer
  llama3,  ///< Llama 3: contractions in any case, digits by threes
  qwen2,   ///< Qwen2 and later: like Llama 3's, every digit by itself
  digits,  ///< every number character by itself, what is between them whole
};

/// The rule of a regular expression in a tokenizer.json; nothing for one that this program has no code for.
[[nodiscard]] std::optional<split_rule> rule_of_pattern(std::string_view pattern) noexcept;

/// The texts that `rule` cuts a text into; together they are the text.
[[nodiscard]] std::vector<std::string_view> split(split_rule rule, std::string_view text);

}  // namespace generate

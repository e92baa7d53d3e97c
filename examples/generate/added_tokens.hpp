// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Texts that are one token wherever they stand, such as "<|im_end|>". They are found before anything else is done to a
/// text.

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace generate {

/// A part of a text: an added token, or the text between two of them.
struct text_part {
  std::int32_t id = -1;  ///< −1: text
  std::string_view text;
};

class added_tokens {
 public:
  /// `content` is not empty.
  void add(std::string content, std::int32_t id);

  /// The parts of a text, in order. Of the tokens at one place the longest counts; no part is empty.
  [[nodiscard]] std::vector<text_part> split(std::string_view text) const;

 private:
  struct token {
    std::string content;
    std::int32_t id = -1;
  };
  std::array<std::vector<token>, 256> by_first_byte_;  // each with the longest first
};

}  // namespace generate

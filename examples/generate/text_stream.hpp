// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The text of one sequence while its tokens come, in parts that can be shown: never the beginning of a stop string,
/// and never a character without its rest. The text ends before a stop string.

#include <string>
#include <vector>

#include "tokenizer.hpp"

namespace generate {

class text_stream {
 public:
  /// Continues a text that ends with `before`. Tokenizer and stop strings, none of which is empty, are borrowed.
  text_stream(const tokenizer& tokens, bifolio::token_id before, const std::vector<std::string>& stops)
      : tokens_(&tokens), stops_(&stops), before_(before) {}

  /// Whether the text has come to a stop string with this token; nothing is added after one.
  bool add(bifolio::token_id id);
  [[nodiscard]] bool is_stopped() const noexcept { return is_stopped_; }
  /// What can be shown and was not taken yet.
  [[nodiscard]] std::string take();
  /// All that was not taken yet: no token follows.
  [[nodiscard]] std::string take_rest();

 private:
  const tokenizer* tokens_;
  const std::vector<std::string>* stops_;
  bifolio::token_id before_;
  std::string held_;
  bool is_stopped_ = false;
};

}  // namespace generate

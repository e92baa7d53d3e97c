// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "tokenizer.hpp"

namespace generate {

struct chat_message {
  std::string role;
  std::string content;
};

/// The conversation as one text that the assistant's next words continue. The form is that of the marks which the
/// tokenizer has as tokens: ChatML, Llama 3 or Gemma; without any of them plain lines, "role: content". (A checkpoint's
/// own Jinja template is not read.) Marks in a content are tokens as well.
[[nodiscard]] std::string format_chat(const std::vector<chat_message>& messages, const tokenizer& tokens);

}  // namespace generate

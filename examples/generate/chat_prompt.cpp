// SPDX-License-Identifier: Apache-2.0
#include "chat_prompt.hpp"

namespace generate {
namespace {

struct chat_form {
  const char* mark;  // one token where the form is known
  const char* before_role;
  const char* after_role;
  const char* after_content;
  const char* assistant;  // its role's name
};

constexpr chat_form forms[] = {
    {"<|im_start|>", "<|im_start|>", "\n", "<|im_end|>\n", "assistant"},
    {"<|start_header_id|>", "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", "assistant"},
    {"<start_of_turn>", "<start_of_turn>", "\n", "<end_of_turn>\n", "model"},
};
constexpr chat_form plain{"", "", ": ", "\n", "assistant"};

const chat_form& form_of(const tokenizer& tokens) {
  const std::size_t none = tokens.encode("").size();
  for (const chat_form& form : forms) {
    if (tokens.encode(form.mark).size() == none + 1) return form;
  }
  return plain;
}

}  // namespace

std::string format_chat(const std::vector<chat_message>& messages, const tokenizer& tokens) {
  const chat_form& form = form_of(tokens);
  std::string text;
  for (const chat_message& one : messages) {
    const std::string role = one.role == "assistant" ? form.assistant : one.role;
    text += form.before_role + role + form.after_role + one.content + form.after_content;
  }
  return text + form.before_role + form.assistant + form.after_role;
}

}  // namespace generate

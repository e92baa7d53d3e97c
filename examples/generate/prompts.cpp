// SPDX-License-Identifier: Apache-2.0
#include "prompts.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "binary_file.hpp"
#include "chat_prompt.hpp"
#include "input_error.hpp"
#include "tools/common/escape.hpp"
#include "tools/common/json.hpp"

namespace generate {
namespace {

struct prompt_text {
  std::string text;
  std::int32_t max_new_tokens = 0;
};

/// "a text", or {"prompt": "a text", "max_new_tokens": 20}.
prompt_text parse_line(const std::string& line, const std::string& file, int number) {
  const auto refuse = [&](const std::string& why) {
    throw input_error(
        fmt::format("{}: line {} is neither a JSON string nor an object with \"prompt\" and "
                    "\"max_new_tokens\": {}",
                    file, number, why));
  };
  nlohmann::json value;
  try {
    value = tools::parse_json(line);
  } catch (const tools::json_error& problem) {
    refuse(fmt::format("it is {}", problem.what()));
  }
  if (value.is_string()) return {value.get<std::string>()};
  prompt_text result;
  bool has_text = false;
  if (!value.is_object()) refuse(tools::json_excerpt(value));
  for (const auto& [name, field] : value.items()) {
    if (name == "prompt" && field.is_string()) {
      result.text = field.get<std::string>();
      has_text = true;
    } else if (name == "max_new_tokens" && field.is_number_integer() && field >= 1 && field <= INT32_MAX) {
      result.max_new_tokens = field.get<std::int32_t>();
    } else {
      refuse(fmt::format("it has {}: {}", tools::excerpt(name), tools::json_excerpt(field)));
    }
  }
  if (!has_text) refuse("it has no prompt");
  return result;
}

void read_prompts(const std::filesystem::path& path, std::vector<prompt_text>& prompts) {
  binary_file file(path);
  std::istringstream text(file.read_text(64 << 20));
  const bool json_lines = path.extension() == ".jsonl";
  const std::size_t before = prompts.size();
  std::string line;
  for (int number = 1; std::getline(text, line); ++number) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty()) continue;
    prompts.push_back(json_lines ? parse_line(line, file.name(), number) : prompt_text{line});
  }
  if (prompts.size() == before) throw input_error(fmt::format("{}: there is no prompt in it", file.name()));
}

std::vector<prompt_text> collect_texts(const options& o) {
  std::vector<prompt_text> prompts;
  for (const std::string& text : o.prompts) prompts.push_back({text});
  if (!o.prompts_file.empty()) read_prompts(o.prompts_file, prompts);
  if (!prompts.empty() || !o.prompt_ids.empty()) return prompts;
  if (!o.model.empty()) return {{""}};
  // In the manner of its text: a chapter's name, then numbered verses. No Bible has these chapters.
  return {{"Psalm 151\n1 The LORD "},
          {"Proverbs 32\n1 A wise man "},
          {"Genesis 51\n1 And Joseph "},
          {"John 22\n1 Jesus answered and said "}};
}

}  // namespace

std::vector<bifolio::token_id> encode_prompt(const std::string& name, std::string_view text, const tokenizer& tokens,
                                             std::int32_t limit) {
  if (const std::uint64_t least = tokens.min_num_ids(text.size()); least > static_cast<std::uint64_t>(limit)) {
    throw input_error(fmt::format("{} of {} bytes has at least {} tokens, the model takes at most {}", name,
                                  text.size(), least, limit));
  }
  std::vector<bifolio::token_id> ids = tokens.encode(text);
  check_prompt(name, ids, std::numeric_limits<std::int32_t>::max(), limit);
  return ids;
}

void check_prompt(const std::string& name, std::span<const bifolio::token_id> ids, std::int32_t vocab_size,
                  std::int32_t limit) {
  for (const bifolio::token_id id : ids) {
    if (to_index(id) < 0 || to_index(id) >= vocab_size) {
      throw input_error(fmt::format("{} has the token id {}, allowed are 0 to {}, the model's vocabulary", name,
                                    to_index(id), vocab_size - 1));
    }
  }
  if (ids.empty()) {
    throw input_error(fmt::format("{} is empty, and the model's tokenizer puts no token before a text", name));
  }
  if (std::ssize(ids) > limit) {
    throw input_error(fmt::format("{} has {} tokens, the model takes at most {}", name, ids.size(), limit));
  }
}

std::vector<prompt> collect_prompts(const options& o, const loaded_model& model) {
  const model_config& c = model.weights.config;
  std::vector<prompt> prompts;
  const auto next_name = [&prompts] { return fmt::format("prompt {}", prompts.size() + 1); };
  const std::string beginning =
      o.shared_prompt.empty() ? std::string() : binary_file(o.shared_prompt).read_text(64 << 20);
  for (const prompt_text& own : collect_texts(o)) {
    std::string text = beginning + own.text;
    if (o.chat) text = format_chat({{"user", text}}, *model.tokens);
    std::vector<bifolio::token_id> ids = encode_prompt(next_name(), text, *model.tokens, c.max_positions);
    prompts.push_back({std::move(text), std::move(ids), own.max_new_tokens});
  }
  for (const std::vector<bifolio::token_id>& ids : o.prompt_ids) {
    check_prompt(next_name(), ids, c.vocab_size, c.max_positions);
    prompts.push_back({model.tokens->decode_all(ids), ids});
  }
  return prompts;
}

}  // namespace generate

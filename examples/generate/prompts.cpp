// SPDX-License-Identifier: Apache-2.0
#include "prompts.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "binary_file.hpp"
#include "input_error.hpp"
#include "tools/common/json.hpp"

namespace generate {
namespace {

std::string parse_json_string(const std::string& line, const std::string& file, int number) {
  nlohmann::json value;
  try {
    value = tools::parse_json(line);
  } catch (const tools::json_error& problem) {
    throw input_error(fmt::format("{}: line {} is not a JSON string: it is {}", file, number, problem.what()));
  }
  if (!value.is_string()) throw input_error(fmt::format("{}: line {} is not a JSON string", file, number));
  return value.get<std::string>();
}

void read_prompts(const std::filesystem::path& path, std::vector<std::string>& prompts) {
  binary_file file(path);
  std::istringstream text(file.read_text(64 << 20));
  const bool json_lines = path.extension() == ".jsonl";
  const std::size_t before = prompts.size();
  std::string line;
  for (int number = 1; std::getline(text, line); ++number) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    if (line.empty()) continue;
    prompts.push_back(json_lines ? parse_json_string(line, file.name(), number) : line);
  }
  if (prompts.size() == before) throw input_error(fmt::format("{}: there is no prompt in it", file.name()));
}

}  // namespace

std::vector<std::string> collect_prompts(const options& o) {
  std::vector<std::string> prompts = o.prompts;
  if (!o.prompts_file.empty()) read_prompts(o.prompts_file, prompts);
  if (!prompts.empty()) return prompts;
  if (!o.model.empty()) return {""};
  // In the manner of its text: a chapter's name, then numbered verses. No Bible has these chapters.
  return {"Psalm 151\n1 The LORD ", "Proverbs 32\n1 A wise man ", "Genesis 51\n1 And Joseph ",
          "John 22\n1 Jesus answered and said "};
}

}  // namespace generate

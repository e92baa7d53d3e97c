// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The tiny checkpoints of every architecture in models/ and what transformers says with them (tiny_models.py).

#include <array>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "checkpoint.hpp"
#include "generation_fixture.hpp"
#include "support/token_ids.hpp"

namespace bifolio::test {

inline constexpr std::array model_kinds{"llama3", "mistral", "qwen2",   "qwen3",
                                        "gemma2", "gemma3",  "gpt_oss", "qwen3_5"};
/// Those that a GPU runs: all but mixtures of experts and recurrent layers.
inline constexpr std::span gpu_model_kinds = std::span(model_kinds).first<6>();
/// Those with several layer groups.
inline constexpr std::array grouped_model_kinds{"gemma2", "gemma3", "gpt_oss", "qwen3_5"};

struct model_fixture {
  explicit model_fixture(const std::string& kind)
      : model(generate::load_hugging_face(std::filesystem::path(BIFOLIO_EXAMPLE_FIXTURES) / "models" / kind)),
        expected(nlohmann::json::parse(
            std::ifstream(std::filesystem::path(BIFOLIO_EXAMPLE_FIXTURES) / "models" / kind / "expected.json"))) {}

  generate::checkpoint model;
  nlohmann::json expected;
};

inline std::vector<token_id> ids_in(const nlohmann::json& row, const char* key) {
  return to_ids(row.at(key).get<std::vector<std::int32_t>>());
}

/// All that was fed in a row: the last id is chosen and not fed.
inline std::vector<token_id> fed_ids(const nlohmann::json& row) {
  std::vector<token_id> ids = ids_in(row, "prompt_ids");
  const std::vector<token_id> output = ids_in(row, "output_ids");
  ids.insert(ids.end(), output.begin(), output.end() - 1);
  return ids;
}

/// The largest difference of any logit in the fixture.
inline double worst_logit(const generate::checkpoint& model, const nlohmann::json& expected,
                          const generation_setup& setup = {}) {
  double worst = 0;
  for (const nlohmann::json& row : expected.at("rows")) {
    const auto logits = paged_logits(model, fed_ids(row), 7, setup);
    for (const nlohmann::json& at : row.at("logits")) {
      for (const nlohmann::json& pair : at[1]) {
        const float got = logits[at[0].get<std::size_t>()][pair[0].get<std::size_t>()];
        worst = std::max(worst, std::abs(static_cast<double>(got) - pair[1].get<double>()));
      }
    }
  }
  return worst;
}

}  // namespace bifolio::test

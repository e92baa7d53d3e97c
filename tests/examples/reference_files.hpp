// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The two llama2.c models outside the tree with the outputs of their reference program, read into structs.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace bifolio::test {

struct reference_row {
  std::string id;
  std::string prompt;
  std::vector<std::int32_t> prompt_ids;
  std::vector<std::int32_t> output_ids;
  std::string ended_by;
};

struct reference_logits {
  std::string id;  ///< row of `reference_row`
  std::int32_t position = 0;
  std::int32_t token_in = 0;
  double mean = 0;
  double rms = 0;
  std::vector<std::pair<std::int32_t, double>> largest;  ///< id, logit
};

struct reference_nll {
  double mean = 0;
  std::vector<std::int32_t> ids;
  std::vector<double> per_position;
};

struct reference_model {
  std::string name;
  std::filesystem::path weights;
  std::filesystem::path tokenizer;
  std::vector<reference_row> rows;
  std::vector<reference_logits> logits;
  std::vector<reference_nll> texts;
};

/// "stories260K" or "stories15M", the latter unpacked into the build folder; nothing when the folder is absent.
/// Throws when it is there and cannot be used.
[[nodiscard]] std::optional<reference_model> find_reference_model(const std::string& name);

/// A folder of the build tree for what a test writes; made on the first call.
[[nodiscard]] std::filesystem::path scratch_directory();

}  // namespace bifolio::test

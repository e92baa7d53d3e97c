// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A checkpoint with the tokenizer that belongs to it.

#include <filesystem>
#include <memory>

#include "checkpoint.hpp"
#include "tokenizer.hpp"

namespace generate {

struct loaded_model {
  checkpoint weights;
  std::unique_ptr<tokenizer> tokens;
};

/// The model that is committed with this example: in the source tree, or next to the executable (its folder `model`, or
/// ../share/bifolio/model). Throws `input_error`, saying where was looked.
[[nodiscard]] std::filesystem::path find_bundled_model();

/// Loads what the path's kind says: a .bin is llama2.c's, everything else Hugging Face's. Without a tokenizer file the
/// vocabulary must be the 256 bytes. Throws `input_error`.
[[nodiscard]] loaded_model load_model(const std::filesystem::path& model, const std::filesystem::path& tokenizer);

/// Number of weights, the tied classifier counted once.
[[nodiscard]] std::int64_t num_parameters(const model_config& config) noexcept;

}  // namespace generate

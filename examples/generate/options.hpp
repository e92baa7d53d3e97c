// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the command line of generate says.

#include <bifolio/types.hpp>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "engine_options.hpp"
#include "sampler.hpp"

namespace generate {

struct options : engine_options {
  std::vector<std::string> prompts;
  std::vector<std::vector<bifolio::token_id>> prompt_ids;  ///< prompts that are token ids already
  std::filesystem::path prompts_file;
  std::filesystem::path shared_prompt;  ///< what every prompt begins with
  bool chat = false;                    ///< each prompt is what a user says
  std::vector<std::string> stops;       ///< end a text before themselves
  std::filesystem::path score_file;     ///< instead of generating, say how probable this text is
  sampling how{0.8f, 0.95f};
  std::uint64_t seed = 1;
  std::int32_t num_samples = 1;
  bool json = false;
  bool lines = false;
  bool map = false;
  bool stats = false;
};

/// Throws `input_error` on anything that is not allowed. Returns nothing after --help, having printed it.
[[nodiscard]] std::optional<options> parse_options(int argc, const char* const* argv);

}  // namespace generate

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What is continued.

#include <bifolio/types.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "loaded_model.hpp"
#include "options.hpp"

namespace generate {

struct prompt {
  std::string text;
  std::vector<bifolio::token_id> ids;
  std::int32_t max_new_tokens = 0;  ///< of each continuation; 0: as many as the limit of positions allows
};

/// Those of --prompt, then those of --prompts-file, then those of --prompt-ids; without any, some that show the bundled
/// model, or for another model the empty prompt. Throws `input_error`: a file that cannot be read, a line that is
/// neither a JSON string nor an object with one, no prompt in the file, an id that the model does not have, a prompt of
/// no ids or of more than the model takes.
[[nodiscard]] std::vector<prompt> collect_prompts(const options& o, const loaded_model& model);

}  // namespace generate

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What is continued.

#include <bifolio/types.hpp>
#include <string>
#include <vector>

#include "loaded_model.hpp"
#include "options.hpp"

namespace generate {

struct prompt {
  std::string text;
  std::vector<bifolio::token_id> ids;
};

/// Those of --prompt, then those of --prompts-file, then those of --prompt-ids; without any, some that show the bundled
/// model, or for another model the empty prompt. Throws `input_error`: a file that cannot be read, a line that is not a
/// JSON string, no prompt in the file, an id that the model does not have, a prompt of no ids or of more than the model
/// takes.
[[nodiscard]] std::vector<prompt> collect_prompts(const options& o, const loaded_model& model);

}  // namespace generate

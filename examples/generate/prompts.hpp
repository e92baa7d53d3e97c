// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What is continued.

#include <bifolio/types.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "loaded_model.hpp"
#include "options.hpp"

namespace generate {

struct prompt {
  std::string text;
  std::vector<bifolio::token_id> ids;
  std::int32_t max_new_tokens = 0;  ///< of each continuation; 0: as many as the limit of positions allows
};

/// The ids of a text, of which there are 1 to `limit`. `name` ("prompt 3") is for the sentences. Throws `input_error`.
[[nodiscard]] std::vector<bifolio::token_id> encode_prompt(const std::string& name, std::string_view text,
                                                           const tokenizer& tokens, std::int32_t limit);
/// The same of ids, which are in the vocabulary.
void check_prompt(const std::string& name, std::span<const bifolio::token_id> ids, std::int32_t vocab_size,
                  std::int32_t limit);

/// Those of --prompt, then those of --prompts-file, then those of --prompt-ids; without any, some that show the bundled
/// model, or for another model the empty prompt. Throws `input_error`: a file that cannot be read, a line that is
/// neither a JSON string nor an object with one, no prompt in the file, an id that the model does not have, a prompt of
/// no ids or of more than the model takes.
[[nodiscard]] std::vector<prompt> collect_prompts(const options& o, const loaded_model& model);

}  // namespace generate

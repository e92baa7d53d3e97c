// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Which texts are continued.

#include <string>
#include <vector>

#include "options.hpp"

namespace generate {

/// Those of --prompt, then those of --prompts-file; without any, some that show the bundled model, or for another model
/// the empty prompt. Throws `input_error` (a file that cannot be read, a line that is not a JSON string, no prompt in
/// the file).
[[nodiscard]] std::vector<std::string> collect_prompts(const options& o);

}  // namespace generate

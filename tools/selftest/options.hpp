// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "report.hpp"
#include "run.hpp"
#include "targets.hpp"

namespace selftest {

struct options {
  target_choice where;
  run_settings run;
  output_format format = output_format::text;
  bool list = false;
  bool strict = false;
  bool progress = false;
};

/// What the command line says; nothing when the program is to end now with `exit_code`, because help was asked for (0)
/// or an option is wrong (2); that is said on the right stream then. Throws `bifolio::error` (invalid_argument) for a
/// value that is not allowed.
[[nodiscard]] std::optional<options> parse_options(int argc, char** argv, int& exit_code);

}  // namespace selftest

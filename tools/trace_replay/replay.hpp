// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "options.hpp"
#include "report.hpp"

namespace trace_replay {

/// Reads the trace and replays it with each of the policies and each of the numbers of blocks. Throws `input_error`,
/// `bifolio::error`.
[[nodiscard]] std::vector<report> replay_all(options chosen);

}  // namespace trace_replay

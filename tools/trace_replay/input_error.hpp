// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tools/common/program.hpp"

namespace trace_replay {

/// An option or a file that cannot be used: one sentence with what was found and what is allowed.
using tools::input_error;

}  // namespace trace_replay

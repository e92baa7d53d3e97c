// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>

namespace trace_replay {

/// An option or a file that cannot be used: one sentence with what was found and what is allowed. Ends the program with
/// exit code 2.
class input_error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace trace_replay

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tools/common/program.hpp"

namespace generate {

/// A file or an option that cannot be used. The sentence names the value received and the values allowed.
using tools::input_error;

}  // namespace generate

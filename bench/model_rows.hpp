// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "report.hpp"

namespace bifolio::bench {

/// What the host does for a decode step of 256 sequences and 32 layers, through a `model_cache` and by the same calls
/// made by hand, on a backend that computes nothing: the difference is what the model cache costs, and that of the
/// traced row what a trace does. Blocks of `block_size` tokens; `rounds` groups of steps.
void add_model_rows(std::int32_t block_size, std::int32_t rounds, report& out);

/// Calls of the manager through the C interface and through the C++ one; nothing where the C interface is not built.
void add_c_rows(std::int32_t rounds, report& out);

}  // namespace bifolio::bench

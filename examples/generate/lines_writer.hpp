// SPDX-License-Identifier: Apache-2.0
#pragma once

/// All sequences at once, a line for each that shows the end of its text, and the block pool above them if wanted. On a
/// terminal every picture replaces the one before; elsewhere there is one, with the pool as it was when it was fullest
/// and the texts at their end. stdout only.

#include <memory>

#include "writers.hpp"

namespace generate {

struct lines_style {
  bool map = false;   ///< the pool too
  bool live = false;  ///< stdout is a terminal
};

[[nodiscard]] std::unique_ptr<sequence_writer> make_lines_writer(const lines_style& style);

}  // namespace generate

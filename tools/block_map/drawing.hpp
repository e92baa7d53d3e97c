// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Frames as text: plain, or with colours for a terminal.

#include <cstdint>
#include <string>

#include "frame.hpp"

namespace block_map {

struct text_style {
  std::int32_t columns = 64;  ///< blocks in a row
  bool colours = false;       ///< ANSI escapes (256 colours)
};

/// Lines that end in "\n"; with colours each line also clears the rest of its row.
[[nodiscard]] std::string draw_text(const frame& what, const text_style& style);

}  // namespace block_map

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Frames as text: plain, or with colours for a terminal.

#include <cstdint>
#include <string>

#include "tools/common/pool_frame.hpp"

namespace tools {

struct pool_text_style {
  std::int32_t columns = 64;  ///< blocks in a row
  bool colours = false;       ///< ANSI escapes (256 colours)
};

/// Lines that end in "\n"; with colours each line also clears the rest of its row.
[[nodiscard]] std::string draw_pool(const pool_frame& what, const pool_text_style& style);

}  // namespace tools

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "tools/common/pool_frame.hpp"

namespace tools {

/// One frame as an SVG document, with letters in the cells.
[[nodiscard]] std::string draw_pool_svg(const pool_frame& what, std::int32_t columns);

/// Frames one after another, over and over, as one SVG document: cells change their colour. `frames` are not empty and
/// have the same pools.
[[nodiscard]] std::string draw_animated_pool_svg(std::span<const pool_frame> frames, std::int32_t columns,
                                                 double frames_per_second);

}  // namespace tools

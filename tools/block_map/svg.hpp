// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "frame.hpp"

namespace block_map {

/// One frame as an SVG document, with letters in the cells.
[[nodiscard]] std::string draw_svg(const frame& what, std::int32_t columns);

/// Frames one after another, over and over, as one SVG document: cells change their colour. `frames` are not empty and
/// have the same pools.
[[nodiscard]] std::string draw_animated_svg(std::span<const frame> frames, std::int32_t columns,
                                            double frames_per_second);

}  // namespace block_map

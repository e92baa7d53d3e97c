// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the pictures of all programs have in common: one look, in light and in dark, whichever the reader prefers. Only
/// fills, strokes and text by class; a file needs nothing from elsewhere.

#include <string>

namespace tools {

/// "<svg …>" with the style sheet and the background. Classes: ink (text), paper, grid, axis; series0 … series5 and
/// area0 … area5 for lines and surfaces. `name` is the picture's title for readers that do not see it.
[[nodiscard]] std::string begin_svg(int width, int height, const std::string& name);

inline constexpr int num_svg_series = 6;

}  // namespace tools

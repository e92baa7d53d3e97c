// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "report.hpp"

namespace trace_replay {

/// Two panels above each other with one time axis: the pool (in use, cached and idle) and the hit rate (so far, and of
/// the time since the point before). A whole SVG document, at most some 100 KiB.
[[nodiscard]] std::string plot_svg(const report& what);

}  // namespace trace_replay

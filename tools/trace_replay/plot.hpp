// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "report.hpp"

namespace trace_replay {

/// Two panels above each other with one time axis: the pool (in use, cached and idle) and the hit rate (since the
/// start, and of the last twentieth of the time). A whole SVG document, at most some 100 KiB.
[[nodiscard]] std::string plot_svg(const report& what);

}  // namespace trace_replay

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Several replays of one trace side by side: pools of different sizes, different policies.

#include <iosfwd>
#include <string>
#include <vector>

#include "report.hpp"

namespace trace_replay {

/// One row for each report, with what is compared: policy, blocks, hit rate, evictions, and of a simulation what the
/// requests waited. `out` gets a table, CSV, JSON or a JSON object a line.
void print_sweep(std::ostream& out, const std::vector<report>& said, tools::output_format format);

/// The hit rate by the size of the pool, a line for each policy; of simulations the time to the first token below it
/// (median and 90th percentile). An SVG document.
[[nodiscard]] std::string sweep_svg(const std::vector<report>& said);

/// All of it as one HTML document that needs nothing from elsewhere: the table, the curves, and of each replay its
/// facts and its plot.
[[nodiscard]] std::string html_report(const std::vector<report>& said);

}  // namespace trace_replay

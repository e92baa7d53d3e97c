// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Reports of the same rows next to each other: repeats of one run, and a run from before. A row is known by its texts
/// and counts; its figure is the first number in it that was measured.

#include <span>
#include <string>

#include "tools/common/report.hpp"

namespace tools {

/// Rows of several runs as one: of every measured number the median, and at the end "spread_percent", by how much the
/// figure of the worst run differs from that of the best, of the median. Rows that are not in all runs are left out.
/// `runs` are not empty; facts are those of the first.
[[nodiscard]] report median_of(std::span<const report> runs);

/// `now` with two columns at the end: "before", the figure of the same row in `json`, which an earlier run printed with
/// --format json, and "after_over_before"; empty texts for a row that is not there. `name` is for sentences.
/// Throws `input_error` when the text is no such report.
[[nodiscard]] report compared(const report& now, const std::string& json, const std::string& name);

}  // namespace tools

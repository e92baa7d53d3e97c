// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a benchmark prints (tools/common/report.hpp), and how samples are summed up.

#include <vector>

#include "tools/common/report.hpp"

namespace bifolio::bench {

using tools::output_format;
using tools::report;
using cell = tools::report_cell;
using row = tools::report_row;

/// Median and spread of samples; at least one.
struct summary {
  double median = 0;
  double p10 = 0;
  double p90 = 0;
};
[[nodiscard]] summary summarize(std::vector<double> samples);

}  // namespace bifolio::bench

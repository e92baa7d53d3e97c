// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a replay says at its end: named values, durations as percentiles, and the pool over time; as Markdown, as CSV
/// (one line of names, one of values) or as one JSON object, in lines or in one.

#include <cstdint>
#include <iosfwd>
#include <string>
#include <variant>
#include <vector>

#include "measurements.hpp"
#include "tools/common/report.hpp"

namespace trace_replay {

struct fact {
  std::string name;   ///< in CSV and JSON
  std::string label;  ///< in Markdown
  tools::report_cell value;
};

struct duration_row {
  std::string name;  ///< with its unit; CSV and JSON append _p50 and so on
  std::string label;
  percentiles values;
};

struct report {
  std::string title;
  std::vector<fact> facts;
  std::vector<duration_row> durations;
  timeline over_time;
  std::string time_name;   ///< of pool_sample::at, e.g. "seconds"
  std::string time_label;  ///< e.g. "simulated seconds"
  std::int64_t num_blocks = 0;
  std::int64_t num_host_blocks = 0;
};

void print(std::ostream& out, const report& what, tools::output_format format);

}  // namespace trace_replay

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a benchmark prints: facts about the machine once, then rows of named cells; as Markdown, CSV or JSON.

#include <cstdint>
#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace bifolio::bench {

enum class output_format : std::uint8_t { md, csv, json };

/// Reads "md", "csv" or "json". Throws `error` (invalid_argument).
[[nodiscard]] output_format parse_format(std::string_view text);

/// Text, a count, or a measured number (printed with four significant digits in md and csv).
using cell = std::variant<std::string, std::int64_t, double>;
using row = std::vector<std::pair<std::string, cell>>;

class report {
 public:
  /// One fact for the header, e.g. ("cpu", "…").
  void fact(std::string name, std::string value) { facts_.emplace_back(std::move(name), std::move(value)); }
  /// All rows name the same columns in the same order.
  void add(row cells) { rows_.push_back(std::move(cells)); }
  /// md: facts as a list, rows as a table; csv: facts as `# name: value` lines; json: {"machine": {…}, "rows": […]}.
  void print(std::ostream& out, output_format format) const;

 private:
  std::vector<std::pair<std::string, std::string>> facts_;
  std::vector<row> rows_;
};

/// Median and spread of samples; at least one.
struct summary {
  double median = 0;
  double p10 = 0;
  double p90 = 0;
};
[[nodiscard]] summary summarize(std::vector<double> samples);

}  // namespace bifolio::bench

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What a measuring program prints: facts once, then rows of named cells, as Markdown, CSV, JSON or a JSON object a
/// line. Numbers are numbers in JSON. A table is aligned for a terminal.

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tools {

enum class output_format : std::uint8_t { md, csv, json, jsonl };

/// "md", "csv", "json", "jsonl".
inline constexpr std::string_view output_formats = "md, csv, json, jsonl";
/// Throws `input_error`.
[[nodiscard]] output_format parse_output_format(std::string_view text);

/// Text, a count, or a measured number (printed with four significant digits in md and csv).
using report_cell = std::variant<std::string, std::int64_t, double>;
using report_row = std::vector<std::pair<std::string, report_cell>>;

class report {
 public:
  /// One fact for the header, e.g. ("cpu", "…").
  void fact(std::string name, std::string value) { facts_.emplace_back(std::move(name), std::move(value)); }
  /// Rows that name the same columns, one after another, are one table.
  void add(report_row cells) {
    rows_.push_back(std::move(cells));
    if (on_add_) on_add_(rows_.back());
  }
  /// Is called with every row that is added; for progress.
  void watch(std::function<void(const report_row&)> on_add) { on_add_ = std::move(on_add); }
  [[nodiscard]] const std::vector<report_row>& rows() const noexcept { return rows_; }
  [[nodiscard]] const std::vector<std::pair<std::string, std::string>>& facts() const noexcept { return facts_; }
  /// md: facts as a list, rows as tables, above each of which stands what is the same in all its rows; csv: facts as `#
  /// name: value` lines; json: {"machine": {…}, "rows": […]}; jsonl: a line {"machine": {…}}, unless there are no
  /// facts, then a line for each row.
  void print(std::ostream& out, output_format format) const;

 private:
  std::vector<std::pair<std::string, std::string>> facts_;
  std::vector<report_row> rows_;
  std::function<void(const report_row&)> on_add_;
};

/// As in a table.
[[nodiscard]] std::string to_text(const report_cell& value);

}  // namespace tools

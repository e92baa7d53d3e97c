// SPDX-License-Identifier: Apache-2.0
#include "tools/common/report_compare.hpp"

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "tools/common/escape.hpp"
#include "tools/common/json.hpp"
#include "tools/common/program.hpp"

namespace tools {
namespace {

bool is_measured(const report_cell& value) noexcept { return std::holds_alternative<double>(value); }

std::string name_of(const report_row& row) {
  std::string name;
  for (const auto& [column, value] : row) {
    if (!is_measured(value)) name += column + '=' + to_text(value) + '\n';
  }
  return name;
}

/// Null for a row without any.
const double* figure_of(const report_row& row) noexcept {
  for (const auto& [column, value] : row) {
    if (is_measured(value)) return &std::get<double>(value);
  }
  return nullptr;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

report with_facts_of(const report& other) {
  report result;
  for (const auto& [name, value] : other.facts()) result.fact(name, value);
  return result;
}

}  // namespace

report median_of(std::span<const report> runs) {
  report result = with_facts_of(runs.front());
  std::map<std::string, std::vector<const report_row*>> rows;
  for (const report& run : runs) {
    for (const report_row& row : run.rows()) rows[name_of(row)].push_back(&row);
  }
  for (const report_row& first : runs.front().rows()) {
    const std::vector<const report_row*>& same = rows.at(name_of(first));
    if (same.size() != runs.size()) continue;
    report_row merged = first;
    std::vector<double> figures;
    for (std::size_t column = 0; column < merged.size(); ++column) {
      if (!is_measured(merged[column].second)) continue;
      std::vector<double> values;
      for (const report_row* row : same) values.push_back(std::get<double>((*row)[column].second));
      if (figures.empty()) figures = values;
      merged[column].second = median(std::move(values));
    }
    if (!figures.empty()) {
      const auto [least, most] = std::ranges::minmax(figures);
      const double middle = median(figures);
      merged.emplace_back("spread_percent", middle != 0 ? 100 * (most - least) / middle : 0.0);
    }
    result.add(std::move(merged));
  }
  return result;
}

report compared(const report& now, const std::string& json, const std::string& name) {
  const auto refuse = [&](const std::string& why) {
    throw input_error(printable_line(name) + " is not what --format json prints: " + why);
  };
  try {
    const nlohmann::json document = parse_json(json);
    report result = with_facts_of(now);
    for (report_row row : now.rows()) {
      const double* figure = figure_of(row);
      const nlohmann::json* found = nullptr;
      for (const nlohmann::json& old : document.at("rows")) {
        const auto is_same = [&](const auto& cell) {
          const auto& [column, value] = cell;
          if (is_measured(value)) return true;
          const auto there = old.find(column);
          if (there == old.end()) return false;
          if (const auto* text = std::get_if<std::string>(&value)) return *there == *text;
          return *there == std::get<std::int64_t>(value);
        };
        if (std::ranges::all_of(row, is_same)) {
          found = &old;
          break;
        }
      }
      report_cell old_figure = std::string(), ratio = std::string();
      if (found != nullptr && figure != nullptr) {
        const auto column = std::ranges::find_if(row, [](const auto& cell) { return is_measured(cell.second); });
        if (const auto value = found->find(column->first); value != found->end() && value->is_number()) {
          old_figure = value->get<double>();
          if (value->get<double>() != 0) ratio = *figure / value->get<double>();
        }
      }
      row.emplace_back("before", old_figure);
      row.emplace_back("after_over_before", ratio);
      result.add(std::move(row));
    }
    return result;
  } catch (const json_error& problem) {
    refuse(std::string("it is ") + problem.what());
  } catch (const nlohmann::json::exception&) {
    refuse("it has no rows");
  }
  return now;
}

}  // namespace tools

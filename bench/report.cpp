// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <algorithm>
#include <bifolio/error.hpp>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <ostream>

#include "tools/common/escape.hpp"

namespace bifolio::bench {
namespace {

using tools::csv_cell;
using tools::md_cell;
using tools::printable_json;
using tools::printable_line;

std::string text_of(const cell& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  if (const auto* count = std::get_if<std::int64_t>(&value)) return std::to_string(*count);
  char digits[32];
  std::snprintf(digits, sizeof digits, "%.4g", std::get<double>(value));
  return digits;
}

void print_md(std::ostream& out, const std::vector<std::pair<std::string, std::string>>& facts,
              const std::vector<row>& rows) {
  for (const auto& [name, value] : facts) out << "- " << name << ": " << printable_line(value) << '\n';
  if (rows.empty()) return;
  std::vector<std::size_t> widths;
  for (const auto& [name, value] : rows[0]) {
    std::size_t width = std::max<std::size_t>(name.size(), 3);
    for (const row& r : rows) width = std::max(width, md_cell(text_of(r[widths.size()].second)).size());
    widths.push_back(width);
  }
  out << '\n' << '|';
  for (std::size_t i = 0; i < widths.size(); ++i) {
    out << ' ' << rows[0][i].first << std::string(widths[i] - rows[0][i].first.size(), ' ') << " |";
  }
  out << "\n|";
  for (const std::size_t width : widths) out << std::string(width + 1, '-') << ":|";
  out << '\n';
  for (const row& r : rows) {
    out << '|';
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const std::string text = md_cell(text_of(r[i].second));
      out << ' ' << std::string(widths[i] - text.size(), ' ') << text << " |";
    }
    out << '\n';
  }
}

void print_csv(std::ostream& out, const std::vector<std::pair<std::string, std::string>>& facts,
               const std::vector<row>& rows) {
  for (const auto& [name, value] : facts) out << "# " << name << ": " << printable_line(value) << '\n';
  if (rows.empty()) return;
  const char* separator = "";
  for (const auto& [name, value] : rows[0]) {
    out << separator << csv_cell(name);
    separator = ",";
  }
  out << '\n';
  for (const row& r : rows) {
    separator = "";
    for (const auto& [name, value] : r) {
      out << separator << csv_cell(text_of(value));
      separator = ",";
    }
    out << '\n';
  }
}

void print_json(std::ostream& out, const std::vector<std::pair<std::string, std::string>>& facts,
                const std::vector<row>& rows) {
  nlohmann::ordered_json document;
  document["machine"] = nlohmann::ordered_json::object();
  for (const auto& [name, value] : facts) document["machine"][name] = value;
  document["rows"] = nlohmann::ordered_json::array();
  for (const row& r : rows) {
    nlohmann::ordered_json object;
    for (const auto& [name, value] : r) {
      std::visit([&, &key = name](const auto& v) { object[key] = v; }, value);
    }
    document["rows"].push_back(std::move(object));
  }
  out << printable_json(document.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace)) << '\n';
}

}  // namespace

output_format parse_format(std::string_view text) {
  if (text == "md") return output_format::md;
  if (text == "csv") return output_format::csv;
  if (text == "json") return output_format::json;
  throw error(errc::invalid_argument, "format '" + std::string(text) + "' is not one of md, csv, json");
}

void report::print(std::ostream& out, output_format format) const {
  switch (format) {
    case output_format::md:
      return print_md(out, facts_, rows_);
    case output_format::csv:
      return print_csv(out, facts_, rows_);
    case output_format::json:
      return print_json(out, facts_, rows_);
  }
}

summary summarize(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double share) {
    return samples[static_cast<std::size_t>(share * static_cast<double>(samples.size() - 1) + 0.5)];
  };
  return {at(0.5), at(0.1), at(0.9)};
}

}  // namespace bifolio::bench

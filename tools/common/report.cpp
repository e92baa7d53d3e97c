// SPDX-License-Identifier: Apache-2.0
#include "tools/common/report.hpp"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <ostream>

#include "tools/common/escape.hpp"
#include "tools/common/program.hpp"

namespace tools {

std::string to_text(const report_cell& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return *text;
  if (const auto* count = std::get_if<std::int64_t>(&value)) return std::to_string(*count);
  char digits[32];
  std::snprintf(digits, sizeof digits, "%.4g", std::get<double>(value));
  return digits;
}

namespace {

void print_md(std::ostream& out, const std::vector<std::pair<std::string, std::string>>& facts,
              const std::vector<report_row>& rows) {
  for (const auto& [name, value] : facts) out << "- " << name << ": " << printable_line(value) << '\n';
  if (rows.empty()) return;
  std::vector<std::size_t> widths;
  for (const auto& [name, value] : rows[0]) {
    std::size_t width = std::max<std::size_t>(name.size(), 3);
    for (const report_row& r : rows) width = std::max(width, md_cell(to_text(r[widths.size()].second)).size());
    widths.push_back(width);
  }
  out << '\n' << '|';
  for (std::size_t i = 0; i < widths.size(); ++i) {
    out << ' ' << rows[0][i].first << std::string(widths[i] - rows[0][i].first.size(), ' ') << " |";
  }
  out << "\n|";
  for (const std::size_t width : widths) out << std::string(width + 1, '-') << ":|";
  out << '\n';
  for (const report_row& r : rows) {
    out << '|';
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const std::string text = md_cell(to_text(r[i].second));
      out << ' ' << std::string(widths[i] - text.size(), ' ') << text << " |";
    }
    out << '\n';
  }
}

void print_csv(std::ostream& out, const std::vector<std::pair<std::string, std::string>>& facts,
               const std::vector<report_row>& rows) {
  for (const auto& [name, value] : facts) out << "# " << name << ": " << printable_line(value) << '\n';
  if (rows.empty()) return;
  const char* separator = "";
  for (const auto& [name, value] : rows[0]) {
    out << separator << csv_cell(name);
    separator = ",";
  }
  out << '\n';
  for (const report_row& r : rows) {
    separator = "";
    for (const auto& [name, value] : r) {
      out << separator << csv_cell(to_text(value));
      separator = ",";
    }
    out << '\n';
  }
}

nlohmann::ordered_json object_of(const std::vector<std::pair<std::string, std::string>>& facts) {
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  for (const auto& [name, value] : facts) object[name] = value;
  return object;
}

nlohmann::ordered_json object_of(const report_row& cells) {
  nlohmann::ordered_json object;
  for (const auto& [name, value] : cells) {
    std::visit([&, &key = name](const auto& v) { object[key] = v; }, value);
  }
  return object;
}

std::string text_of(const nlohmann::ordered_json& value, int indent) {
  return printable_json(value.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace)) + '\n';
}

void print_json(std::ostream& out, const std::vector<std::pair<std::string, std::string>>& facts,
                const std::vector<report_row>& rows) {
  nlohmann::ordered_json document;
  document["machine"] = object_of(facts);
  document["rows"] = nlohmann::ordered_json::array();
  for (const report_row& r : rows) document["rows"].push_back(object_of(r));
  out << text_of(document, 2);
}

void print_jsonl(std::ostream& out, const std::vector<std::pair<std::string, std::string>>& facts,
                 const std::vector<report_row>& rows) {
  if (!facts.empty()) out << text_of({{"machine", object_of(facts)}}, -1);
  for (const report_row& r : rows) out << text_of(object_of(r), -1);
}

}  // namespace

output_format parse_output_format(std::string_view text) {
  if (text == "md") return output_format::md;
  if (text == "csv") return output_format::csv;
  if (text == "json") return output_format::json;
  if (text == "jsonl") return output_format::jsonl;
  throw input_error("--format is '" + std::string(text) + "', allowed are " + std::string(output_formats));
}

void report::print(std::ostream& out, output_format format) const {
  switch (format) {
    case output_format::md:
      return print_md(out, facts_, rows_);
    case output_format::csv:
      return print_csv(out, facts_, rows_);
    case output_format::json:
      return print_json(out, facts_, rows_);
    case output_format::jsonl:
      return print_jsonl(out, facts_, rows_);
  }
}

}  // namespace tools

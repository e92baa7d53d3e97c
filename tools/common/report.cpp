// SPDX-License-Identifier: Apache-2.0
#include "tools/common/report.hpp"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <ostream>
#include <span>

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

/// The rows from `first` on that name the same columns.
std::span<const report_row> table_at(const std::vector<report_row>& rows, std::size_t first) {
  const auto is_same = [](const auto& a, const auto& b) { return a.first == b.first; };
  std::size_t end = first + 1;
  while (end < rows.size() && std::ranges::equal(rows[first], rows[end], is_same)) ++end;
  return std::span(rows).subspan(first, end - first);
}

void print_md_table(std::ostream& out, std::span<const report_row> rows) {
  std::vector<std::size_t> columns;
  std::string constants;
  for (std::size_t i = 0; i < rows[0].size(); ++i) {
    const std::string value = to_text(rows[0][i].second);
    const auto has_it = [&](const report_row& r) { return to_text(r[i].second) == value; };
    if (rows.size() > 2 && std::ranges::all_of(rows, has_it)) {
      constants +=
          (constants.empty() ? "" : ", ") + rows[0][i].first + ' ' + (value.empty() ? "-" : printable_line(value));
    } else {
      columns.push_back(i);
    }
  }
  if (!constants.empty()) out << "\nIn all rows: " << constants << '\n';
  std::vector<std::size_t> widths;
  for (const std::size_t i : columns) {
    std::size_t width = std::max<std::size_t>(rows[0][i].first.size(), 3);
    for (const report_row& r : rows) width = std::max(width, md_cell(to_text(r[i].second)).size());
    widths.push_back(width);
  }
  const auto is_text = [&](std::size_t i) {
    return std::ranges::all_of(rows,
                               [&](const report_row& r) { return std::holds_alternative<std::string>(r[i].second); });
  };
  out << "\n|";
  for (std::size_t k = 0; k < columns.size(); ++k) {
    const std::string& name = rows[0][columns[k]].first;
    out << ' ' << name << std::string(widths[k] - name.size(), ' ') << " |";
  }
  out << "\n|";
  for (std::size_t k = 0; k < columns.size(); ++k) {
    out << std::string(widths[k] + 1, '-') << (is_text(columns[k]) ? "-|" : ":|");
  }
  out << '\n';
  for (const report_row& r : rows) {
    out << '|';
    for (std::size_t k = 0; k < columns.size(); ++k) {
      const std::string text = md_cell(to_text(r[columns[k]].second)), space(widths[k] - text.size(), ' ');
      out << ' ' << (is_text(columns[k]) ? text + space : space + text) << " |";
    }
    out << '\n';
  }
}

void print_md(std::ostream& out, const std::vector<std::pair<std::string, std::string>>& facts,
              const std::vector<report_row>& rows) {
  for (const auto& [name, value] : facts) out << "- " << name << ": " << printable_line(value) << '\n';
  for (std::size_t first = 0; first < rows.size();) {
    const std::span<const report_row> table = table_at(rows, first);
    print_md_table(out, table);
    first += table.size();
  }
}

void print_csv(std::ostream& out, const std::vector<std::pair<std::string, std::string>>& facts,
               const std::vector<report_row>& rows) {
  for (const auto& [name, value] : facts) out << "# " << name << ": " << printable_line(value) << '\n';
  for (std::size_t first = 0; first < rows.size();) {
    const std::span<const report_row> table = table_at(rows, first);
    const char* separator = first > 0 ? "\n" : "";
    for (const auto& [name, value] : table[0]) {
      out << separator << csv_cell(name);
      separator = ",";
    }
    out << '\n';
    for (const report_row& r : table) {
      separator = "";
      for (const auto& [name, value] : r) {
        out << separator << csv_cell(to_text(value));
        separator = ",";
      }
      out << '\n';
    }
    first += table.size();
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

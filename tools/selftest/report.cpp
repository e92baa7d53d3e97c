// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>

namespace selftest {
namespace {

using table = std::vector<std::vector<std::string>>;  // the first row holds the names of the columns

/// "24", or "2 of 24 differ", or "-" for nothing compared.
std::string cell(const tally& counted, std::string_view bad) {
  if (counted.num_compared == 0) return "-";
  if (counted.num_failed == 0) return std::to_string(counted.num_compared);
  return fmt::format("{} of {} {}", counted.num_failed, counted.num_compared, bad);
}

std::string share_text(const worst_error& worst) { return worst.share ? fmt::format("{:.3f}", *worst.share) : "-"; }

/// The case of the largest share, outputs in float32 first: theirs says more.
std::string worst_case(const attention_row& row) {
  return row.of_f32.share ? row.of_f32.case_name : row.of_narrow.case_name;
}

/// One line per device and instruction set, a column per operation.
table cache_table(const report& said) {
  table result{{"device", "isa"}};
  for (const operation what : all_operations) result[0].emplace_back(to_string(what));
  for (const cache_row& row : said.cache) {
    auto line = std::find_if(result.begin() + 1, result.end(), [&](const std::vector<std::string>& cells) {
      return cells[0] == row.device && cells[1] == row.isa;
    });
    if (line == result.end()) {
      result.emplace_back(2 + std::size(all_operations), "-");
      line = result.end() - 1;
      (*line)[0] = row.device;
      (*line)[1] = row.isa;
    }
    (*line)[2 + static_cast<std::size_t>(row.what)] = cell(row.cases, "differ");
  }
  return result;
}

table attention_table(const report& said) {
  table result{{"device", "isa", "kernel", "f32", "16-bit", "worst case"}};
  for (const promise about : all_promises) result[0].emplace_back(to_string(about));
  for (const attention_row& row : said.attention) {
    std::vector<std::string> line{
        row.device, row.isa, row.kernel, share_text(row.of_f32), share_text(row.of_narrow), worst_case(row)};
    for (const promise about : all_promises) {
      line.push_back(cell(row.of(about), about == promise::bounds ? "outside" : "differ"));
    }
    result.push_back(std::move(line));
  }
  return result;
}

std::vector<std::size_t> widths_of(const table& rows) {
  std::vector<std::size_t> widths(rows[0].size(), 0);
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  return widths;
}

void print_md_table(std::ostream& out, const table& rows, std::size_t num_words) {
  const std::vector<std::size_t> widths = widths_of(rows);
  for (std::size_t r = 0; r < rows.size(); ++r) {
    out << '|';
    for (std::size_t i = 0; i < widths.size(); ++i) {
      out << (i < num_words ? fmt::format(" {:<{}} |", rows[r][i], widths[i])
                            : fmt::format(" {:>{}} |", rows[r][i], widths[i]));
    }
    out << '\n';
    if (r > 0) continue;
    out << '|';
    for (std::size_t i = 0; i < widths.size(); ++i) {
      out << std::string(widths[i] + 1, '-') << (i < num_words ? "-|" : ":|");
    }
    out << '\n';
  }
}

std::string verdict(const report& said) {
  if (said.num_failures > 0) {
    return fmt::format("FAILED: {} of {} checks did not hold.", said.num_failures, said.num_checks());
  }
  if (!said.passed()) return fmt::format("FAILED: {} kernels were reached by no case.", said.not_reached.size());
  return fmt::format("All {} checks held.", said.num_checks());
}

/// The facts and what ends every report, as pairs of a name and a sentence.
std::vector<std::string> closing_lines(const report& said) {
  std::vector<std::string> lines;
  for (const failure& what : said.failures) {
    lines.push_back(fmt::format("{} {} {}, {}: {}", what.device, what.isa, what.what, what.broken, what.text));
    lines.push_back(fmt::format("    again: {}", command_of(said, what.device, what.isa, what.case_name)));
  }
  if (said.num_failures > static_cast<std::int64_t>(said.failures.size())) {
    lines.push_back(
        fmt::format("... and {} more", said.num_failures - static_cast<std::int64_t>(said.failures.size())));
  }
  for (const std::string& kernel : said.not_reached) lines.push_back("not reached: " + kernel);
  for (const std::string& sentence : said.left_out) lines.push_back("left out: " + sentence);
  return lines;
}

constexpr const char* cache_heading = "Bookkeeping: cases whose bytes are those of the naive model";
constexpr const char* attention_heading =
    "Attention: worst error as a share of its bound, by type of output; comparisons that held";

void print_md(std::ostream& out, const report& said) {
  out << "# Equality report\n\n**" << verdict(said) << "**\n\n";
  for (const auto& [name, value] : said.machine) out << "- " << name << ": " << value << '\n';
  out << fmt::format("- seed: {}\n- seconds: {:.1f}\n", said.seed, said.seconds);
  if (!said.cache.empty()) {
    out << "\n" << cache_heading << ":\n\n";
    print_md_table(out, cache_table(said), 2);
  }
  if (!said.attention.empty()) {
    out << "\n" << attention_heading << ":\n\n";
    print_md_table(out, attention_table(said), 3);
  }
  const std::vector<std::string> lines = closing_lines(said);
  if (!lines.empty()) out << '\n';
  for (const std::string& line : lines) {
    out << (line.starts_with(' ') ? fmt::format("  ({})\n", std::string_view(line).substr(4))
                                  : fmt::format("- {}\n", line));
  }
}

// At most 100 columns: a kernel's name has a line of its own, and so has a cell that is longer than its column.
constexpr std::size_t text_width = 100;

void print_wrapped(std::ostream& out, std::string_view text, std::string_view indent) {
  std::string line;
  const auto flush = [&] {
    out << line << '\n';
    line = indent;
  };
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find(' ', at), text.size());
    if (!line.empty() && line != indent && line.size() + 1 + (end - at) > text_width) flush();
    if (!line.empty() && line != indent) line += ' ';
    line += text.substr(at, end - at);
    at = end + 1;
  }
  out << line << '\n';
}

// A first cell that is longer than this has a line of its own.
constexpr std::size_t longest_first_cell = 22;

void print_text_table(std::ostream& out, const table& rows, std::size_t num_words) {
  std::vector<std::size_t> widths = widths_of(rows);
  widths[0] = std::min(widths[0], longest_first_cell);
  for (const auto& row : rows) {
    std::string line = "  ";
    const bool own_line = row[0].size() > widths[0];
    if (own_line) out << line << row[0] << '\n';
    for (std::size_t i = 0; i < widths.size(); ++i) {
      const std::string_view text = i == 0 && own_line ? std::string_view() : row[i];
      line += i < num_words ? fmt::format("{:<{}} ", text, widths[i]) : fmt::format("  {:>{}}", text, widths[i]);
    }
    if (line.size() <= text_width) {
      out << line.substr(0, line.find_last_not_of(' ') + 1) << '\n';
      continue;
    }
    // Too wide, because something differs: as a list.
    for (std::size_t i = own_line ? 1 : 0; i < widths.size(); ++i) {
      out << fmt::format("    {}: {}\n", rows[0][i], row[i]);
    }
  }
}

/// What a table under the heading of its device and instruction set need not repeat.
std::string without_prefix(const std::string& text, const std::string& prefix) {
  return text.starts_with(prefix) ? text.substr(prefix.size()) : text;
}

void print_text(std::ostream& out, const report& said) {
  out << "bifolio_selftest: how equal this machine's results are\n\n";
  for (const auto& [name, value] : said.machine) {
    print_wrapped(out, fmt::format("{}: {}", name, value), "    ");
  }
  out << fmt::format("seed: {}\nseconds: {:.1f}\n", said.seed, said.seconds);
  if (!said.cache.empty()) {
    out << '\n' << cache_heading << "\n";
    print_text_table(out, cache_table(said), 2);
  }
  if (!said.attention.empty()) out << '\n' << attention_heading << "\n";
  // A table per device and instruction set, so that names of kernels find room.
  const table all = attention_table(said);
  for (std::size_t first = 1; first < all.size();) {
    table one{{all[0].begin() + 2, all[0].end()}};
    std::size_t last = first;
    for (; last < all.size() && all[last][0] == all[first][0] && all[last][1] == all[first][1]; ++last) {
      std::vector<std::string> line(all[last].begin() + 2, all[last].end());
      line[0] = without_prefix(line[0], all[last][1] == no_isa ? "cuda " : fmt::format("cpu {} ", all[last][1]));
      line[3] = without_prefix(without_prefix(line[3], "attention:"), "merge:");
      one.push_back(std::move(line));
    }
    one[0][3] = "case";
    out << all[first][0] << (all[first][1] == no_isa ? "" : " " + all[first][1]) << '\n';
    print_text_table(out, one, 1);
    first = last;
  }
  const std::vector<std::string> lines = closing_lines(said);
  if (!lines.empty()) out << '\n';
  for (const std::string& line : lines) print_wrapped(out, line, "    ");
  out << '\n' << verdict(said) << '\n';
}

nlohmann::ordered_json json_of(const tally& counted) {
  return {{"compared", counted.num_compared}, {"failed", counted.num_failed}};
}

nlohmann::ordered_json json_of(const worst_error& worst) {
  if (!worst.share) return nullptr;
  return {{"share", *worst.share}, {"case", worst.case_name}};
}

void print_json(std::ostream& out, const report& said) {
  using json = nlohmann::ordered_json;
  json document;
  document["passed"] = said.passed();
  document["machine"] = json::object();
  for (const auto& [name, value] : said.machine) document["machine"][name] = value;
  document["seed"] = said.seed;
  document["seconds"] = said.seconds;
  document["checks"] = said.num_checks();
  document["failed_checks"] = said.num_failures;
  document["bookkeeping"] = json::array();
  for (const cache_row& row : said.cache) {
    document["bookkeeping"].push_back({{"device", row.device},
                                       {"isa", row.isa},
                                       {"operation", to_string(row.what)},
                                       {"cases", row.cases.num_compared},
                                       {"failed", row.cases.num_failed}});
  }
  document["attention"] = json::array();
  for (const attention_row& row : said.attention) {
    json entry{{"device", row.device}, {"isa", row.isa}, {"kernel", row.kernel}};
    entry["error_over_bound_f32_out"] = json_of(row.of_f32);
    entry["error_over_bound_16_bit_out"] = json_of(row.of_narrow);
    for (const promise about : all_promises) entry[to_string(about)] = json_of(row.of(about));
    document["attention"].push_back(std::move(entry));
  }
  document["failures"] = json::array();
  for (const failure& what : said.failures) {
    document["failures"].push_back({{"device", what.device},
                                    {"isa", what.isa},
                                    {"what", what.what},
                                    {"broken", what.broken},
                                    {"case", what.case_name},
                                    {"text", what.text},
                                    {"command", command_of(said, what.device, what.isa, what.case_name)}});
  }
  document["not_reached"] = said.not_reached;
  document["left_out"] = said.left_out;
  out << document.dump(2, ' ', false, json::error_handler_t::replace) << '\n';
}

}  // namespace

std::string_view to_string(operation value) noexcept {
  switch (value) {
    case operation::append:
      return "append";
    case operation::gather:
      return "gather";
    case operation::copy:
      return "copy";
    case operation::convert:
      return "convert";
    case operation::swap:
      return "swap";
  }
  return "unknown";
}

std::string_view to_string(promise value) noexcept {
  switch (value) {
    case promise::bounds:
      return "bounds";
    case promise::repeats:
      return "repeats";
    case promise::threads:
      return "threads";
    case promise::blocks:
      return "blocks";
    case promise::neighbours:
      return "neighbours";
    case promise::chunks:
      return "chunks";
  }
  return "unknown";
}

cache_row& report::row(const std::string& device, const std::string& isa, operation what) {
  for (cache_row& one : cache) {
    if (one.device == device && one.isa == isa && one.what == what) return one;
  }
  return cache.emplace_back(cache_row{device, isa, what, {}});
}

attention_row& report::row(const std::string& device, const std::string& isa, const std::string& kernel) {
  for (attention_row& one : attention) {
    if (one.device == device && one.isa == isa && one.kernel == kernel) return one;
  }
  attention_row fresh;
  fresh.device = device;
  fresh.isa = isa;
  fresh.kernel = kernel;
  return attention.emplace_back(std::move(fresh));
}

void report::add(failure what) {
  ++num_failures;
  if (failures.size() < max_failures) failures.push_back(std::move(what));
}

std::int64_t report::num_checks() const noexcept {
  std::int64_t checks = 0;
  for (const cache_row& row : cache) checks += row.cases.num_compared;
  for (const attention_row& row : attention) {
    for (const tally& counted : row.promises) checks += counted.num_compared;
  }
  return checks;
}

std::string command_of(const report& said, const std::string& device, const std::string& isa,
                       const std::string& case_name) {
  return fmt::format("bifolio_selftest --seed {} --device {}{} --case {}", said.seed, device,
                     isa == no_isa ? "" : " --isa " + isa, case_name);
}

void print(std::ostream& out, const report& said, output_format format) {
  switch (format) {
    case output_format::text:
      return print_text(out, said);
    case output_format::md:
      return print_md(out, said);
    case output_format::json:
      return print_json(out, said);
  }
}

}  // namespace selftest

// SPDX-License-Identifier: Apache-2.0
#include "trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>

#include "input_error.hpp"
#include "tools/common/escape.hpp"
#include "tools/common/json.hpp"

namespace trace_replay {
namespace {

using nlohmann::json;
using tools::excerpt;
using tools::json_excerpt;

constexpr std::int64_t max_tokens = 1 << 30;  // of one sequence; the manager's limit
constexpr double max_arrival_ms = 1e13;       // three centuries
constexpr std::int64_t max_ids = 2147483647;  // in all, so that each fits into a token id

/// Where a sentence about a line begins.
class line_reader {
 public:
  line_reader(std::istream& in, std::string_view name) : in_(in), name_(name) {}

  /// The next line that is not blank, without its end.
  [[nodiscard]] bool next(std::string& line) {
    while (std::getline(in_, line)) {
      ++number_;
      if (!line.empty() && line.back() == '\r') line.pop_back();
      if (line.find_first_not_of(" \t") != std::string::npos) return true;
    }
    if (in_.bad()) throw input_error(fmt::format("{}: reading stopped after line {}", name_, number_));
    return false;
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw input_error(fmt::format("{}:{}: {}", name_, number_, what));
  }
  /// Prompt and continuation are one sequence; each number alone is at most max_tokens.
  void require_fitting_sum(const trace_request& one, std::string_view input_name, std::string_view output_name) const {
    if (std::int64_t{one.num_input_tokens} + one.num_output_tokens <= max_tokens) return;
    fail(fmt::format("{} and {} are {} and {}, allowed are {} tokens together", input_name, output_name,
                     one.num_input_tokens, one.num_output_tokens, max_tokens));
  }

 private:
  std::istream& in_;
  std::string_view name_;
  std::int64_t number_ = 0;
};

class mooncake_reader {
 public:
  mooncake_reader(line_reader& lines, trace& out) : lines_(lines), out_(out) {}

  void read_line(const std::string& line) {
    json object;
    try {
      object = tools::parse_json(line);
    } catch (const tools::json_error& problem) {
      lines_.fail(fmt::format("'{}' is {}", excerpt(line), problem.what()));
    }
    if (!object.is_object()) lines_.fail(fmt::format("'{}' is not a JSON object", excerpt(line)));
    trace_request one;
    one.arrival_us = 1e3 * arrival_ms(field(object, "timestamp"));
    one.num_input_tokens = count(object, "input_length", 1);
    one.num_output_tokens = count(object, "output_length", 0);
    lines_.require_fitting_sum(one, "input_length", "output_length");
    const json& ids = field(object, "hash_ids");
    if (!ids.is_array()) lines_.fail(fmt::format("hash_ids is {}, not a list of integers", json_excerpt(ids)));
    if (static_cast<std::int64_t>(out_.ids.size() + ids.size()) > max_ids) {
      lines_.fail(fmt::format("the trace has more than {} hash_ids", max_ids));
    }
    one.first_id = static_cast<std::int64_t>(out_.ids.size());
    one.num_ids = static_cast<std::int32_t>(ids.size());
    std::int32_t before = -1;
    for (const json& id : ids) before = add_id(id, before);
    out_.requests.push_back(one);
  }

 private:
  const json& field(const json& object, const char* name) const {
    const auto found = object.find(name);
    if (found == object.end()) lines_.fail(fmt::format("the field {} is missing", name));
    return *found;
  }
  [[nodiscard]] double arrival_ms(const json& value) const {
    if (value.is_number()) {
      const double ms = value.get<double>();
      if (ms >= 0 && ms <= max_arrival_ms) return ms;
    }
    lines_.fail(
        fmt::format("timestamp is {}, allowed are numbers from 0 to {:.0f} (ms)", json_excerpt(value), max_arrival_ms));
  }
  [[nodiscard]] std::int32_t count(const json& object, const char* name, std::int64_t least) const {
    const json& value = field(object, name);
    // is_number_unsigned is true for every whole number that is not negative and fits into 64 bits.
    if (value.is_number_unsigned()) {
      const auto number = value.get<std::uint64_t>();
      if (number >= static_cast<std::uint64_t>(least) && number <= max_tokens) return static_cast<std::int32_t>(number);
    }
    lines_.fail(
        fmt::format("{} is {}, allowed are whole numbers from {} to {}", name, json_excerpt(value), least, max_tokens));
  }
  std::int32_t add_id(const json& value, std::int32_t before) {
    if (!value.is_number_unsigned()) {
      lines_.fail(
          fmt::format("hash_ids contains {}, allowed are whole numbers from 0 to {}", json_excerpt(value), UINT64_MAX));
    }
    const auto [found, is_new] = numbers_.try_emplace(value.get<std::uint64_t>(), out_.num_distinct_ids);
    const std::int32_t id = found->second;
    if (is_new) {
      ++out_.num_distinct_ids;
      predecessors_.push_back(before);
    } else if (predecessors_[static_cast<std::size_t>(id)] != before) {
      out_.ids_name_prefixes = false;
    }
    out_.ids.push_back(bifolio::token_id{id});
    return id;
  }

  line_reader& lines_;
  trace& out_;
  std::unordered_map<std::uint64_t, std::int32_t> numbers_;  // of ids, by first appearance
  std::vector<std::int32_t> predecessors_;                   // [num_distinct_ids], -1 for a first one
};

std::vector<std::string_view> split(std::string_view line) {
  std::vector<std::string_view> cells;
  while (true) {
    const std::size_t comma = line.find(',');
    std::string_view cell = line.substr(0, comma);
    while (!cell.empty() && (cell.front() == ' ' || cell.front() == '\t')) cell.remove_prefix(1);
    while (!cell.empty() && (cell.back() == ' ' || cell.back() == '\t')) cell.remove_suffix(1);
    cells.push_back(cell);
    if (comma == std::string_view::npos) return cells;
    line.remove_prefix(comma + 1);
  }
}

/// A whole number of exactly `digits` digits at the front of `text`, which loses them.
std::optional<std::int64_t> take_number(std::string_view& text, std::size_t digits) {
  if (text.size() < digits) return std::nullopt;
  std::int64_t value = 0;
  for (const char c : text.substr(0, digits)) {
    if (c < '0' || c > '9') return std::nullopt;
    value = 10 * value + (c - '0');
  }
  text.remove_prefix(digits);
  return value;
}

bool take(std::string_view& text, std::string_view any_of) {
  if (text.empty() || any_of.find(text.front()) == std::string_view::npos) return false;
  text.remove_prefix(1);
  return true;
}

/// Days from 1970-01-01 of the Gregorian calendar, years counted from March so that the leap day comes last.
std::int64_t days_from_civil(std::int64_t year, std::int64_t month, std::int64_t day) {
  const std::int64_t y = month <= 2 ? year - 1 : year;
  const std::int64_t months = (month + 9) % 12;
  return 365 * y + y / 4 - y / 100 + y / 400 + (153 * months + 2) / 5 + day - 719469;
}

/// "2023-11-16 18:15:46.6805900", also with T and with Z or an offset, as µs since 1970.
std::optional<double> parse_time(std::string_view text) {
  const auto year = take_number(text, 4);
  if (!year || !take(text, "-")) return std::nullopt;
  const auto month = take_number(text, 2);
  if (!month || *month < 1 || *month > 12 || !take(text, "-")) return std::nullopt;
  const auto day = take_number(text, 2);
  if (!day || *day < 1 || *day > 31 || !take(text, " T")) return std::nullopt;
  const auto hour = take_number(text, 2);
  if (!hour || *hour > 23 || !take(text, ":")) return std::nullopt;
  const auto minute = take_number(text, 2);
  if (!minute || *minute > 59 || !take(text, ":")) return std::nullopt;
  const auto second = take_number(text, 2);
  if (!second || *second > 60) return std::nullopt;
  double fraction = 0;
  if (take(text, ".")) {
    double place = 1e5;
    while (const auto digit = take_number(text, 1)) {
      fraction += place * static_cast<double>(*digit);
      place /= 10;
    }
    if (place == 1e5) return std::nullopt;
  }
  std::int64_t offset_minutes = 0;
  if (!text.empty() && !take(text, "Z")) {
    const bool west = text.front() == '-';
    if (!take(text, "+-")) return std::nullopt;
    const auto hours = take_number(text, 2);
    (void)take(text, ":");
    const auto minutes = take_number(text, 2);
    if (!hours || !minutes) return std::nullopt;
    offset_minutes = (west ? -1 : 1) * (60 * *hours + *minutes);
  }
  if (!text.empty()) return std::nullopt;
  const std::int64_t seconds =
      86400 * days_from_civil(*year, *month, *day) + 3600 * *hour + 60 * (*minute - offset_minutes) + *second;
  return 1e6 * static_cast<double>(seconds) + fraction;
}

class azure_reader {
 public:
  azure_reader(line_reader& lines, const std::string& header, trace& out) : lines_(lines), out_(out) {
    const auto cells = split(header);
    num_columns_ = cells.size();
    const auto column = [&](std::string_view name) {
      const auto found = std::find(cells.begin(), cells.end(), name);
      if (found == cells.end()) lines_.fail(fmt::format("the header '{}' has no column {}", excerpt(header), name));
      return static_cast<std::size_t>(found - cells.begin());
    };
    time_ = column("TIMESTAMP");
    input_ = column("ContextTokens");
    output_ = column("GeneratedTokens");
  }

  void read_line(const std::string& line) {
    const auto cells = split(line);
    if (cells.size() != num_columns_) {
      lines_.fail(fmt::format("{} columns were found, the header has {}", cells.size(), num_columns_));
    }
    const std::optional<double> time = parse_time(cells[time_]);
    if (!time) {
      lines_.fail(fmt::format("TIMESTAMP is '{}', not a time like 2023-11-16 18:15:46.6805900", excerpt(cells[time_])));
    }
    if (out_.requests.empty()) first_ = *time;
    const double arrival = *time - first_;
    if (arrival < 0) lines_.fail("TIMESTAMP is before that of the first request");
    trace_request one;
    one.arrival_us = arrival;
    one.num_input_tokens = count(cells[input_], "ContextTokens", 1);
    one.num_output_tokens = count(cells[output_], "GeneratedTokens", 0);
    lines_.require_fitting_sum(one, "ContextTokens", "GeneratedTokens");
    out_.requests.push_back(one);
  }

 private:
  [[nodiscard]] std::int32_t count(std::string_view text, const char* name, std::int64_t least) const {
    std::int64_t value = 0;
    const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (problem != std::errc() || end != text.data() + text.size() || value < least || value > max_tokens) {
      lines_.fail(
          fmt::format("{} is '{}', allowed are whole numbers from {} to {}", name, excerpt(text), least, max_tokens));
    }
    return static_cast<std::int32_t>(value);
  }

  line_reader& lines_;
  trace& out_;
  std::size_t num_columns_ = 0;
  std::size_t time_ = 0;
  std::size_t input_ = 0;
  std::size_t output_ = 0;
  double first_ = 0;
};

template <class Reader>
void read_lines(Reader& reader, line_reader& lines, std::string& line, bool have_line, std::int64_t max_requests,
                const trace& out) {
  const auto more = [&] { return max_requests == 0 || static_cast<std::int64_t>(out.requests.size()) < max_requests; };
  while (more() && (have_line || lines.next(line))) {
    have_line = false;
    reader.read_line(line);
  }
}

}  // namespace

trace read_trace(std::istream& in, std::string_view name, trace_format format, std::int64_t max_requests) {
  line_reader lines(in, name);
  trace out;
  std::string line;
  if (!lines.next(line)) throw input_error(fmt::format("{}: the trace is empty", name));
  if (line.starts_with("\xef\xbb\xbf")) line.erase(0, 3);  // byte order mark
  if (format == trace_format::automatic) {
    if (line.substr(0, line.find('{')).find_first_not_of(" \t") == std::string::npos && line.find('{') != line.npos) {
      format = trace_format::mooncake;
    } else if (line.find("TIMESTAMP") != std::string::npos) {
      format = trace_format::azure;
    } else {
      lines.fail(fmt::format("'{}' is neither a JSON object of a Mooncake trace nor the header of an Azure CSV, {}",
                             excerpt(line), "TIMESTAMP,ContextTokens,GeneratedTokens"));
    }
  }
  out.format = format;
  if (format == trace_format::mooncake) {
    mooncake_reader reader(lines, out);
    read_lines(reader, lines, line, true, max_requests, out);
  } else {
    azure_reader reader(lines, line, out);
    read_lines(reader, lines, line, false, max_requests, out);
  }
  if (out.requests.empty()) throw input_error(fmt::format("{}: the trace has no requests", name));
  return out;
}

trace read_trace_file(const std::string& path, trace_format format, std::int64_t max_requests) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw input_error(fmt::format("{}: the file cannot be opened", path));
  // Opening a directory succeeds, reading it does not.
  if (file.peek() == std::ifstream::traits_type::eof() && file.bad()) {
    throw input_error(fmt::format("{}: the file cannot be read", path));
  }
  return read_trace(file, path, format, max_requests);
}

}  // namespace trace_replay

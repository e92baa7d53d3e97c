// SPDX-License-Identifier: Apache-2.0
#include "tools/common/pool_log.hpp"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "tools/common/escape.hpp"
#include "tools/common/json.hpp"
#include "tools/common/program.hpp"

namespace tools {
namespace {

using nlohmann::ordered_json;

constexpr std::int64_t max_cells = std::int64_t{1} << 24;  // of a pool; the line that names them is much shorter

std::string marks_of(const std::vector<cell>& cells) {
  std::string marks;
  marks.reserve(cells.size());
  for (const cell& one : cells) marks += one.mark;
  return marks;
}

/// [[first, "marks"], …]: the runs of cells that differ, all of them without `before`.
ordered_json changes(const std::vector<cell>* before, const std::vector<cell>& now) {
  ordered_json runs = ordered_json::array();
  for (std::size_t i = 0; i < now.size();) {
    std::string marks;
    const std::size_t first = i;
    for (; i < now.size() && (before == nullptr || now[i] != (*before)[i]); ++i) marks += now[i].mark;
    if (marks.empty()) {
      ++i;
    } else {
      runs.push_back({first, std::move(marks)});
    }
  }
  return runs;
}

/// The counters, by the names that they have in a line.
template <class Frame, class Visit>
void for_each_counter(Frame& what, Visit visit) {
  visit("step", what.step);
  visit("waiting", what.num_waiting);
  visit("tokens", what.num_tokens);
  visit("lookups", what.lookups);
  visit("hits", what.hits);
  visit("evictions", what.evictions);
  visit("preemptions", what.preemptions);
  visit("swapped_out_blocks", what.swapped_out_blocks);
  visit("swapped_in_blocks", what.swapped_in_blocks);
  visit("copies", what.copies);
}

ordered_json counters(const pool_frame& what) {
  ordered_json line;
  for_each_counter(what, [&](const char* name, std::int64_t value) { line[name] = value; });
  line["running"] = what.running;
  line["swapped"] = what.swapped;
  line["news"] = what.news;
  return line;
}

std::string text_of(const ordered_json& line) {
  return printable_json(line.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
}

}  // namespace

std::string to_json(const pool_frame& what) {
  ordered_json line = counters(what);
  line["block_size"] = what.block_size;
  line["device"] = marks_of(what.device);
  line["host"] = marks_of(what.host);
  return text_of(line);
}

pool_log_writer::pool_log_writer(const std::filesystem::path& path)
    : name_(path.string()), file_(path, std::ios::binary | std::ios::trunc) {
  if (!file_) throw input_error(fmt::format("{}: the file cannot be written", name_));
}

void pool_log_writer::add(const pool_frame& what) {
  if (!last_) {
    ordered_json first;
    first["bifolio_pool_log"] = 1;
    first["block_size"] = what.block_size;
    first["device"] = what.device.size();
    first["host"] = what.host.size();
    write(text_of(first));
  }
  ordered_json line = counters(what);
  line["device"] = changes(last_ ? &last_->device : nullptr, what.device);
  line["host"] = changes(last_ ? &last_->host : nullptr, what.host);
  write(text_of(line));
  last_ = what;
}

void pool_log_writer::write(const std::string& line) {
  file_ << line << '\n' << std::flush;
  if (!file_) throw std::runtime_error(fmt::format("{}: the file cannot be written", name_));
}

bool pool_log_reader::take(std::string_view text) {
  ++line_;
  const auto refuse = [&](std::string_view what) {
    throw input_error(fmt::format("{}: line {} {}; a log of generate --events or serve --events is expected",
                                  printable_line(name_), line_, what));
  };
  const auto number = [&](const nlohmann::json& value) {
    const std::optional<std::int64_t> whole = whole_number(value);
    if (!whole) refuse("has something else where a whole number belongs");
    return *whole;
  };
  const auto take_marks = [&](const nlohmann::json& runs, std::vector<cell>& cells) {
    for (const nlohmann::json& run : runs) {
      const auto first = static_cast<std::uint64_t>(number(run.at(0)));
      const std::string& marks = run.at(1).get_ref<const std::string&>();
      if (first > cells.size() || marks.size() > cells.size() - first) refuse("names a block that is not there");
      for (std::size_t i = 0; i < marks.size(); ++i) {
        const std::optional<cell> one = cell_of(marks[i]);
        if (!one) refuse("has a block in a state that is not known");
        cells[first + i] = *one;
      }
    }
  };
  try {
    const nlohmann::json line = parse_json(text);
    if (line_ == 1) {
      if (line.at("bifolio_pool_log") != 1) refuse("is of another version");
      const std::int64_t device = number(line.at("device")), host = number(line.at("host"));
      if (device < 0 || host < 0 || device > max_cells || host > max_cells) refuse("names a pool of impossible size");
      now_.block_size = number(line.at("block_size"));
      now_.device.assign(static_cast<std::size_t>(device), {});
      now_.host.assign(static_cast<std::size_t>(host), {});
      return false;
    }
    for_each_counter(now_, [&](const char* name, std::int64_t& value) { value = number(line.at(name)); });
    now_.running = line.at("running").get<std::string>();
    now_.swapped = line.at("swapped").get<std::string>();
    now_.news = line.at("news").get<std::vector<std::string>>();
    take_marks(line.at("device"), now_.device);
    take_marks(line.at("host"), now_.host);
  } catch (const json_error& problem) {
    refuse(fmt::format("is {}", problem.what()));
  } catch (const nlohmann::json::exception&) {
    refuse("is no frame");
  }
  return true;
}

}  // namespace tools

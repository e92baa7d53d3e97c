// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <fmt/format.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <ostream>
#include <utility>

#include "tools/common/escape.hpp"

namespace trace_replay {
namespace {

constexpr std::size_t md_samples = 16;
constexpr std::size_t json_samples = 256;

/// Six significant digits, and no exponent for large values.
std::string number(double value) {
  return std::abs(value) < 1e6 ? fmt::format("{:.6g}", value) : fmt::format("{:.0f}", value);
}

std::string text_of(const fact& one) {
  if (const auto* count = std::get_if<std::int64_t>(&one.value)) return std::to_string(*count);
  if (const auto* real = std::get_if<double>(&one.value)) return number(*real);
  return std::get<std::string>(one.value);
}

std::vector<std::pair<std::string, double>> columns_of(const percentiles& values) {
  return {{"p50", values.p50}, {"p90", values.p90}, {"p99", values.p99}, {"mean", values.mean}, {"max", values.max}};
}

void print_md(std::ostream& out, const report& what) {
  out << "# " << tools::printable_line(what.title) << "\n\n| | |\n|---|---:|\n";
  for (const fact& one : what.facts) out << "| " << one.label << " | " << tools::md_cell(text_of(one)) << " |\n";
  if (!what.durations.empty()) {
    out << "\n| ms | p50 | p90 | p99 | mean | max |\n|---|---:|---:|---:|---:|---:|\n";
    for (const duration_row& one : what.durations) {
      out << "| " << one.label;
      for (const auto& [name, value] : columns_of(one.values)) out << " | " << fmt::format("{:.1f}", value);
      out << " |\n";
    }
  }
  out << "\n| " << what.time_label << " | in use | cached, idle |" << (what.num_host_blocks > 0 ? " host pool |" : "")
      << " running | waiting | hit rate so far |\n|---:|---:|---:|" << (what.num_host_blocks > 0 ? "---:|" : "")
      << "---:|---:|---:|\n";
  for (const pool_sample& one : what.over_time.thinned(md_samples)) {
    out << fmt::format("| {:.0f} | {:.1f} % | {:.1f} % |", one.at, 100 * share(one.used_blocks, what.num_blocks),
                       100 * share(one.cached_blocks, what.num_blocks));
    if (what.num_host_blocks > 0) {
      out << fmt::format(" {:.1f} % |", 100 * share(one.host_blocks, what.num_host_blocks));
    }
    out << fmt::format(" {} | {} | {:.4f} |\n", one.running, one.waiting, share(one.hits, one.lookups));
  }
}

void print_csv(std::ostream& out, const report& what) {
  std::string names, values;
  const auto add = [&](const std::string& name, const std::string& value) {
    names.append(names.empty() ? "" : ",").append(tools::csv_cell(name));
    values.append(values.empty() ? "" : ",").append(tools::csv_cell(value));
  };
  for (const fact& one : what.facts) add(one.name, text_of(one));
  for (const duration_row& one : what.durations) {
    for (const auto& [name, value] : columns_of(one.values)) add(one.name + '_' + name, number(value));
  }
  out << names << '\n' << values << '\n';
}

void print_json(std::ostream& out, const report& what, int indent) {
  nlohmann::ordered_json object;
  for (const fact& one : what.facts) {
    std::visit([&](const auto& value) { object[one.name] = value; }, one.value);
  }
  for (const duration_row& one : what.durations) {
    for (const auto& [name, value] : columns_of(one.values)) object[one.name + '_' + name] = value;
  }
  object["timeline"] = nlohmann::ordered_json::array();
  for (const pool_sample& one : what.over_time.thinned(json_samples)) {
    nlohmann::ordered_json sample;
    sample[what.time_name] = one.at;
    sample["used_blocks"] = one.used_blocks;
    sample["cached_blocks"] = one.cached_blocks;
    if (what.num_host_blocks > 0) sample["host_blocks"] = one.host_blocks;
    sample["running"] = one.running;
    sample["waiting"] = one.waiting;
    sample["hits"] = one.hits;
    sample["lookups"] = one.lookups;
    object["timeline"].push_back(std::move(sample));
  }
  // What is no UTF-8 in a file's name is replaced, so that the output is JSON whatever happens.
  out << tools::printable_json(object.dump(indent, ' ', false, nlohmann::ordered_json::error_handler_t::replace))
      << '\n';
}

}  // namespace

void print(std::ostream& out, const report& what, tools::output_format format) {
  switch (format) {
    case tools::output_format::md:
      return print_md(out, what);
    case tools::output_format::csv:
      return print_csv(out, what);
    case tools::output_format::json:
      return print_json(out, what, 2);
    case tools::output_format::jsonl:
      return print_json(out, what, -1);
  }
}

}  // namespace trace_replay

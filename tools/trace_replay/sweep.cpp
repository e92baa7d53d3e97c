// SPDX-License-Identifier: Apache-2.0
#include "sweep.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <ostream>

#include "plot.hpp"
#include "tools/common/escape.hpp"
#include "tools/common/report.hpp"
#include "tools/common/svg.hpp"

namespace trace_replay {
namespace {

const fact* find(const report& said, std::string_view name) {
  const auto found = std::ranges::find(said.facts, name, &fact::name);
  return found != said.facts.end() ? &*found : nullptr;
}

double number_of(const report& said, std::string_view name) {
  const fact* one = find(said, name);
  if (one == nullptr) return 0;
  if (const auto* count = std::get_if<std::int64_t>(&one->value)) return static_cast<double>(*count);
  return std::get<double>(one->value);
}

std::string text_of(const report& said, std::string_view name) {
  const fact* one = find(said, name);
  return one != nullptr ? tools::to_text(one->value) : std::string();
}

tools::report rows_of(const std::vector<report>& said) {
  tools::report table;
  for (const report& one : said) {
    tools::report_row row;
    for (const char* name :
         {"policy", "blocks", "refused", "hit_rate", "evictions", "preemptions", "tokens_per_second"}) {
      if (const fact* value = find(one, name)) row.emplace_back(name, value->value);
    }
    for (const duration_row& duration : one.durations) {
      if (duration.name != "time_to_first_token_ms" && duration.name != "latency_ms") continue;
      const std::string name = duration.name == "latency_ms" ? "latency" : "first_token";
      row.emplace_back(name + "_p50_ms", duration.values.p50);
      row.emplace_back(name + "_p90_ms", duration.values.p90);
    }
    table.add(std::move(row));
  }
  return table;
}

struct point {
  double blocks = 0;
  double value = 0;
};

struct curve {
  std::string name;
  std::vector<point> points;
  int series = 0;
  bool is_dashed = false;
};

/// One panel: blocks on a logarithmic axis, values from 0.
class panel {
 public:
  panel(double top, const std::vector<curve>& curves, std::string label) : top_(top), label_(std::move(label)) {
    for (const curve& one : curves) {
      for (const point& p : one.points) {
        least_ = std::min(least_, p.blocks);
        most_ = std::max(most_, p.blocks);
        highest_ = std::max(highest_, p.value);
      }
    }
    if (most_ <= least_) most_ = least_ * 2;
    const double power = std::pow(10.0, std::floor(std::log10(highest_)));
    for (const double factor : {1.0, 2.0, 4.0, 5.0, 10.0}) {
      if (factor * power >= highest_) {
        highest_ = factor * power;
        break;
      }
    }
  }

  void draw(std::string& text, const std::vector<curve>& curves) const {
    const auto out = std::back_inserter(text);
    for (int quarter = 0; quarter <= 4; ++quarter) {
      const double value = highest_ * quarter / 4;
      fmt::format_to(out, R"(<line class="grid" x1="{0}" y1="{2:.1f}" x2="{1}" y2="{2:.1f}"/>)", left, left + width,
                     y(value));
      fmt::format_to(out, "<text x=\"{}\" y=\"{:.1f}\" text-anchor=\"end\">{:.3g}</text>\n", left - 8, y(value) + 4.5,
                     value);
    }
    for (const double factor : {1.0, 2.0, 5.0}) {
      for (double tick = factor * std::pow(10.0, std::floor(std::log10(least_))); tick <= most_ * 1.0001; tick *= 10) {
        if (tick < least_ * 0.9999) continue;
        fmt::format_to(out, R"(<line class="axis" x1="{0:.1f}" y1="{1}" x2="{0:.1f}" y2="{2}"/>)", x(tick),
                       top_ + height, top_ + height + 5);
        if (factor > 1 && most_ / least_ > 300) continue;
        fmt::format_to(out, "<text x=\"{:.1f}\" y=\"{}\" text-anchor=\"middle\">{:.0f}</text>\n", x(tick),
                       top_ + height + 20, tick);
      }
    }
    fmt::format_to(out, R"(<rect class="axis" x="{}" y="{}" width="{}" height="{}"/>)", left, top_, width, height);
    fmt::format_to(out, "\n<text x=\"{}\" y=\"{}\" font-weight=\"bold\">{}</text>\n", left, top_ - 30,
                   tools::svg_text(label_));
    double entry = left;
    for (const curve& one : curves) {
      const char* dashes = one.is_dashed ? " stroke-dasharray=\"6 4\"" : "";
      fmt::format_to(out, "<polyline class=\"series{}\"{} points=\"", one.series, dashes);
      for (const point& p : one.points) fmt::format_to(out, "{:.1f},{:.1f} ", x(p.blocks), y(p.value));
      fmt::format_to(out, "\"/>\n");
      for (const point& p : one.points) {
        fmt::format_to(out, "<circle class=\"area{}\" cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\"/>", one.series, x(p.blocks),
                       y(p.value));
      }
      fmt::format_to(out, "<line class=\"series{}\"{} x1=\"{:.0f}\" y1=\"{}\" x2=\"{:.0f}\" y2=\"{}\"/>", one.series,
                     dashes, entry, top_ - 13, entry + 26, top_ - 13);
      fmt::format_to(out, "<text x=\"{:.0f}\" y=\"{}\">{}</text>\n", entry + 32, top_ - 9, tools::svg_text(one.name));
      entry += 56 + 8 * static_cast<double>(one.name.size());
    }
  }

  static constexpr double left = 80, width = 700, height = 200;

 private:
  [[nodiscard]] double x(double blocks) const {
    return left + width * std::log(blocks / least_) / std::log(most_ / least_);
  }
  [[nodiscard]] double y(double value) const { return top_ + height * (1 - value / highest_); }

  double top_;
  std::string label_;
  double least_ = 1e18, most_ = 1, highest_ = 1e-9;
};

/// A curve for each policy, in their order; `value` of a report.
template <class Value>
void add_curves(std::vector<curve>& curves, const std::vector<report>& said, const std::string& suffix, bool dashed,
                Value value) {
  const std::size_t first = curves.size();
  for (const report& one : said) {
    const std::string name = text_of(one, "policy") + suffix;
    auto found = std::find_if(curves.begin() + static_cast<std::ptrdiff_t>(first), curves.end(),
                              [&](const curve& c) { return c.name == name; });
    if (found == curves.end()) {
      const int series = static_cast<int>(curves.size() - first) % tools::num_svg_series;
      found = curves.insert(curves.end(), {name, {}, series, dashed});
    }
    found->points.push_back({std::max(1.0, number_of(one, "blocks")), value(one)});
  }
  for (curve& one : curves) std::ranges::sort(one.points, {}, &point::blocks);
}

const percentiles* first_token(const report& said) {
  const auto found = std::ranges::find(said.durations, "time_to_first_token_ms", &duration_row::name);
  return found != said.durations.end() ? &found->values : nullptr;
}

}  // namespace

void print_sweep(std::ostream& out, const std::vector<report>& said, tools::output_format format) {
  rows_of(said).print(out, format);
}

std::string sweep_svg(const std::vector<report>& said) {
  std::vector<curve> rates, waits;
  add_curves(rates, said, "", false, [](const report& one) { return 100 * number_of(one, "hit_rate"); });
  const bool has_waits = std::ranges::all_of(said, [](const report& one) { return first_token(one) != nullptr; });
  if (has_waits) {
    add_curves(waits, said, ", median", false, [](const report& one) { return first_token(one)->p50; });
    add_curves(waits, said, ", 90th percentile", true, [](const report& one) { return first_token(one)->p90; });
  }
  std::string text = tools::begin_svg(820, has_waits ? 640 : 340, "Hit rate by the size of the pool");
  panel(60, rates, "hit rate, % of the blocks looked up").draw(text, rates);
  if (has_waits) panel(350, waits, "time to first token, ms").draw(text, waits);
  fmt::format_to(std::back_inserter(text),
                 "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">blocks of the pool</text>\n</svg>\n",
                 panel::left + panel::width / 2, has_waits ? 600 : 310);
  return text;
}

std::string html_report(const std::vector<report>& said) {
  std::string text =
      "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
  const auto out = std::back_inserter(text);
  fmt::format_to(out, "<title>{}</title>\n", tools::svg_text(said.front().title));
  text +=
      "<style>:root{color-scheme:light dark}body{max-width:60rem;margin:0 auto;padding:1rem;font:16px/1.5 "
      "system-ui,sans-serif}svg{max-width:100%;height:auto}table{border-collapse:collapse;display:block;overflow-x:"
      "auto}"
      "td,th{border:1px solid #8884;padding:.2rem .6rem;text-align:right;font-variant-numeric:tabular-nums}"
      "td:first-child,th:first-child{text-align:left}</style>\n";
  fmt::format_to(out, "<h1>{}</h1>\n", tools::svg_text(text_of(said.front(), "trace")));
  if (said.size() > 1) {
    const tools::report table = rows_of(said);
    text += "<table><tr>";
    for (const auto& [name, value] : table.rows().front()) fmt::format_to(out, "<th>{}</th>", tools::svg_text(name));
    text += "</tr>\n";
    for (const tools::report_row& row : table.rows()) {
      text += "<tr>";
      for (const auto& [name, value] : row) fmt::format_to(out, "<td>{}</td>", tools::svg_text(tools::to_text(value)));
      text += "</tr>\n";
    }
    text += "</table>\n" + sweep_svg(said);
  }
  for (const report& one : said) {
    fmt::format_to(out, "<h2>{}</h2>\n{}<details><summary>all values</summary><table>\n",
                   tools::svg_text(text_of(one, "policy") + ": " + one.title), plot_svg(one));
    for (const fact& value : one.facts) {
      fmt::format_to(out, "<tr><td>{}</td><td>{}</td></tr>\n", tools::svg_text(value.label),
                     tools::svg_text(tools::to_text(value.value)));
    }
    for (const duration_row& row : one.durations) {
      const percentiles& v = row.values;
      for (const auto& [name, value] : {std::pair{"p50", v.p50}, {"p90", v.p90}, {"p99", v.p99}, {"max", v.max}}) {
        fmt::format_to(out, "<tr><td>{}, {}, ms</td><td>{:.1f}</td></tr>\n", tools::svg_text(row.label), name, value);
      }
    }
    text += "</table></details>\n";
  }
  return text + "</html>\n";
}

}  // namespace trace_replay

// SPDX-License-Identifier: Apache-2.0
#include "plot.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>

#include "tools/common/escape.hpp"
#include "tools/common/svg.hpp"

namespace trace_replay {
namespace {

constexpr std::size_t num_points = 240;

/// 1, 2 or 5 times a power of ten, so that `span` has about `count` ticks.
double tick_distance(double span, double count) {
  const double raw = span / count;
  const double power = std::pow(10.0, std::floor(std::log10(raw)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= raw) return factor * power;
  }
  return 10 * power;
}

struct panel {
  double left = 80, top = 0, width = 700, height = 200;
  double x_begin = 0, x_end = 1;
  double full = 1;  ///< the share at the upper edge

  [[nodiscard]] double x(double at) const { return left + width * (at - x_begin) / (x_end - x_begin); }
  [[nodiscard]] double y(double part) const { return top + height * (1 - part / full); }
};

using reading = std::function<double(const pool_sample&)>;

class drawing {
 public:
  explicit drawing(const report& what) : what_(what), points_(what.over_time.thinned(num_points)) {}

  std::string draw() {
    text_ = tools::begin_svg(820, 620, what_.title);
    write("<text x=\"80\" y=\"28\" font-size=\"16\" font-weight=\"bold\">{}</text>\n", tools::svg_text(what_.title));
    panel pool{.top = 80};
    panel rate{.top = 350};
    pool.x_begin = rate.x_begin = points_.empty() ? 0 : points_.front().at;
    pool.x_end = rate.x_end = points_.empty() ? 1 : std::max(points_.back().at, pool.x_begin + 1e-9);

    frame(pool, fmt::format("share of {} blocks", what_.num_blocks));
    const reading used = [&](const pool_sample& s) { return share(s.used_blocks, what_.num_blocks); };
    const reading kept = [&](const pool_sample& s) { return share(s.used_blocks + s.cached_blocks, what_.num_blocks); };
    area(
        pool, [](const pool_sample&) { return 0.0; }, used, 0, 1.0);
    area(pool, used, kept, 0, 0.35);
    int next = 0;
    if (std::any_of(points_.begin(), points_.end(), [](const pool_sample& s) { return s.used_blocks > 0; })) {
      entry(pool, next++, 0, 1.0, "in use");
    }
    entry(pool, next++, 0, 0.35, "cached, idle");
    if (what_.num_host_blocks > 0) {
      line(
          pool, [&](const pool_sample& s) { return share(s.host_blocks, what_.num_host_blocks); }, 1);
      entry(pool, next, 1, 1.0, fmt::format("host pool, of {} blocks", what_.num_host_blocks));
    }

    const reading since_start = [&](const pool_sample& s) { return share(s.hits, s.lookups); };
    double highest = 0;
    const reading recent = recent_rate();
    for (const pool_sample& one : points_) highest = std::max({highest, since_start(one), recent(one)});
    rate.full = highest <= 0.1 ? 0.1 : highest <= 0.2 ? 0.2 : highest <= 0.4 ? 0.4 : 1.0;
    frame(rate, "hit rate of blocks looked up");
    line(rate, recent_rate(), 3);
    line(rate, since_start, 1);
    entry(rate, 0, 1, 1.0, "since the start");
    entry(rate, 1, 3, 1.0, "recent");
    write("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{}</text>\n", rate.left + rate.width / 2,
          rate.top + rate.height + 44, tools::svg_text(what_.time_label));
    write("</svg>\n");
    return std::move(text_);
  }

 private:
  template <class... Parts>
  void write(fmt::format_string<Parts...> format, Parts&&... parts) {
    fmt::format_to(std::back_inserter(text_), format, std::forward<Parts>(parts)...);
  }

  void frame(const panel& at, const std::string& label) {
    for (int quarter = 0; quarter <= 4; ++quarter) {
      const double part = at.full * quarter / 4;
      const double y = at.y(part);
      write(R"(<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="grid"/>)", at.left, y, at.left + at.width,
            y);
      write("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\">{:.3g} %</text>\n", at.left - 8, y + 4.5, 100 * part);
    }
    const double distance = tick_distance(at.x_end - at.x_begin, 8);
    for (double tick = std::ceil(at.x_begin / distance) * distance; tick <= at.x_end + 1e-9 * distance;
         tick += distance) {
      write(R"(<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="axis"/>)", at.x(tick), at.top + at.height,
            at.x(tick), at.top + at.height + 5);
      write("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\">{:.6g}</text>\n", at.x(tick),
            at.top + at.height + 20, tick);
    }
    write(R"(<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="axis"/>)", at.left, at.top, at.width,
          at.height);
    write("\n<text transform=\"translate({:.1f} {:.1f}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n", at.left - 56,
          at.top + at.height / 2, tools::svg_text(label));
  }

  void entry(const panel& at, int index, int series, double opacity, const std::string& label) {
    const double x = at.left + 150 * index;
    write(R"(<rect class="area{}" fill-opacity="{}" x="{:.1f}" y="{:.1f}" width="12" height="12"/>)", series, opacity,
          x, at.top - 22);
    write("<text x=\"{:.1f}\" y=\"{:.1f}\">{}</text>\n", x + 18, at.top - 11, tools::svg_text(label));
  }

  void line(const panel& at, const reading& value, int series) {
    write("<polyline class=\"series{}\" points=\"", series);
    for (const pool_sample& one : points_) write("{:.1f},{:.1f} ", at.x(one.at), at.y(value(one)));
    write("\"/>\n");
  }

  void area(const panel& at, const reading& low, const reading& high, int series, double opacity) {
    write("<polygon class=\"area{}\" fill-opacity=\"{}\" points=\"", series, opacity);
    for (const pool_sample& one : points_) write("{:.1f},{:.1f} ", at.x(one.at), at.y(high(one)));
    for (auto one = points_.rbegin(); one != points_.rend(); ++one) {
      write("{:.1f},{:.1f} ", at.x(one->at), at.y(low(*one)));
    }
    write("\"/>\n");
  }

  /// Of the twentieth of the time before each point. A reading that is called for the points in order.
  [[nodiscard]] reading recent_rate() const {
    return [this, first = points_.begin()](const pool_sample& s) mutable {
      const double window = (points_.back().at - points_.front().at) / 20;
      while (first->at < s.at - window) ++first;
      const auto from = first == points_.begin() ? first : first - 1;
      return share(s.hits - from->hits, s.lookups - from->lookups);
    };
  }

  const report& what_;
  std::vector<pool_sample> points_;
  std::string text_;
};

}  // namespace

std::string plot_svg(const report& what) { return drawing(what).draw(); }

}  // namespace trace_replay

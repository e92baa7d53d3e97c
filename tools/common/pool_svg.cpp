// SPDX-License-Identifier: Apache-2.0
#include "tools/common/pool_svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <iterator>
#include <utility>
#include <vector>

#include "tools/common/escape.hpp"

namespace tools {
namespace {

constexpr int cell_size = 14;
constexpr int margin = 16;

constexpr std::array sequence_colours = {"#5fafff", "#ffaf5f", "#87d787", "#ff87af", "#d7afd7", "#afafff", "#5fd7d7",
                                         "#ffd75f", "#af87af", "#87afaf", "#d78787", "#afd7ff", "#87d7af", "#d7d7af"};

/// The variable of the style sheet that has the cell's colour.
std::string colour_of(const cell& one) {
  switch (one.state) {
    case cell_state::free:
      return "free";
    case cell_state::cached:
      return "cached";
    case cell_state::used:
      return fmt::format("s{}", static_cast<unsigned char>(one.mark) % sequence_colours.size());
    case cell_state::shared:
      return "shared";
    case cell_state::fenced:
      return "fenced";
  }
  return "";
}

/// '\0' for a cell without one.
char letter_of(const cell& one) {
  return one.state == cell_state::used || one.state == cell_state::shared ? one.mark : '\0';
}

std::string style_sheet() {
  std::string text =
      "svg{--free:#f2f2f2;--cached:#c4c4c4;--shared:#202020;--over:#ffffff;--fenced:#c0392b;--ink:#202020;--paper:#"
      "ffffff";
  for (std::size_t i = 0; i < sequence_colours.size(); ++i) text += fmt::format(";--s{}:{}", i, sequence_colours[i]);
  return text +
         "}@media(prefers-color-scheme:dark){svg{--free:#262626;--cached:#5a5a5a;--shared:#f5f5f5;--over:#161616;"
         "--ink:#e8e8e8;--paper:#161616}}"
         ".p{fill:var(--paper)}text{fill:var(--ink)}.m{font-size:10px;text-anchor:middle;fill:#202020}"
         ".o{fill:var(--over)}.a{animation-timing-function:step-end;animation-iteration-count:infinite}.h{visibility:"
         "hidden}"
         "@media(prefers-reduced-motion:reduce){.a{animation:none!important}}";
}

std::string headline(const pool_frame& what) {
  return fmt::format("step {}: {} tokens, {} running, {} waiting, {} on the host", what.step, what.num_tokens,
                     what.running.size(), what.num_waiting, what.swapped.size());
}

/// Where things are; the same for all frames.
class sheet {
 public:
  sheet(const pool_frame& what, std::int32_t columns) : columns_(columns) {
    const auto rows = [&](std::size_t cells) { return (static_cast<int>(cells) + columns - 1) / columns * cell_size; };
    device_top_ = margin + 44;
    host_top_ = device_top_ + rows(what.device.size()) + 30;
    legend_top_ = what.host.empty() ? host_top_ - 12 : host_top_ + rows(what.host.size()) + 18;
    width_ = std::max(columns * cell_size, 850) + 2 * margin;
  }

  template <class... Parts>
  void write(fmt::format_string<Parts...> format, Parts&&... parts) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Parts>(parts)...);
  }

  /// `rules` are added to the style sheet.
  void begin(int height_below_legend, const std::string& rules) {
    const int height = legend_top_ + height_below_legend + margin;
    write(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" width=\"{}\" height=\"{}\" role=\"img\" "
        "font-family=\"monospace\" font-size=\"12\">\n<title>The blocks of the pool by who uses them</title>\n"
        "<style>{}{}</style>\n<rect class=\"p\" width=\"{}\" height=\"{}\"/>\n",
        width_, height, width_, height, style_sheet(), rules, width_, height);
  }

  void captions(const pool_frame& what) {
    text(margin, device_top_ - 8, fmt::format("device, {} blocks of {} tokens", what.device.size(), what.block_size));
    if (!what.host.empty()) text(margin, host_top_ - 8, fmt::format("host, {} blocks", what.host.size()));
  }

  void text(int x, int y, const std::string& what) {
    write("<text x=\"{}\" y=\"{}\" xml:space=\"preserve\">{}</text>\n", x, y, svg_text(what));
  }

  [[nodiscard]] std::pair<int, int> place(std::size_t i, bool host) const {
    const int at = static_cast<int>(i);
    return {margin + at % columns_ * cell_size, (host ? host_top_ : device_top_) + at / columns_ * cell_size};
  }

  /// `more`: further attributes.
  void rect(std::pair<int, int> at, const cell& one, const std::string& more) {
    write("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"var(--{})\"{}/>", at.first, at.second,
          cell_size - 1, cell_size - 1, colour_of(one), more);
  }

  void mark(std::pair<int, int> at, const cell& one, const std::string& classes, const std::string& more) {
    write("<text class=\"m{}{}\" x=\"{:.1f}\" y=\"{}\"{}>{}</text>", one.state == cell_state::shared ? " o" : "",
          classes, at.first + (cell_size - 1) / 2.0, at.second + 10, more, one.mark);
  }

  void draw_cell(std::pair<int, int> at, const cell& one) {
    rect(at, one, "");
    if (letter_of(one) != '\0') mark(at, one, "", "");
    write("\n");
  }

  /// `counts`: of each state, or null when they change.
  void legend(const pool_frame* counts) {
    int x = margin;
    for (const auto& [state, mark] : {std::pair{cell_state::free, '.'},
                                      {cell_state::cached, ':'},
                                      {cell_state::used, 'A'},
                                      {cell_state::shared, '2'},
                                      {cell_state::fenced, '~'}}) {
      draw_cell({x, legend_top_}, {state, mark});
      std::string name = name_of(state);
      if (counts != nullptr) name += fmt::format(" {}", counts->count(state));
      text(x + cell_size + 5, legend_top_ + 11, name);
      x += cell_size + 26 + 8 * static_cast<int>(name.size());
    }
  }

  std::string finish() {
    write("</svg>\n");
    return std::move(out_);
  }
  /// With what another one has drawn.
  std::string finish(const sheet& body) {
    out_ += body.out_;
    return finish();
  }

  [[nodiscard]] int legend_top() const noexcept { return legend_top_; }

 private:
  std::int32_t columns_;
  int device_top_ = 0;
  int host_top_ = 0;
  int legend_top_ = 0;
  int width_ = 0;
  std::string out_;
};

std::string counters(const pool_frame& what) {
  return fmt::format("prefix hits {} of {} blocks, evictions {}, preemptions {}, swapped out {}, in {}, copies {}",
                     what.hits, what.lookups, what.evictions, what.preemptions, what.swapped_out_blocks,
                     what.swapped_in_blocks, what.copies);
}

/// Turns what changes from frame to frame into rules of CSS: each thing that moves has an animation of its own, which
/// jumps where the thing changes.
class animation {
 public:
  animation(std::size_t num_frames, double seconds) : num_frames_(num_frames), seconds_(seconds) {}

  /// The attribute of a thing whose `property` is value(i) in frame i; empty when that never changes.
  template <class Value>
  std::string animate(const char* property, Value value) {
    std::string steps, before;
    int num_changes = 0;
    for (std::size_t i = 0; i < num_frames_; ++i) {
      const std::string now = value(i);
      if (i > 0 && now == before) continue;
      steps += fmt::format("{:.4g}%{{{}:{}}}", 100 * static_cast<double>(i) / static_cast<double>(num_frames_),
                           property, now);
      num_changes += i > 0 ? 1 : 0;
      before = now;
    }
    if (num_changes == 0) return {};
    rules_ += fmt::format("@keyframes k{}{{{}100%{{{}:{}}}}}", ++count_, steps, property, before);
    return fmt::format(" style=\"animation-name:k{};animation-duration:{:.3f}s\"", count_, seconds_);
  }

  [[nodiscard]] const std::string& rules() const noexcept { return rules_; }

 private:
  std::size_t num_frames_;
  double seconds_;
  int count_ = 0;
  std::string rules_;
};

/// One cell over all frames, and each letter that it ever has. Where nothing moves the last frame is seen.
void animate_cell(sheet& out, animation& moving, std::pair<int, int> at, std::size_t num_frames,
                  const std::function<const cell&(std::size_t)>& cell_in) {
  const cell& last = cell_in(num_frames - 1);
  const std::string fill =
      moving.animate("fill", [&](std::size_t i) { return "var(--" + colour_of(cell_in(i)) + ")"; });
  out.rect(at, last, fill.empty() ? "" : " class=\"a\"" + fill);
  std::vector<char> seen;
  for (std::size_t i = 0; i < num_frames; ++i) {
    const cell& one = cell_in(i);
    const char letter = letter_of(one);
    if (letter == '\0' || std::ranges::find(seen, letter) != seen.end()) continue;
    seen.push_back(letter);
    const std::string shown = moving.animate(
        "visibility", [&](std::size_t k) { return letter_of(cell_in(k)) == letter ? "visible" : "hidden"; });
    const char* classes = shown.empty() ? "" : letter_of(last) == letter ? " a" : " a h";
    out.mark(at, one, classes, shown);
  }
  out.write("\n");
}

/// A line whose text is another one in every frame.
void animate_line(sheet& out, animation& moving, int y, std::size_t num_frames,
                  const std::function<std::string(std::size_t)>& line_in) {
  for (std::size_t k = 0; k < num_frames;) {
    const std::string line = line_in(k);
    std::size_t end = k + 1;
    while (end < num_frames && line_in(end) == line) ++end;
    const std::string shown =
        moving.animate("visibility", [&](std::size_t i) { return i >= k && i < end ? "visible" : "hidden"; });
    out.write("<text class=\"{}\" x=\"{}\" y=\"{}\"{}>{}</text>\n", end == num_frames ? "a" : "a h", margin, y, shown,
              line);
    k = end;
  }
}

}  // namespace

std::string draw_pool_svg(const pool_frame& what, std::int32_t columns) {
  sheet out(what, columns);
  out.begin(60 + 16 * static_cast<int>(what.news.size()), "");
  out.text(margin, margin + 8, headline(what));
  out.captions(what);
  for (std::size_t i = 0; i < what.device.size(); ++i) out.draw_cell(out.place(i, false), what.device[i]);
  for (std::size_t i = 0; i < what.host.size(); ++i) out.draw_cell(out.place(i, true), what.host[i]);
  out.legend(&what);
  out.text(margin, out.legend_top() + 36, counters(what));
  int y = out.legend_top() + 60;
  for (const std::string& one : what.news) {
    out.text(margin, y, one);
    y += 16;
  }
  return out.finish();
}

std::string draw_animated_pool_svg(std::span<const pool_frame> frames, std::int32_t columns, double frames_per_second) {
  const pool_frame& first = frames.front();
  sheet out(first, columns), body(first, columns);
  animation moving(frames.size(), static_cast<double>(frames.size()) / frames_per_second);
  body.captions(first);
  for (std::size_t i = 0; i < first.device.size(); ++i) {
    animate_cell(body, moving, body.place(i, false), frames.size(),
                 [&](std::size_t k) -> const cell& { return frames[k].device[i]; });
  }
  for (std::size_t i = 0; i < first.host.size(); ++i) {
    animate_cell(body, moving, body.place(i, true), frames.size(),
                 [&](std::size_t k) -> const cell& { return frames[k].host[i]; });
  }
  body.legend(nullptr);
  animate_line(body, moving, margin + 8, frames.size(), [&](std::size_t k) { return headline(frames[k]); });
  animate_line(body, moving, body.legend_top() + 36, frames.size(), [&](std::size_t k) { return counters(frames[k]); });
  out.begin(40, moving.rules());
  return out.finish(body);
}

}  // namespace tools

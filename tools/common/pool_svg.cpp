// SPDX-License-Identifier: Apache-2.0
#include "tools/common/pool_svg.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <iterator>
#include <utility>

#include "tools/common/escape.hpp"

namespace tools {
namespace {

constexpr int cell_size = 14;
constexpr int margin = 16;

constexpr std::array sequence_colours = {"#5fafff", "#ffaf5f", "#87d787", "#ff87af", "#d7afd7", "#afafff", "#5fd7d7",
                                         "#ffd75f", "#af87af", "#87afaf", "#d78787", "#afd7ff", "#87d7af", "#d7d7af"};

const char* colour_of(const cell& one) {
  switch (one.state) {
    case cell_state::free:
      return "#f2f2f2";
    case cell_state::cached:
      return "#c4c4c4";
    case cell_state::used:
      return sequence_colours[static_cast<unsigned char>(one.mark) % sequence_colours.size()];
    case cell_state::shared:
      return "#202020";
    case cell_state::fenced:
      return "#c0392b";
  }
  return "";
}

const char* ink_of(const cell& one) { return one.state == cell_state::shared ? "#ffffff" : "#202020"; }

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

  void begin(int height_below_legend) {
    const int height = legend_top_ + height_below_legend + margin;
    write(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" width=\"{}\" height=\"{}\" "
        "font-family=\"monospace\" font-size=\"12\">\n<rect width=\"{}\" height=\"{}\" fill=\"#ffffff\"/>\n",
        width_, height, width_, height, width_, height);
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

  void rect(std::pair<int, int> at, const char* colour) {
    write("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"", at.first, at.second, cell_size - 1,
          cell_size - 1, colour);
  }

  void draw_cell(std::pair<int, int> at, const cell& one) {
    rect(at, colour_of(one));
    write("/>");
    if (one.state == cell_state::used || one.state == cell_state::shared) {
      write("<text x=\"{:.1f}\" y=\"{}\" font-size=\"10\" text-anchor=\"middle\" fill=\"{}\">{}</text>",
            at.first + (cell_size - 1) / 2.0, at.second + 10, ink_of(one), one.mark);
    }
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

  [[nodiscard]] int legend_top() const noexcept { return legend_top_; }

 private:
  std::int32_t columns_;
  int device_top_ = 0;
  int host_top_ = 0;
  int legend_top_ = 0;
  int width_ = 0;
  std::string out_;
};

/// One cell over all frames: a rectangle whose colour is exchanged where it changes.
void animate_cell(sheet& out, std::pair<int, int> at, std::size_t num_frames, double seconds,
                  const std::function<const cell&(std::size_t)>& cell_in) {
  std::string values, times;
  const char* before = nullptr;
  for (std::size_t i = 0; i < num_frames; ++i) {
    const char* colour = colour_of(cell_in(i));
    if (before != nullptr && std::string_view(colour) == before) continue;
    if (before != nullptr) {
      values += ';';
      times += ';';
    }
    values += colour;
    times += fmt::format("{:.4g}", static_cast<double>(i) / static_cast<double>(num_frames));
    before = colour;
  }
  out.rect(at, colour_of(cell_in(num_frames - 1)));  // seen where nothing moves
  if (values.find(';') == values.npos) {
    out.write("/>\n");
  } else {
    out.write(
        "><animate attributeName=\"fill\" calcMode=\"discrete\" dur=\"{:.3f}s\" repeatCount=\"indefinite\" "
        "values=\"{}\" keyTimes=\"{}\"/></rect>\n",
        seconds, values, times);
  }
}

}  // namespace

std::string draw_pool_svg(const pool_frame& what, std::int32_t columns) {
  sheet out(what, columns);
  out.begin(60 + 16 * static_cast<int>(what.news.size()));
  out.text(margin, margin + 8, headline(what));
  out.captions(what);
  for (std::size_t i = 0; i < what.device.size(); ++i) out.draw_cell(out.place(i, false), what.device[i]);
  for (std::size_t i = 0; i < what.host.size(); ++i) out.draw_cell(out.place(i, true), what.host[i]);
  out.legend(&what);
  out.text(margin, out.legend_top() + 36,
           fmt::format("prefix hits {} of {} blocks, evictions {}, preemptions {}, swapped out {}, in {}, copies {}",
                       what.hits, what.lookups, what.evictions, what.preemptions, what.swapped_out_blocks,
                       what.swapped_in_blocks, what.copies));
  int y = out.legend_top() + 60;
  for (const std::string& one : what.news) {
    out.text(margin, y, one);
    y += 16;
  }
  return out.finish();
}

std::string draw_animated_pool_svg(std::span<const pool_frame> frames, std::int32_t columns, double frames_per_second) {
  const pool_frame& first = frames.front();
  const auto count = static_cast<double>(frames.size());
  const double seconds = count / frames_per_second;
  sheet out(first, columns);
  out.begin(20);
  out.captions(first);
  for (std::size_t i = 0; i < first.device.size(); ++i) {
    animate_cell(out, out.place(i, false), frames.size(), seconds,
                 [&](std::size_t k) -> const cell& { return frames[k].device[i]; });
  }
  for (std::size_t i = 0; i < first.host.size(); ++i) {
    animate_cell(out, out.place(i, true), frames.size(), seconds,
                 [&](std::size_t k) -> const cell& { return frames[k].host[i]; });
  }
  out.legend(nullptr);
  for (std::size_t k = 0; k < frames.size(); ++k) {
    out.write("<text x=\"{}\" y=\"{}\" visibility=\"{}\">{}", margin, margin + 8,
              k + 1 == frames.size() ? "visible" : "hidden", headline(frames[k]));
    if (frames.size() > 1) {
      const double begin = static_cast<double>(k) / count, end = static_cast<double>(k + 1) / count;
      const bool is_first = k == 0, is_last = k + 1 == frames.size();
      out.write(
          "<animate attributeName=\"visibility\" calcMode=\"discrete\" dur=\"{:.3f}s\" repeatCount=\"indefinite\" "
          "values=\"{}visible{}\" keyTimes=\"{}{:.4g}{}\"/>",
          seconds, is_first ? "" : "hidden;", is_last ? "" : ";hidden", is_first ? "" : "0;", begin,
          is_last ? std::string() : fmt::format(";{:.4g}", end));
    }
    out.write("</text>\n");
  }
  return out.finish();
}

}  // namespace tools

// SPDX-License-Identifier: Apache-2.0
#include "tools/common/pool_drawing.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "tools/common/escape.hpp"

namespace tools {
namespace {

// Of the 256 colours of terminals: backgrounds on which black letters can be read, neighbours far apart.
constexpr std::array<int, 14> sequence_colours = {75, 215, 114, 211, 180, 147, 80, 221, 139, 109, 174, 150, 117, 187};

int background(const cell& one) {
  switch (one.state) {
    case cell_state::free:
      return 235;
    case cell_state::cached:
      return 240;
    case cell_state::used:
      return sequence_colours[static_cast<unsigned char>(one.mark) % sequence_colours.size()];
    case cell_state::shared:
      return 231;
    case cell_state::fenced:
      return 52;
  }
  return 0;
}

int foreground(const cell& one) {
  switch (one.state) {
    case cell_state::free:
      return 240;
    case cell_state::cached:
      return 250;
    case cell_state::fenced:
      return 217;
    case cell_state::used:
    case cell_state::shared:
      return 16;
  }
  return 0;
}

class text {
 public:
  explicit text(const pool_text_style& style) : style_(style) {}

  template <class... Parts>
  void line(fmt::format_string<Parts...> format, Parts&&... parts) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Parts>(parts)...);
    end_line();
  }
  void put(const std::string& what) { out_ += what; }
  void put(const cell& one) {
    if (style_.colours) {
      fmt::format_to(std::back_inserter(out_), "\x1b[48;5;{};38;5;{}m{}\x1b[0m", background(one), foreground(one),
                     one.mark);
    } else {
      out_ += one.mark;
    }
  }
  void end_line() { out_ += style_.colours ? "\x1b[K\n" : "\n"; }

  void grid(const std::vector<cell>& cells) {
    const auto columns = static_cast<std::size_t>(style_.columns);
    for (std::size_t row = 0; row < cells.size(); row += columns) {
      put(fmt::format("{:6} ", row));
      for (std::size_t i = row; i < std::min(row + columns, cells.size()); ++i) put(cells[i]);
      end_line();
    }
  }

  std::string out_;

 private:
  const pool_text_style& style_;
};

}  // namespace

std::string draw_pool(const pool_frame& what, const pool_text_style& style) {
  text out(style);
  out.line("step {}: {} tokens, {} running, {} waiting, {} on the host", what.step, what.num_tokens,
           what.running.size(), what.num_waiting, what.swapped.size());
  out.end_line();
  out.line("device, {} blocks of {} tokens", what.device.size(), what.block_size);
  out.grid(what.device);
  if (!what.host.empty()) {
    out.line("host, {} blocks", what.host.size());
    out.grid(what.host);
  }
  for (std::size_t i = 0; i < what.others.size(); ++i) {
    const group_frame& group = what.others[i];
    out.line("group {} ({}), {} blocks of {} tokens, {} hits, {} evictions", i + 1, group.kind, group.device.size(),
             group.block_size, group.hits, group.evictions);
    out.grid(group.device);
    if (group.host.empty()) continue;
    out.line("group {} on the host, {} blocks", i + 1, group.host.size());
    out.grid(group.host);
  }
  out.end_line();
  const auto legend = [&](cell_state state, char mark) {
    out.put("       ");
    out.put(cell{state, mark});
    out.put(fmt::format(" {}: {}", name_of(state), what.count(state)));
  };
  legend(cell_state::free, '.');
  legend(cell_state::cached, ':');
  legend(cell_state::used, 'A');
  out.end_line();
  legend(cell_state::shared, '2');
  legend(cell_state::fenced, '~');
  out.end_line();
  const double rate =
      what.lookups > 0 ? 100.0 * static_cast<double>(what.hits) / static_cast<double>(what.lookups) : 0.0;
  out.line("       prefix hits {} of {} blocks ({:.0f} %), evictions {}, preemptions {}", what.hits, what.lookups, rate,
           what.evictions, what.preemptions);
  out.line("       blocks swapped out {}, in {}; copied on write {}", what.swapped_out_blocks, what.swapped_in_blocks,
           what.copies);
  out.end_line();
  for (const std::string& one : what.news) out.line("{}", printable_line(one));  // a log may be anybody's
  return std::move(out.out_);
}

}  // namespace tools

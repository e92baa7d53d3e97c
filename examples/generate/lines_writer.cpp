// SPDX-License-Identifier: Apache-2.0
#include "lines_writer.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <numeric>

#include "tools/common/escape.hpp"
#include "tools/common/pool_drawing.hpp"
#include "tools/common/program.hpp"
#include "tools/common/utf8.hpp"

namespace generate {
namespace {

using clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds between_pictures{80};
constexpr std::size_t widest = 100, mark_width = 4;

struct screen_size {
  std::size_t columns = widest;
  std::size_t rows = 50;
};

screen_size size_of_stdout() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0 || size.ws_row == 0) return {};
  return {std::clamp<std::size_t>(size.ws_col, 20, widest), size.ws_row};
}

/// The last bytes of `text` that start a character, at most `width` of them, on one line.
std::string tail(const std::string& text, std::size_t width) {
  std::string line;
  for (const char c : text) line += c == '\n' ? ' ' : c;
  std::size_t first = line.size() > width ? line.size() - width : 0;
  while (first < line.size() && tools::character_length(std::string_view(line).substr(first)) == 0) ++first;
  return tools::printable_line(line.substr(first, tools::complete_utf8(std::string_view(line).substr(first))));
}

class lines_writer final : public sequence_writer {
 public:
  explicit lines_writer(const lines_style& style) : style_(style) {}
  ~lines_writer() override {
    if (is_drawn_) (void)std::fputs("\x1b[?25h", stdout);
  }

  void frame(const std::vector<sequence_record>& records, const tools::pool_frame& pool,
             const std::string& letters) override {
    const bool is_last = std::ranges::all_of(records, &sequence_record::ended);
    const auto in_use = static_cast<std::int64_t>(pool.device.size()) - pool.count(tools::cell_state::free) -
                        pool.count(tools::cell_state::cached);
    if (!style_.live) {
      if (in_use >= most_in_use_) fullest_ = pool, most_in_use_ = in_use;
      if (is_last && !is_finished_) draw(records, fullest_, letters);
      is_finished_ = is_last;
      return;
    }
    if (!is_last && clock::now() < next_) return;
    next_ = clock::now() + between_pictures;
    draw(records, pool, letters);
  }

 private:
  void draw(const std::vector<sequence_record>& records, const tools::pool_frame& pool, const std::string& letters) {
    const screen_size size = style_.live ? size_of_stdout() : screen_size{};
    std::string picture;
    if (style_.map) {
      const auto columns = static_cast<std::int32_t>(std::min<std::size_t>(size.columns - 8, 64));
      picture = tools::draw_pool(pool, {columns, style_.live});
    }
    std::vector<std::size_t> shown(records.size());
    std::iota(shown.begin(), shown.end(), std::size_t{0});
    const auto used = static_cast<std::size_t>(std::ranges::count(picture, '\n')) + 2;
    const std::size_t room = size.rows > used ? size.rows - used : 1;
    if (style_.live && shown.size() > room) {  // those that run come first
      std::stable_partition(shown.begin(), shown.end(), [&](std::size_t i) { return letters[i] != ' '; });
      shown.resize(room);
    }
    std::string lines;
    for (const std::size_t i : shown) lines += line_of(records[i], letters[i], size.columns);
    if (style_.live) {
      tools::write_stdout((is_drawn_ ? "\x1b[H" : "\x1b[?25l\x1b[2J\x1b[H") + picture + lines + "\x1b[J");
      is_drawn_ = true;
    } else {
      tools::write_stdout(picture + lines);
    }
  }

  [[nodiscard]] std::string line_of(const sequence_record& record, char letter, std::size_t columns) const {
    const char mark = letter != ' ' ? letter : record.ended ? '=' : '-';
    const std::string clear = style_.live ? "\x1b[K" : "";
    const bool is_cut = record.ended && record.ended_by == ending::steps;
    const std::string text =
        record.output_ids.empty() ? "waits" : tail(record.text + (is_cut ? " ..." : ""), columns - mark_width);
    return fmt::format(" {}  {}{}\n", mark, text, clear);
  }

  lines_style style_;
  tools::pool_frame fullest_;
  std::int64_t most_in_use_ = -1;
  clock::time_point next_{};
  bool is_drawn_ = false;
  bool is_finished_ = false;
};

}  // namespace

std::unique_ptr<sequence_writer> make_lines_writer(const lines_style& style) {
  return std::make_unique<lines_writer>(style);
}

}  // namespace generate

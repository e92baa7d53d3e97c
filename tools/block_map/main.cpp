// SPDX-License-Identifier: Apache-2.0
// The block pool, live. tools/common/program.hpp has the exit codes.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <memory>
#include <optional>
#include <vector>

#include "keyboard.hpp"
#include "options.hpp"
#include "source.hpp"
#include "tools/common/pool_drawing.hpp"
#include "tools/common/pool_svg.hpp"
#include "tools/common/program.hpp"

namespace block_map {
namespace {

using tools::draw_animated_pool_svg;
using tools::draw_pool;
using tools::draw_pool_svg;
using tools::write_stdout;

volatile std::sig_atomic_t interrupted = 0;

/// Hides the cursor while it lives.
class live_screen {
 public:
  live_screen() { write_stdout("\x1b[?25l\x1b[2J"); }
  live_screen(const live_screen&) = delete;
  live_screen& operator=(const live_screen&) = delete;
  ~live_screen() { (void)std::fputs("\x1b[?25h", stdout); }
  /// Over the frame before; what it had more is wiped.
  void show(const std::string& text) { write_stdout("\x1b[H" + text + "\x1b[J"); }
};

using clock = std::chrono::steady_clock;
using answer = frame_source::answer;

/// Space stops and goes on, any other key shows one frame more while it is stopped, q ends.
void run_live(frame_source& what, const options& chosen) {
  live_screen screen;
  const keyboard keys;
  bool is_paused = false;
  std::int64_t num_seen = 0;
  auto next = clock::now();
  const auto interval = std::chrono::duration_cast<clock::duration>(
      std::chrono::duration<double>(chosen.frames_per_second > 0 ? 1 / chosen.frames_per_second : 0));
  while (interrupted == 0 && (chosen.num_steps == 0 || num_seen < chosen.num_steps)) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(next - clock::now());
    const std::optional<char> key = keys.hit(std::max(left, std::chrono::milliseconds(is_paused ? 100 : 0)));
    if (key == 'q') return;
    if (key == ' ') {
      is_paused = !is_paused;
      continue;
    }
    if (is_paused ? !key : clock::now() < next) continue;
    const answer got = what.next();
    if (got == answer::end) return;
    if (got == answer::later) {
      next = clock::now() + std::chrono::milliseconds(50);
      continue;
    }
    ++num_seen;
    if (num_seen < chosen.from || num_seen % chosen.every != 0) continue;
    screen.show(draw_pool(what.now(), {chosen.columns, true}) + "space: stop, go on; another key: one step; q: end\n");
    next = std::max(next + interval, clock::now() - interval);
  }
}

/// Whether there was a frame; a log that may still grow has none here.
bool advance(frame_source& what, std::int64_t& num_seen) {
  if (what.next() != answer::frame) return false;
  ++num_seen;
  return true;
}

void run_plain(frame_source& what, const options& chosen) {
  const bool prints_all = chosen.all_frames && chosen.svg_path.empty();
  std::vector<tools::pool_frame> frames;
  std::int64_t num_seen = 0;
  while (interrupted == 0 && (chosen.num_steps == 0 || num_seen < chosen.num_steps) && advance(what, num_seen)) {
    if (num_seen < chosen.from || num_seen % chosen.every != 0 || num_seen == chosen.num_steps) continue;
    if (prints_all) write_stdout(draw_pool(what.now(), {chosen.columns, false}) + "\n");
    if (chosen.animated) frames.push_back(what.now());
  }
  if (num_seen == 0) throw tools::input_error("there is no frame in the log");
  frames.push_back(what.now());
  if (chosen.svg_path.empty()) return write_stdout(draw_pool(frames.back(), {chosen.columns, false}));
  const double speed = chosen.frames_per_second > 0 ? chosen.frames_per_second : 10;
  std::ofstream file(chosen.svg_path, std::ios::binary);
  file << (chosen.animated ? draw_animated_pool_svg(frames, chosen.columns, speed)
                           : draw_pool_svg(frames.back(), chosen.columns))
       << std::flush;
  if (!file) {
    throw tools::input_error(fmt::format("{}: the file cannot be written", chosen.svg_path));
  }
}

}  // namespace
}  // namespace block_map

int main(int argc, char** argv) {
  return tools::run_main("block_map", "out of memory; fewer --blocks need less", [&] {
    int exit_code = 0;
    const auto chosen = block_map::parse_options(argc, argv, exit_code);
    if (!chosen) return exit_code;
    (void)std::signal(SIGINT, [](int) { block_map::interrupted = 1; });
    (void)std::signal(SIGTERM, [](int) { block_map::interrupted = 1; });
    std::unique_ptr<block_map::frame_source> what;
    if (chosen->log_path.empty()) {
      what = std::make_unique<block_map::traffic_source>(chosen->serving, chosen->check);
    } else {
      what = std::make_unique<block_map::log_source>(chosen->log_path);
    }
    if (chosen->live) {
      block_map::run_live(*what, *chosen);
    } else {
      block_map::run_plain(*what, *chosen);
    }
    return 0;
  });
}

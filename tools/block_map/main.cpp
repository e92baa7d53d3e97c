// SPDX-License-Identifier: Apache-2.0
// The block pool, live. tools/common/program.hpp has the exit codes.
#include <fmt/format.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <thread>
#include <vector>

#include "options.hpp"
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

void step(serving& what, const options& chosen) {
  what.step();
  if (!chosen.check) return;
  const std::string broken = what.check();
  if (!broken.empty()) throw std::logic_error(broken);
}

void run_live(serving& what, const options& chosen) {
  live_screen screen;
  auto next = std::chrono::steady_clock::now();
  for (std::int64_t i = 1; interrupted == 0 && (chosen.num_steps == 0 || i <= chosen.num_steps); ++i) {
    step(what, chosen);
    if (i < chosen.from || i % chosen.every != 0) continue;
    screen.show(draw_pool(what.snapshot(), {chosen.columns, true}));
    if (chosen.frames_per_second > 0) {
      next += std::chrono::duration_cast<std::chrono::steady_clock::duration>(
          std::chrono::duration<double>(1 / chosen.frames_per_second));
      std::this_thread::sleep_until(next);
    }
  }
}

void run_plain(serving& what, const options& chosen) {
  const bool prints_all = chosen.all_frames && chosen.svg_path.empty();
  std::vector<tools::pool_frame> frames;
  for (std::int64_t i = 1; i <= chosen.num_steps && interrupted == 0; ++i) {
    step(what, chosen);
    if (i < chosen.from || i % chosen.every != 0 || i == chosen.num_steps) continue;
    if (prints_all) write_stdout(draw_pool(what.snapshot(), {chosen.columns, false}) + "\n");
    if (chosen.animated) frames.push_back(what.snapshot());
  }
  frames.push_back(what.snapshot());
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
    block_map::serving what(chosen->serving);
    if (chosen->live) {
      block_map::run_live(what, *chosen);
    } else {
      block_map::run_plain(what, *chosen);
    }
    return 0;
  });
}

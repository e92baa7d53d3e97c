// SPDX-License-Identifier: Apache-2.0
#include "source.hpp"

#include <fmt/format.h>

#include <chrono>
#include <stdexcept>
#include <thread>

#include "tools/common/escape.hpp"
#include "tools/common/program.hpp"

namespace block_map {
namespace {

// The program that writes the log may have been started a moment ago, and loads its model first.
constexpr std::chrono::seconds patience{3};

}  // namespace

frame_source::answer traffic_source::next() {
  serving_.step();
  if (!check_) return answer::frame;
  const std::string broken = serving_.check();
  if (!broken.empty()) throw std::logic_error(broken);
  return answer::frame;
}

log_source::log_source(const std::string& path) : reader_(path) {
  const auto limit = std::chrono::steady_clock::now() + patience;
  while (true) {
    file_ = std::ifstream(path, std::ios::binary);
    if (file_ && file_.peek() != std::ifstream::traits_type::eof()) return;
    if (std::chrono::steady_clock::now() > limit) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  throw tools::input_error(fmt::format("{}: there is no log that can be read", tools::printable_line(path)));
}

frame_source::answer log_source::next() {
  while (true) {
    std::string line;
    std::getline(file_, line);
    if (file_.eof()) {
      part_ += line;
      file_.clear();
      return answer::later;
    }
    line.insert(0, part_);
    part_.clear();
    if (reader_.take(line)) return answer::frame;
  }
}

}  // namespace block_map

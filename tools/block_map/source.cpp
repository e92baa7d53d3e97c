// SPDX-License-Identifier: Apache-2.0
#include "source.hpp"

#include <fmt/format.h>

#include <stdexcept>

#include "tools/common/escape.hpp"
#include "tools/common/program.hpp"

namespace block_map {

frame_source::answer traffic_source::next() {
  serving_.step();
  if (!check_) return answer::frame;
  const std::string broken = serving_.check();
  if (!broken.empty()) throw std::logic_error(broken);
  return answer::frame;
}

log_source::log_source(const std::string& path) : file_(path, std::ios::binary), reader_(path) {
  if (!file_ || file_.peek() == std::ifstream::traits_type::eof()) {
    throw tools::input_error(fmt::format("{}: there is no log that can be read", tools::printable_line(path)));
  }
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

// SPDX-License-Identifier: Apache-2.0
#include "frame.hpp"

#include <algorithm>

namespace block_map {

std::int64_t frame::count(cell_state state) const noexcept {
  return std::count_if(device.begin(), device.end(), [&](const cell& one) { return one.state == state; });
}

const char* name_of(cell_state state) noexcept {
  switch (state) {
    case cell_state::free:
      return "free";
    case cell_state::cached:
      return "cached, idle";
    case cell_state::used:
      return "one sequence";
    case cell_state::shared:
      return "shared by so many";
    case cell_state::fenced:
      return "waits for a step in flight";
  }
  return "";
}

}  // namespace block_map

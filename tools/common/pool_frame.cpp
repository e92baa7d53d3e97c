// SPDX-License-Identifier: Apache-2.0
#include "tools/common/pool_frame.hpp"

#include <algorithm>

namespace tools {

std::int64_t pool_frame::count(cell_state state) const noexcept {
  return std::count_if(device.begin(), device.end(), [&](const cell& one) { return one.state == state; });
}

std::optional<cell> cell_of(char mark) noexcept {
  if (mark == '.') return cell{cell_state::free, mark};
  if (mark == ':') return cell{cell_state::cached, mark};
  if (mark == '~') return cell{cell_state::fenced, mark};
  if (mark == '+' || (mark >= '1' && mark <= '9')) return cell{cell_state::shared, mark};
  const bool is_letter = (mark >= 'A' && mark <= 'Z') || (mark >= 'a' && mark <= 'z');
  return is_letter || mark == '#' ? std::optional(cell{cell_state::used, mark}) : std::nullopt;
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

}  // namespace tools

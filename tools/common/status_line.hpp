// SPDX-License-Identifier: Apache-2.0
#pragma once

/// How far the work is: a line on stderr that overwrites itself, ten times a second at most, where that is wanted.

#include <chrono>
#include <string_view>

namespace tools {

/// Whether stderr is a terminal, where such a line is welcome.
[[nodiscard]] bool stderr_is_terminal() noexcept;

class status_line {
 public:
  explicit status_line(bool enabled) : enabled_(enabled) {}
  ~status_line() { wipe(); }
  status_line(const status_line&) = delete;
  status_line& operator=(const status_line&) = delete;

  /// Whether the next text would be shown; ask before making a text that costs something.
  [[nodiscard]] bool due() const noexcept { return enabled_ && clock::now() >= next_; }
  /// One line without line feed, if it is due.
  void show(std::string_view text) noexcept;
  /// Clears the line for what is printed next.
  void wipe() noexcept;

 private:
  using clock = std::chrono::steady_clock;

  bool enabled_;
  bool is_shown_ = false;
  clock::time_point next_{};
};

}  // namespace tools

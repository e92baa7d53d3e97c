// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Single keys from a terminal, without waiting for them and without showing them; the terminal is as before
/// afterwards.

#include <poll.h>
#include <termios.h>
#include <unistd.h>

#include <chrono>
#include <optional>

namespace block_map {

class keyboard {
 public:
  keyboard() {
    if (::tcgetattr(STDIN_FILENO, &before_) != 0) return;  // no terminal: no keys
    termios raw = before_;
    raw.c_lflag &= static_cast<tcflag_t>(~(ICANON | ECHO));
    is_raw_ = ::tcsetattr(STDIN_FILENO, TCSANOW, &raw) == 0;
  }
  keyboard(const keyboard&) = delete;
  keyboard& operator=(const keyboard&) = delete;
  ~keyboard() {
    if (is_raw_) (void)::tcsetattr(STDIN_FILENO, TCSANOW, &before_);
  }

  /// A key that was hit, or hit within `patience`.
  [[nodiscard]] std::optional<char> hit(std::chrono::milliseconds patience) const {
    pollfd input{is_raw_ ? STDIN_FILENO : -1, POLLIN, 0};
    char key = 0;
    if (::poll(&input, 1, static_cast<int>(patience.count())) <= 0 || ::read(STDIN_FILENO, &key, 1) != 1) return {};
    return key;
  }

 private:
  termios before_{};
  bool is_raw_ = false;
};

}  // namespace block_map

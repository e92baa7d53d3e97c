// SPDX-License-Identifier: Apache-2.0
#include "tools/common/status_line.hpp"

#include <unistd.h>

#include "tools/common/program.hpp"

namespace tools {

bool stderr_is_terminal() noexcept { return ::isatty(STDERR_FILENO) != 0; }

void status_line::show(std::string_view text) noexcept {
  if (!due()) return;
  next_ = clock::now() + std::chrono::milliseconds(100);
  is_shown_ = true;
  write_stderr("\r\x1b[K");
  write_stderr(text);
}

void status_line::wipe() noexcept {
  if (is_shown_) write_stderr("\r\x1b[K");
  is_shown_ = false;
}

}  // namespace tools

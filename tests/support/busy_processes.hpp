// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Processes that do nothing but use a processor: the company of a program on a busy machine. They end with this
/// object, and with the process that made them.

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

namespace bifolio::test {

class busy_processes {
 public:
  /// As many as the system makes. To be made before the program has threads whose locks a child would need: a child
  /// does nothing but count.
  explicit busy_processes(std::int32_t count) {
    children_.reserve(static_cast<std::size_t>(count));
    for (std::int32_t i = 0; i < count; ++i) {
      const pid_t child = ::fork();
      if (child == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        volatile std::uint32_t turns = 0;
        for (;;) turns = turns + 1;
      }
      if (child > 0) children_.push_back(child);
    }
  }
  ~busy_processes() {
    for (const pid_t child : children_) ::kill(child, SIGKILL);
    for (const pid_t child : children_) ::waitpid(child, nullptr, 0);
  }
  busy_processes(const busy_processes&) = delete;
  busy_processes& operator=(const busy_processes&) = delete;
  [[nodiscard]] std::int32_t size() const noexcept { return static_cast<std::int32_t>(children_.size()); }

 private:
  std::vector<pid_t> children_;
};

}  // namespace bifolio::test

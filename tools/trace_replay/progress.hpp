// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

namespace trace_replay {

/// One line on stderr that says how far the work is; written over itself, ten times a second at most, and wiped when it
/// ends.
class progress_bar {
 public:
  explicit progress_bar(bool enabled) : enabled_(enabled) {}
  progress_bar(const progress_bar&) = delete;
  progress_bar& operator=(const progress_bar&) = delete;
  ~progress_bar() { wipe(); }

  /// Cheap when nothing is due; `note` follows the bar.
  void show(std::int64_t done, std::int64_t total, std::string_view note = {});
  /// Whether `show` would write now, so that a note need not be made in vain.
  [[nodiscard]] bool due() noexcept;
  void wipe();

 private:
  using clock = std::chrono::steady_clock;
  bool enabled_;
  bool written_ = false;
  clock::time_point next_{};
};

}  // namespace trace_replay

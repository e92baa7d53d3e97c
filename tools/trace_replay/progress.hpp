// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>

#include "tools/common/status_line.hpp"

namespace trace_replay {

/// A bar that says how far the replay is; wiped when it ends.
class progress_bar {
 public:
  explicit progress_bar(bool enabled) : line_(enabled) {}

  /// Cheap when nothing is due; `note` follows the bar.
  void show(std::int64_t done, std::int64_t total, std::string_view note = {});
  /// Whether `show` would write now, so that a note need not be made in vain.
  [[nodiscard]] bool due() const noexcept { return line_.due(); }
  void wipe() noexcept { line_.wipe(); }

 private:
  tools::status_line line_;
};

}  // namespace trace_replay

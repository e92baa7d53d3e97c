// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What goes to stderr: how far the work is, and the table at the end.

#include <bifolio/kv_layout.hpp>
#include <cstdint>
#include <string>

#include "generation.hpp"
#include "tools/common/status_line.hpp"

namespace generate {

/// A line that overwrites itself where nothing else is shown on the terminal; elsewhere a line now and then, or none
/// while the text itself is streaming past.
class progress_line {
 public:
  enum class style : std::uint8_t { live, occasional, none };

  progress_line(style how, std::int64_t num_sequences, std::int64_t num_blocks)
      : style_(how),
        num_sequences_(num_sequences),
        num_blocks_(num_blocks),
        next_seconds_(how == style::live ? 0 : seconds_between_lines),
        line_(how == style::live) {}
  progress_line(const progress_line&) = delete;
  progress_line& operator=(const progress_line&) = delete;

  void show(const generation_progress& now);

 private:
  static constexpr double seconds_between_lines = 5;

  style style_;
  std::int64_t num_sequences_;
  std::int64_t num_blocks_;
  double next_seconds_;
  tools::status_line line_;
};

struct report_input {
  generation_stats stats;
  std::int32_t max_positions = 0;
};

/// The table; `detailed` adds rows.
[[nodiscard]] std::string format_report(const report_input& input, bool detailed);

/// "12.3 MiB".
[[nodiscard]] std::string format_bytes(std::int64_t num_bytes);

}  // namespace generate

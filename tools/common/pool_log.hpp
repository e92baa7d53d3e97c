// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A run's frames as a text file that another program may follow while it grows: one line of JSON that names the pool,
/// then one line for each frame with the counters and the cells that changed. Cells are written as their marks.

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>

#include "tools/common/pool_frame.hpp"

namespace tools {

/// The frame as one line of JSON: {"step":…,"block_size":…,"device":"AAB2.:","host":"",…}. A character a block.
[[nodiscard]] std::string to_json(const pool_frame& what);

class pool_log_writer {
 public:
  /// Replaces the file. Throws `input_error` when it cannot be written.
  explicit pool_log_writer(const std::filesystem::path& path);
  /// One line, at once in the file. All frames have the pools of the first. Throws `std::runtime_error`.
  void add(const pool_frame& what);

 private:
  void write(const std::string& line);

  std::string name_;
  std::ofstream file_;
  std::optional<pool_frame> last_;
};

/// Takes the lines of a log in their order.
class pool_log_reader {
 public:
  /// `name` is for sentences about what is wrong.
  explicit pool_log_reader(std::string name) : name_(std::move(name)) {}

  /// Whether the line was a frame, which `now` has then; the first line is none. Throws `input_error`: not a line of
  /// such a log.
  bool take(std::string_view line);
  [[nodiscard]] const pool_frame& now() const noexcept { return now_; }

 private:
  std::string name_;
  std::int64_t line_ = 0;
  pool_frame now_;
};

}  // namespace tools

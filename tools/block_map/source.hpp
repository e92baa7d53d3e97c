// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Where frames come from: made-up traffic, or the log of a real run.

#include <fstream>
#include <string>

#include "serving.hpp"
#include "tools/common/pool_log.hpp"

namespace block_map {

class frame_source {
 public:
  virtual ~frame_source() = default;
  enum class answer : std::uint8_t {
    frame,
    later,  ///< a log that may still grow
    end,
  };
  /// On to the next frame, if there is one.
  virtual answer next() = 0;
  /// The frame that `next` came to.
  [[nodiscard]] virtual tools::pool_frame now() const = 0;
};

class traffic_source final : public frame_source {
 public:
  /// `check`: all invariants after every step, whose failure throws std::logic_error.
  traffic_source(const serving_options& options, bool check) : serving_(options), check_(check) {}
  answer next() override;
  [[nodiscard]] tools::pool_frame now() const override { return serving_.snapshot(); }

 private:
  serving serving_;
  bool check_;
};

class log_source final : public frame_source {
 public:
  /// Throws `tools::input_error` when the file cannot be read.
  explicit log_source(const std::string& path);
  /// At the end of the file: later. Throws `tools::input_error` for what is no log.
  answer next() override;
  [[nodiscard]] tools::pool_frame now() const override { return reader_.now(); }

 private:
  std::ifstream file_;
  std::string part_;  // of a line that is not complete yet
  tools::pool_log_reader reader_;
};

}  // namespace block_map

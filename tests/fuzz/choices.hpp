// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A fuzz input as a list of choices: numbers are taken from its front, bytes that are left over are contents. What a
/// target builds from them is well formed by construction, so that mutations reach the code after the first checks.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace bifolio::fuzz {

class choices {
 public:
  explicit choices(std::span<const std::uint8_t> input) noexcept : left_(input) {}

  /// 0 when nothing is left.
  [[nodiscard]] std::uint8_t byte() noexcept {
    if (left_.empty()) return 0;
    const std::uint8_t first = left_.front();
    left_ = left_.subspan(1);
    return first;
  }
  [[nodiscard]] std::uint32_t word() noexcept {
    std::uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value = value << 8 | byte();
    return value;
  }
  /// Of [0, count).
  [[nodiscard]] std::uint8_t below(std::uint8_t count) noexcept { return static_cast<std::uint8_t>(byte() % count); }
  [[nodiscard]] bool flag() noexcept { return (byte() & 1) != 0; }
  /// At most `most` of the bytes that are left.
  [[nodiscard]] std::span<const std::uint8_t> bytes(std::size_t most) noexcept {
    const auto taken = left_.first(std::min(most, left_.size()));
    left_ = left_.subspan(taken.size());
    return taken;
  }
  [[nodiscard]] std::span<const std::uint8_t> rest() const noexcept { return left_; }
  [[nodiscard]] bool empty() const noexcept { return left_.empty(); }

 private:
  std::span<const std::uint8_t> left_;
};

}  // namespace bifolio::fuzz

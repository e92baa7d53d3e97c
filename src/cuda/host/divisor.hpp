// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Division by a number that the host knows and the compiler does not: a multiplication and a shift instead of the
/// twenty instructions of an unsigned division (Granlund & Montgomery 1994, figure 4.1).

#include <bifolio/detail/host_device.hpp>
#include <cstdint>

namespace bifolio::inline v0_2::cuda {

struct divisor {
  std::uint32_t value = 1;
  std::uint32_t multiplier = 1;
  std::uint32_t shift = 0;

  constexpr divisor() noexcept = default;
  /// `number` ≥ 1.
  constexpr explicit divisor(std::int32_t number) noexcept : value(static_cast<std::uint32_t>(number)) {
    while ((std::uint64_t{1} << shift) < value) ++shift;
    multiplier = static_cast<std::uint32_t>((((std::uint64_t{1} << shift) - value) << 32) / value + 1);
  }

  /// dividend / value, for a dividend in [0, 2^31).
  [[nodiscard]] BIFOLIO_HOST_DEVICE constexpr std::int32_t quotient(std::int32_t dividend) const noexcept {
    const auto n = static_cast<std::uint32_t>(dividend);
    const auto high = static_cast<std::uint32_t>((static_cast<std::uint64_t>(n) * multiplier) >> 32);
    return static_cast<std::int32_t>((high + n) >> shift);
  }
};

}  // namespace bifolio::inline v0_2::cuda

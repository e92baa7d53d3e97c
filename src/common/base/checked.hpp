// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Sizes multiplied without wrapping: every product of numbers that came from outside goes through here.

#include <bifolio/error.hpp>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>

#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2::detail {

template <std::integral T>
[[nodiscard]] constexpr std::optional<T> checked_mul(T a, T b) noexcept {
  T result{};
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}

/// The product of all factors; throws invalid_argument naming `what`, the factors and `limit` when it exceeds that.
/// Factors are ≥ 0.
template <class... Factors>
[[nodiscard]] std::int64_t bounded_product(const char* what, std::int64_t limit, Factors... factors) {
  std::int64_t product = 1;
  bool fits = true;
  ((fits = fits && !__builtin_mul_overflow(product, static_cast<std::int64_t>(factors), &product)), ...);
  if (!fits || product > limit) {
    const auto formula = [&](std::string& sentence) {
      const char* separator = " is ";
      ((append_part(sentence, separator), append_part(sentence, factors), separator = " * "), ...);
    };
    refuse(errc::invalid_argument, what, formula, "; the largest allowed value is ", limit);
  }
  return product;
}

}  // namespace bifolio::inline v0_2::detail

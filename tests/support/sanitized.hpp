// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Under AddressSanitizer a test takes ten times as long, and what it can find there, an access outside its memory,
/// depends on shapes and placements more than on the numbers. Long tables take a part of their cases there; the results
/// are compared with all cases in the release build.

#include <cstddef>
#include <utility>
#include <vector>

namespace bifolio::test {

#ifdef __SANITIZE_ADDRESS__
inline constexpr bool addresses_are_sanitized = true;
#else
inline constexpr bool addresses_are_sanitized = false;
#endif

/// `stride` where addresses are sanitized, otherwise 1.
[[nodiscard]] constexpr std::size_t sanitized_stride(std::size_t stride) noexcept {
  return addresses_are_sanitized ? stride : 1;
}

/// Every stride-th case where addresses are sanitized, otherwise all.
template <class Case>
[[nodiscard]] std::vector<Case> fewer_if_sanitized(std::vector<Case> cases, std::size_t stride) {
  if (!addresses_are_sanitized) return cases;
  std::vector<Case> some;
  for (std::size_t n = 0; n < cases.size(); n += stride) some.push_back(std::move(cases[n]));
  return some;
}

}  // namespace bifolio::test

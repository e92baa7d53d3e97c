// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Calls that move stored numbers, against the element-by-element model on host bytes: all bytes equal, those that
/// nobody asked to change included.

#include <cstdint>
#include <string>

#include "report.hpp"
#include "support/backends.hpp"

namespace selftest {

/// Case `n` of an operation; what is in it depends on (seed, operation, n) alone. Returns what was not as it should be,
/// with the case in words; empty when all bytes are equal.
[[nodiscard]] std::string check_cache_case(operation what, const bifolio::test::tested_backend& tested,
                                           std::uint64_t seed, std::size_t n);

}  // namespace selftest

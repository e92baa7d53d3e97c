// SPDX-License-Identifier: Apache-2.0
#pragma once

/// `merge_states` against the float64 oracle.

#include <cstdint>

#include "report.hpp"
#include "targets.hpp"

namespace selftest {

/// Runs case `n` of this seed on `where` and adds what came of it to `said`, as kernel "merge_states".
void check_merge_case(const target& where, std::uint64_t seed, std::size_t n, report& said);

}  // namespace selftest

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Runs cases on targets until the time is up.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "report.hpp"
#include "targets.hpp"

namespace selftest {

/// One case: "append:7" or "attention:12".
struct case_name {
  std::string kind;  ///< "attention", "merge", or the name of an operation
  std::size_t number = 0;
};

/// Throws `bifolio::error` (invalid_argument) with what is allowed.
[[nodiscard]] case_name parse_case(std::string_view text);

struct run_settings {
  std::uint64_t seed = 1;
  double seconds = 60;
  std::optional<case_name> only;
  /// Called often, with how far the work is (0 to 1) and what is being done.
  std::function<void(double share, std::string_view note)> progress = [](double, std::string_view) {};
};

/// Adds what the targets do to `said`. Every kind of cases gets a share of the time, and at least its first few cases,
/// however long they take; a case is run on all targets.
void run_checks(const run_settings& settings, const std::vector<target>& targets, report& said);

}  // namespace selftest

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// From results to the report: which values are said, under which names.

#include "cache_only.hpp"
#include "options.hpp"
#include "report.hpp"
#include "simulation.hpp"

namespace trace_replay {

[[nodiscard]] report summarize(const options& chosen, const cache_only_result& result);
[[nodiscard]] report summarize(const options& chosen, const simulation_result& result);

}  // namespace trace_replay

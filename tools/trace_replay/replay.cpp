// SPDX-License-Identifier: Apache-2.0
#include "replay.hpp"

#include <fmt/format.h>

#include <bifolio/error.hpp>

#include "cache_only.hpp"
#include "input_error.hpp"
#include "progress.hpp"
#include "simulation.hpp"
#include "summary.hpp"
#include "trace.hpp"

namespace trace_replay {
namespace {

cache_only_options cache_options(const options& chosen) {
  return {.num_blocks = chosen.simulation.num_blocks,
          .policy = chosen.simulation.policy,
          .num_kept = chosen.simulation.num_kept,
          .full_blocks_only = chosen.full_blocks_only,
          .trace_block_size = chosen.simulation.trace_block_size};
}

/// A model that no manager can have is a file that cannot be used.
simulation_result simulate_model(const trace& what, const options& chosen, progress_bar& progress) {
  try {
    return simulate(what, chosen.simulation, progress);
  } catch (const bifolio::error& problem) {
    if (chosen.model_path.empty() || problem.code() != bifolio::errc::invalid_argument) throw;
    throw input_error(fmt::format("{}: {}", chosen.model_path, problem.what()));
  }
}

}  // namespace

std::vector<report> replay_all(options chosen) {
  const trace what = read_trace_file(chosen.trace_path, chosen.format_in, chosen.max_requests);
  std::vector<report> said;
  for (const policy_kind policy : chosen.policies) {
    for (const std::int64_t num_blocks : chosen.num_blocks) {
      chosen.simulation.policy = policy;
      chosen.simulation.num_blocks = num_blocks;
      progress_bar progress(chosen.progress);
      said.push_back(chosen.cache_only ? summarize(chosen, replay_cache(what, cache_options(chosen), progress))
                                       : summarize(chosen, simulate_model(what, chosen, progress)));
    }
  }
  return said;
}

}  // namespace trace_replay

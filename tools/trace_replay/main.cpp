// SPDX-License-Identifier: Apache-2.0
// Replays a serving trace through bifolio's cache logic. tools/common/program.hpp has the exit codes.
#include <fmt/format.h>

#include <fstream>
#include <sstream>

#include "cache_only.hpp"
#include "input_error.hpp"
#include "options.hpp"
#include "plot.hpp"
#include "report.hpp"
#include "simulation.hpp"
#include "summary.hpp"
#include "sweep.hpp"
#include "tools/common/program.hpp"
#include "trace.hpp"

namespace trace_replay {
namespace {

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text << std::flush;
  if (!file) throw input_error(fmt::format("{}: the file cannot be written", path));
}

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

void replay(options chosen) {
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
  const bool compares = said.size() > 1;
  if (!chosen.plot_path.empty()) write_file(chosen.plot_path, compares ? sweep_svg(said) : plot_svg(said.front()));
  if (!chosen.html_path.empty()) write_file(chosen.html_path, html_report(said));
  std::ostringstream text;
  if (compares) {
    print_sweep(text, said, chosen.format);
  } else {
    print(text, said.front(), chosen.format);
  }
  tools::write_stdout(text.str());
}

}  // namespace
}  // namespace trace_replay

int main(int argc, char** argv) {
  return tools::run_main("trace_replay", "out of memory; fewer --blocks or --requests need less", [&] {
    int exit_code = 0;
    if (const auto chosen = trace_replay::parse_options(argc, argv, exit_code)) trace_replay::replay(*chosen);
    return exit_code;
  });
}

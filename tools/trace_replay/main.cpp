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

void replay(const options& chosen) {
  const trace what = read_trace_file(chosen.trace_path, chosen.format_in, chosen.max_requests);
  progress_bar progress(chosen.progress);
  const report said = chosen.cache_only ? summarize(chosen, replay_cache(what, cache_options(chosen), progress))
                                        : summarize(chosen, simulate_model(what, chosen, progress));
  if (!chosen.plot_path.empty()) write_file(chosen.plot_path, plot_svg(said));
  std::ostringstream text;
  print(text, said, chosen.format);
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

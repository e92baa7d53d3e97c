// SPDX-License-Identifier: Apache-2.0
// Runs soak.hpp's rounds for a chosen time. tools/common/program.hpp has the exit codes.
#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <bifolio/bifolio.hpp>
#include <chrono>
#include <fstream>

#include "soak.hpp"
#include "tools/common/program.hpp"

namespace {

constexpr double most_growth_mib = 64;

double resident_mib() {
  std::ifstream file("/proc/self/statm");
  std::int64_t pages = 0;
  file >> pages >> pages;
  return static_cast<double>(pages) * static_cast<double>(::sysconf(_SC_PAGESIZE)) / (1 << 20);
}

std::string summary(const soak::counts& sum, double seconds) {
  return fmt::format(
      "{:.0f} s, {} rounds, {} steps, {} tokens: {} sequences finished, {} aborted, {} preempted, {} swapped out and "
      "{} back, {} failed swaps, {} cached tokens; checked: {} tokens in every layer, {} rows of attention; {:.0f} "
      "MiB\n",
      seconds, sum.num_rounds, sum.num_steps, sum.num_tokens, sum.num_finished, sum.num_aborted, sum.num_preemptions,
      sum.num_swap_outs, sum.num_swap_ins, sum.num_failed_swaps, sum.num_cached_tokens, sum.num_checked_tokens,
      sum.num_checked_rows, resident_mib());
}

int run(int argc, char** argv) {
  CLI::App app("Runs scheduler, prefix cache, swapping and attention on a trace and checks every block's contents.",
               "soak");
  std::string trace_path;
  std::string device = "cpu";
  double seconds = 60;
  soak::settings how;
  app.add_option("trace", trace_path, "A trace in Mooncake's or Azure's format, as for trace_replay")->required();
  app.add_option("--seconds", seconds, "Time; the round under way is brought to its end")->check(CLI::PositiveNumber);
  app.add_option("--device", device, "cpu or cuda:N");
  app.add_option("--seed", how.seed, "Of shapes, samples, aborts and failures");
  app.add_option("--steps", how.steps_per_round, "Steps of a round")->check(CLI::PositiveNumber);
  app.add_option("--num-blocks", how.num_blocks, "0: another number in each round")->check(CLI::NonNegativeNumber);
  app.footer(tools::exit_codes);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    return tools::end_of_parsing(app, problem);
  }
  const trace_replay::trace requests =
      trace_replay::read_trace_file(trace_path, trace_replay::trace_format::automatic, 0);
  const auto where = bifolio::make_backend(bifolio::parse_device(device));
  tools::write_stdout(where->description() + "\n");
  soak::counts sum;
  std::size_t next = 0;
  double first_mib = 0;
  const auto begin = std::chrono::steady_clock::now();
  const auto passed = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count(); };
  while (passed() < seconds) {
    const std::string problem = soak::run_round(*where, requests, next, how, sum);
    tools::write_stdout(summary(sum, passed()));
    if (!problem.empty()) {
      tools::complain(fmt::format("soak: round {} with --seed {}: {}\n", sum.num_rounds, how.seed, problem));
      return 1;
    }
    if (sum.num_rounds == 3) first_mib = resident_mib();
    if (sum.num_rounds > 3 && resident_mib() > first_mib + most_growth_mib) {
      tools::complain(
          fmt::format("soak: {:.0f} MiB after {} rounds, {:.0f} after 3\n", resident_mib(), sum.num_rounds, first_mib));
      return 1;
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return tools::run_main("soak", "out of memory", [&] { return run(argc, argv); });
}

// SPDX-License-Identifier: Apache-2.0
// Replays a serving trace through bifolio's cache logic. tools/common/program.hpp has the exit codes.
#include <fmt/format.h>

#include <fstream>
#include <sstream>

#include "input_error.hpp"
#include "options.hpp"
#include "plot.hpp"
#include "replay.hpp"
#include "report.hpp"
#include "sweep.hpp"
#include "tools/common/program.hpp"

namespace trace_replay {
namespace {

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text << std::flush;
  if (!file) throw input_error(fmt::format("{}: the file cannot be written", path));
}

void replay(const options& chosen) {
  const std::vector<report> said = replay_all(chosen);
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

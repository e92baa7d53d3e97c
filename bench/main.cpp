// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <sstream>
#include <string>

#include "commands.hpp"
#include "machine.hpp"
#include "report.hpp"
#include "tools/common/program.hpp"

namespace {

int measure(int argc, char** argv) {
  using namespace bifolio::bench;
  CLI::App program("Measures bifolio on this machine.", "bifolio_bench");
  program.footer(tools::exit_codes);
  std::string format = "md";
  program.add_option("--format", format, "md, csv, json or jsonl (an object a line)")->capture_default_str();
  program.require_subcommand(1);
  program.fallthrough();
  command run;
  add_attention_command(program, run);
  add_cache_ops_command(program, run);
  add_manager_command(program, run);
  add_probe_command(program, run);
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    return tools::end_of_parsing(program, problem);
  }
  const output_format output = tools::parse_output_format(format);
  report out;
  for (auto& [name, value] : machine_facts()) out.fact(name, value);
  run(out);
  std::ostringstream text;
  out.print(text, output);
  tools::write_stdout(text.str());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  return tools::run_main("bifolio_bench", "out of memory; smaller sizes need less",
                         [&] { return measure(argc, argv); });
}

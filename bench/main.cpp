// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <bifolio/error.hpp>
#include <exception>
#include <iostream>
#include <string>

#include "commands.hpp"
#include "machine.hpp"
#include "report.hpp"

int main(int argc, char** argv) {
  using namespace bifolio::bench;
  CLI::App program("Measures bifolio on this machine.", "bifolio_bench");
  std::string format = "md";
  program.add_option("--format", format, "md, csv or json")->capture_default_str();
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
    return program.exit(problem) == 0 ? 0 : 2;  // --help is an "error" with code 0
  }
  try {
    const output_format output = parse_format(format);
    report out;
    for (auto& [name, value] : machine_facts()) out.fact(name, value);
    run(out);
    out.print(std::cout, output);
    return 0;
  } catch (const bifolio::error& problem) {
    std::cerr << "bifolio_bench: " << problem.what() << '\n';
    return 2;
  } catch (const std::exception& problem) {
    std::cerr << "bifolio_bench: " << problem.what() << '\n';
    return 1;
  }
}

// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <array>
#include <bifolio/version.hpp>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "commands.hpp"
#include "machine.hpp"
#include "report.hpp"
#include "tools/common/program.hpp"
#include "tools/common/report_compare.hpp"
#include "tools/common/status_line.hpp"

namespace bifolio::bench {
namespace {

/// What is measured when nothing is named: about a minute.
constexpr std::array<const char*, 4> default_suite = {
    "manager --blocks 100000 --sequences 10000 --rounds 7", "attention --batch 1,8 --context 1024,8192 --min-time 0.1",
    "attention --query-len 512 --context 2048 --min-time 0.1", "probe --min-time 0.2"};

constexpr const char* examples =
    "Examples:\n"
    "  bifolio_bench                                        the default suite, about a minute\n"
    "  bifolio_bench --format json >old.json\n"
    "  bifolio_bench -r 5 --compare old.json                medians of five runs next to those of before\n"
    "  bifolio_bench attention --device cuda --batch 64 --context 8192\n";

void add_commands(CLI::App& program, command& run) {
  add_attention_command(program, run);
  add_cache_ops_command(program, run);
  add_manager_command(program, run);
  add_probe_command(program, run);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw tools::input_error("--compare is '" + path + "', a file is expected that can be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

/// All commands, once.
report run_all(const std::vector<command>& commands, std::int32_t number, std::int32_t num_runs) {
  report out;
  for (auto& [name, value] : machine_facts()) out.fact(name, value);
  tools::status_line progress(tools::stderr_is_terminal());
  out.watch([&](const row& added) {
    std::string line = num_runs > 1 ? "run " + std::to_string(number) + " of " + std::to_string(num_runs) + ", " : "";
    line += "row " + std::to_string(out.rows().size()) + ":";
    for (const auto& [name, value] : added) {
      if (line.size() < 90) line += ' ' + tools::to_text(value);
    }
    progress.show(line);
  });
  for (const command& run : commands) run(out);
  out.watch({});
  return out;
}

int measure(int argc, char** argv) {
  CLI::App program("Measures bifolio on this machine.", "bifolio_bench");
  program.footer(std::string(examples) + tools::exit_codes);
  program.set_version_flag("--version", "bifolio_bench of bifolio " BIFOLIO_VERSION);
  std::string format = "md", compare;
  std::int32_t num_runs = 1;
  program.add_option("--format", format, "md, csv, json or jsonl (an object a line)")->capture_default_str();
  program.add_option("-r,--repeat", num_runs, "Measure everything so often; medians, and by how much the runs differ")
      ->capture_default_str();
  program.add_option("--compare", compare, "What --format json wrote before: its figures next to those of now")
      ->option_text("FILE.json");
  program.require_subcommand(0, 1);
  program.fallthrough();
  command run;
  add_commands(program, run);
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    return tools::end_of_parsing(program, problem);
  }
  const output_format output = tools::parse_output_format(format);
  if (num_runs < 1 || num_runs > 1000) {
    throw tools::input_error("--repeat is " + std::to_string(num_runs) + ", allowed are whole numbers from 1 to 1000");
  }
  const std::string before = compare.empty() ? std::string() : read_file(compare);
  std::vector<command> commands;
  if (run) commands.push_back(run);
  for (const char* line : default_suite) {
    if (run) break;
    CLI::App part;
    command one;
    add_commands(part, one);
    part.parse(line);
    commands.push_back(one);
  }
  std::vector<report> runs;
  for (std::int32_t i = 1; i <= num_runs; ++i) runs.push_back(run_all(commands, i, num_runs));
  report said = num_runs > 1 ? tools::median_of(runs) : runs.front();
  if (!compare.empty()) said = tools::compared(said, before, compare);
  std::ostringstream text;
  said.print(text, output);
  tools::write_stdout(text.str());
  return 0;
}

}  // namespace
}  // namespace bifolio::bench

int main(int argc, char** argv) {
  return tools::run_main("bifolio_bench", "out of memory; smaller sizes need less",
                         [&] { return bifolio::bench::measure(argc, argv); });
}

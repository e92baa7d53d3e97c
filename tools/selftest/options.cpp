// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <bifolio/error.hpp>

#include "tools/common/program.hpp"

namespace selftest {
namespace {

using bifolio::errc;
using bifolio::error;

constexpr double longest_seconds = 86400;

constexpr const char* footer =
    "Exit codes: 0 when everything held; 1 when something did not; 2 for options that cannot be used.\n"
    "docs/selftest.md explains what is checked and how the report is read.";

output_format format_of(const std::string& text) {
  if (text == "text") return output_format::text;
  if (text == "md") return output_format::md;
  if (text == "json") return output_format::json;
  throw error(errc::invalid_argument, fmt::format("--format is '{}', allowed are text, md and json", text));
}

}  // namespace

std::optional<options> parse_options(int argc, char** argv, int& exit_code) {
  options result;
  std::string format = "text";
  std::string only;
  result.progress = ::isatty(STDERR_FILENO) != 0;
  CLI::App program("Holds the kernels of this machine against naive models and says how equal their results are.",
                   "bifolio_selftest");
  program.footer(footer);
  const auto add = [&](const char* name, auto& value, const char* what) {
    return program.add_option(name, value, what)->capture_default_str();
  };
  add("--format", format, "text (for a terminal), md or json");
  add("--seconds", result.run.seconds, "Time for all checks; a minimum of cases is run in any case")
      ->check(CLI::Range(0.0, longest_seconds));
  add("--device", result.where.device, "all, cpu, cuda (every GPU) or cuda:N");
  program.add_option("--isa", result.where.isas, "Of the CPU, with commas; default: all that this machine supports")
      ->delimiter(',')
      ->option_text("ISA,...");
  add("--seed", result.run.seed, "Where random cases start");
  program.add_option("--case", only, "Run this case alone, as a report names it: attention:N, append:N, ...")
      ->option_text("KIND:N");
  program.add_flag("--strict", result.strict, "Kernels that no case reached are a failure");
  program.add_flag("--list", result.list, "Say what would be checked, and end");
  program.add_flag("--progress,!--no-progress", result.progress,
                   "Show how far the work is on stderr; default: when that is a terminal");
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    exit_code = tools::end_of_parsing(program, problem);
    return std::nullopt;
  }
  result.format = format_of(format);
  // The range above lets 0 and what is no number pass.
  if (!(result.run.seconds > 0 && result.run.seconds <= longest_seconds)) {
    throw error(errc::invalid_argument, fmt::format("--seconds is {}, allowed are numbers above 0 and up to {}",
                                                    result.run.seconds, longest_seconds));
  }
  if (!only.empty()) result.run.only = parse_case(only);
  return result;
}

}  // namespace selftest

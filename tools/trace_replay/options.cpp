// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <map>

#include "input_error.hpp"

namespace trace_replay {
namespace {

/// A count of blocks, or "unbounded", which is 0.
std::int64_t parse_blocks(const std::string& text) {
  if (text == "unbounded") return 0;
  std::int64_t value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size() || value < 0 || value > bifolio::max_num_blocks) {
    throw input_error(fmt::format("--blocks is '{}'; allowed are whole numbers from 0 to {} and unbounded (as 0)", text,
                                  bifolio::max_num_blocks));
  }
  return value;
}

template <class Value>
Value chosen(const char* option, const std::string& text, const std::map<std::string, Value>& values) {
  const auto found = values.find(text);
  if (found != values.end()) return found->second;
  std::string allowed;
  for (const auto& [name, value] : values) allowed.append(allowed.empty() ? "" : ", ").append(name);
  throw input_error(fmt::format("{} is '{}'; allowed are {}", option, text, allowed));
}

void require_between(const char* option, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  throw input_error(fmt::format("{} is {}; allowed are whole numbers from {} to {}", option, value, low, high));
}

constexpr const char* footer =
    "The trace is one of Mooncake's (a JSON object a line: timestamp in ms, input_length,\n"
    "output_length, hash_ids) or of Azure's (CSV: TIMESTAMP,ContextTokens,GeneratedTokens).\n"
    "Exit codes: 0; 2 for options and files that cannot be used; 1 for everything else.\n"
    "docs/trace_replay.md explains what is measured.";

}  // namespace

std::optional<options> parse_options(int argc, char** argv, int& exit_code) {
  options result;
  CLI::App program("Replays a serving trace through bifolio's cache logic, without a GPU.", "trace_replay");
  program.footer(footer);
  std::string format_in = "auto", format = "md", policy = "lru", blocks = "unbounded";
  program.add_option("trace", result.trace_path, "The trace file")->required()->option_text("FILE REQUIRED");
  const std::string input = "Trace";
  program.add_option("--format-in", format_in, "auto (by content), mooncake or azure")
      ->capture_default_str()
      ->group(input);
  program.add_option("--requests", result.max_requests, "Replay the first N requests only; 0: all")
      ->capture_default_str()
      ->group(input);
  program.add_option("--trace-block-size", result.trace_block_size, "Tokens of the block that one of hash_ids names")
      ->capture_default_str()
      ->group(input);
  const std::string cache = "Cache";
  program.add_option("--blocks", blocks, "Blocks of the pool; 0 or unbounded: so many that nothing is evicted")
      ->capture_default_str()
      ->group(cache);
  program
      .add_option("--policy", policy,
                  "lru, or priority: the first blocks of every prompt (--keep-first) are evicted last")
      ->capture_default_str()
      ->group(cache);
  program.add_option("--keep-first", result.num_kept, "With --policy priority: how many blocks")
      ->capture_default_str()
      ->group(cache);
  program
      .add_flag("--cache-only", result.cache_only,
                "The prefix cache alone: requests one after another, a block of the pool for each of hash_ids")
      ->group(cache);
  program
      .add_flag("--full-blocks", result.full_blocks_only, "With --cache-only: leave out ids of partly filled blocks")
      ->group(cache);
  const std::string output = "Output";
  program.add_option("--format", format, "md, csv or json")->capture_default_str()->group(output);
  program.add_option("--plot", result.plot_path, "Write pool use and hit rate over time as SVG")
      ->option_text("FILE.svg")
      ->group(output);
  program
      .add_flag("--progress,!--no-progress", result.progress,
                "Show how far the work is on stderr; default: when that is a terminal")
      ->group(output);
  result.progress = ::isatty(STDERR_FILENO) != 0;
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    exit_code = program.exit(problem) == 0 ? 0 : 2;  // --help is an "error" with code 0
    return std::nullopt;
  }
  result.format_in = chosen<trace_format>(
      "--format-in", format_in,
      {{"auto", trace_format::automatic}, {"azure", trace_format::azure}, {"mooncake", trace_format::mooncake}});
  result.format = chosen<output_format>(
      "--format", format, {{"md", output_format::md}, {"csv", output_format::csv}, {"json", output_format::json}});
  result.policy =
      chosen<policy_kind>("--policy", policy, {{"lru", policy_kind::lru}, {"priority", policy_kind::priority}});
  result.num_blocks = parse_blocks(blocks);
  require_between("--requests", result.max_requests, 0, INT64_MAX);
  require_between("--trace-block-size", result.trace_block_size, 1, 1 << 20);
  require_between("--keep-first", result.num_kept, 0, INT32_MAX);
  if (!result.cache_only) throw input_error("--cache-only is the one mode there is so far");
  return result;
}

}  // namespace trace_replay

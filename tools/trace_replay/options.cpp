// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bifolio/version.hpp>
#include <charconv>
#include <map>

#include "input_error.hpp"
#include "model.hpp"
#include "tools/common/program.hpp"

namespace trace_replay {
namespace {

using bifolio::preemption_mode;

/// The words between commas.
std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

/// A count of blocks, or "unbounded", which is 0.
std::int64_t parse_blocks(const std::string& text) {
  if (text == "unbounded") return 0;
  std::int64_t value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc() || end != text.data() + text.size() || value < 0 || value > bifolio::max_num_blocks) {
    throw input_error(fmt::format("--blocks is '{}', allowed are whole numbers from 0 to {} and unbounded (as 0)", text,
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
  throw input_error(fmt::format("{} is '{}', allowed are {}", option, text, allowed));
}

void require_between(const char* option, std::int64_t value, std::int64_t low, std::int64_t high) {
  if (value >= low && value <= high) return;
  throw input_error(fmt::format("{} is {}, allowed are whole numbers from {} to {}", option, value, low, high));
}

/// Also refuses what is no number.
void require_at_least(const char* option, double value, double least) {
  if (value >= least && value <= 1e12) return;
  throw input_error(fmt::format("{} is {}, allowed are numbers from {} to 1e12", option, value, least));
}

std::string footer() {
  return fmt::format(
      "Examples:\n"
      "  trace_replay trace.jsonl --cache-only --blocks 1000,10000,100000 --policy lru,s3_fifo --html report.html\n"
      "  trace_replay trace.jsonl --blocks 20000 --speed 2 --plot pool.svg\n"
      "The trace is one of Mooncake's (a JSON object a line: timestamp in ms, input_length,\n"
      "output_length, hash_ids) or of Azure's (CSV: TIMESTAMP,ContextTokens,GeneratedTokens).\n"
      "{}\n"
      "docs/trace_replay.md explains what is measured.",
      tools::exit_codes);
}

/// Options as they are written, before they are checked.
struct written {
  std::string format_in = "auto";
  std::string format = "md";
  std::string policy = "lru";
  std::string preemption = "recompute";
  std::string blocks;
  bool no_prefix_caching = false;
};

void add_trace_options(CLI::App& program, options& result, written& text) {
  const std::string group = "Trace";
  program.add_option("trace", result.trace_path, "The trace file")->required()->option_text("FILE REQUIRED");
  const auto add = [&](const char* name, auto& value, const char* what) {
    program.add_option(name, value, what)->capture_default_str()->group(group);
  };
  add("--format-in", text.format_in, "auto (by content), mooncake or azure");
  add("--requests", result.max_requests, "Replay the first N requests only; 0: all");
  add("--speed", result.simulation.speed, "Requests arrive this many times as fast as in the trace");
  add("--trace-block-size", result.simulation.trace_block_size, "Tokens of the block that one of hash_ids names");
}

void add_cache_options(CLI::App& program, options& result, written& text) {
  const std::string group = "Cache";
  simulation_options& to = result.simulation;
  const auto add = [&](const char* name, auto& value, const char* what) {
    return program.add_option(name, value, what)->capture_default_str()->group(group);
  };
  add("--blocks", text.blocks,
      "Blocks of the pool; 0 or unbounded: so many that nothing is evicted. A list, a,b,c, replays the trace with each "
      "and compares them")
      ->default_str("50000; unbounded with --cache-only");
  add("--block-size", to.block_size, "Tokens of a block; with --cache-only a block is one of the trace's");
  add("--model", result.model_path, "The layer groups of a model, in place of --blocks, --block-size, --host-blocks")
      ->option_text("FILE.json")
      ->default_str("");
  add("--policy", text.policy,
      "lru, s3_fifo, or priority: the first blocks of every prompt are evicted last. A list compares them");
  add("--keep-first", to.num_kept, "With --policy priority: how many blocks that are");
  program.add_flag("--no-prefix-caching", text.no_prefix_caching, "Compute every prompt whole")->group(group);
  program
      .add_flag("--cache-only", result.cache_only,
                "The prefix cache alone, without scheduler and clock: requests one after another")
      ->group(group);
  program
      .add_flag("--full-blocks", result.full_blocks_only, "With --cache-only: leave out ids of partly filled blocks")
      ->group(group);
}

void add_scheduler_options(CLI::App& program, options& result, written& text) {
  const std::string group = "Scheduler";
  simulation_options& to = result.simulation;
  const auto add = [&](const char* name, auto& value, const char* what) {
    program.add_option(name, value, what)->capture_default_str()->group(group);
  };
  add("--max-tokens-per-step", to.max_tokens_per_step, "Tokens computed in one step");
  add("--max-running", to.max_running, "Sequences that hold blocks");
  add("--preemption", text.preemption,
      "recompute, swap (while --host-blocks suffice) or automatic (whichever is cheaper)");
  add("--host-blocks", to.num_host_blocks, "Blocks of the host's pool, for swapping");
  add("--steps-in-flight", to.steps_in_flight, "Steps scheduled before the first of them is committed");
  program.add_flag("--build", to.build_batches, "Also make the arrays that kernels would read, in every step")
      ->group(group);
}

void add_cost_options(CLI::App& program, options& result) {
  const std::string group = "Simulated time of a step (defaults: 8e9 weights in bf16 on one H200; see the page)";
  cost_model& to = result.simulation.costs;
  const auto add = [&](const char* name, double& value, const char* what) {
    program.add_option(name, value, what)->capture_default_str()->group(group);
  };
  add("--host-us", to.of_host, "Microseconds of the host before every step, hidden while another one is in flight");
  add("--step-us", to.per_step, "Microseconds for every step");
  add("--us-per-token", to.per_token, "... for every token computed");
  add("--us-per-kv-token", to.per_kv_token, "... for every token of KV that is read, once a sequence");
  add("--us-per-score", to.per_score, "... for every pair of a computed token and one visible to it");
  add("--us-per-swapped-token", to.per_swapped_token, "... for every token of KV moved to the host or back");
}

void add_output_options(CLI::App& program, options& result, written& text) {
  const std::string group = "Output";
  program.add_option("--format", text.format, "md, csv, json or jsonl (an object a line)")
      ->capture_default_str()
      ->group(group);
  program
      .add_option(
          "--plot", result.plot_path,
          "Write an SVG: pool use and hit rate over time; with a list of --blocks or --policy the hit rate by size")
      ->option_text("FILE.svg")
      ->group(group);
  program.add_option("--html", result.html_path, "Write a report with tables and plots that a browser shows")
      ->option_text("FILE.html")
      ->group(group);
  program
      .add_flag("--progress,!--no-progress", result.progress,
                "Show how far the work is on stderr; default: when that is a terminal")
      ->group(group);
}

/// Words to values, ranges, and what does not go together. Throws `input_error`.
void check(options& result, const written& text) {
  result.format_in = chosen<trace_format>(
      "--format-in", text.format_in,
      {{"auto", trace_format::automatic}, {"azure", trace_format::azure}, {"mooncake", trace_format::mooncake}});
  result.format = tools::parse_output_format(text.format);
  simulation_options& to = result.simulation;
  for (const std::string& name : split(text.policy)) {
    result.policies.push_back(chosen<policy_kind>(
        "--policy", name,
        {{"lru", policy_kind::lru}, {"priority", policy_kind::priority}, {"s3_fifo", policy_kind::s3_fifo}}));
  }
  to.preemption = chosen<preemption_mode>("--preemption", text.preemption,
                                          {{"recompute", preemption_mode::recompute},
                                           {"swap", preemption_mode::swap},
                                           {"automatic", preemption_mode::automatic}});
  to.prefix_caching = !text.no_prefix_caching;
  if (!result.model_path.empty()) {
    if (result.cache_only)
      throw input_error("--model does not go with --cache-only, which has one pool of trace blocks");
    if (!text.blocks.empty()) throw input_error("--model says how many blocks each pool has; leave out --blocks");
    to.groups = read_model_file(result.model_path);
    to.block_size = to.groups.front().block_size;
    to.num_host_blocks = to.groups.front().num_host_blocks;
  }
  if (text.blocks.empty()) {
    result.num_blocks = {result.cache_only ? 0 : 50000};
  } else {
    for (const std::string& count : split(text.blocks)) result.num_blocks.push_back(parse_blocks(count));
  }
  require_between("--requests", result.max_requests, 0, INT64_MAX);
  require_between("--trace-block-size", to.trace_block_size, 1, 1 << 20);
  require_between("--keep-first", to.num_kept, 0, INT32_MAX);
  require_between("--block-size", to.block_size, 1, 1 << 20);
  require_between("--host-blocks", to.num_host_blocks, 0, bifolio::max_num_blocks);
  require_between("--max-tokens-per-step", to.max_tokens_per_step, 1, INT32_MAX);
  require_between("--max-running", to.max_running, 1, 1 << 24);
  require_between("--steps-in-flight", to.steps_in_flight, 1, bifolio::block_pool::max_open_fences);
  require_at_least("--speed", to.speed, 1e-6);
  require_at_least("--host-us", to.costs.of_host, 0);
  require_at_least("--step-us", to.costs.per_step, 0);
  require_at_least("--us-per-token", to.costs.per_token, 0);
  require_at_least("--us-per-kv-token", to.costs.per_kv_token, 0);
  require_at_least("--us-per-score", to.costs.per_score, 0);
  require_at_least("--us-per-swapped-token", to.costs.per_swapped_token, 0);
  if (result.full_blocks_only && !result.cache_only) {
    throw input_error("--full-blocks belongs to --cache-only: the scheduler never keeps a block that is not full");
  }
  if (to.preemption != preemption_mode::recompute && to.num_host_blocks == 0) {
    throw input_error("--preemption " + text.preemption + " needs --host-blocks of at least 1");
  }
}

}  // namespace

std::optional<options> parse_options(int argc, char** argv, int& exit_code) {
  options result;
  written text;
  CLI::App program("Replays a serving trace through bifolio's cache logic, without a GPU.", "trace_replay");
  program.footer(footer());
  program.set_version_flag("--version", "trace_replay of bifolio " BIFOLIO_VERSION);
  add_trace_options(program, result, text);
  add_cache_options(program, result, text);
  add_scheduler_options(program, result, text);
  add_cost_options(program, result);
  add_output_options(program, result, text);
  result.progress = ::isatty(STDERR_FILENO) != 0;
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    exit_code = tools::end_of_parsing(program, problem);
    return std::nullopt;
  }
  check(result, text);
  return result;
}

}  // namespace trace_replay

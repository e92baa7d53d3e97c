// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <bifolio/version.hpp>

#include "tools/common/program.hpp"

namespace block_map {
namespace {

/// Columns of the terminal on stdout less the margin that row numbers need; 64 when it is none or a wide one.
std::int32_t fitting_columns() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return 64;
  return std::clamp<std::int32_t>(size.ws_col - 8, 8, 64);
}

/// A whole number or a fraction within both ends; CLI11's own sentence names neither the option nor the value.
template <class Value>
CLI::Validator between(Value low, Value high) {
  return CLI::Validator(
      [low, high](std::string& text) {
        Value value{};
        if (CLI::detail::lexical_cast(text, value) && value >= low && value <= high) return std::string();
        return fmt::format("'{}' is not allowed, allowed are {} to {}", text, low, high);
      },
      fmt::format("{} to {}", low, high));
}

std::string footer() {
  return fmt::format(
      "One character a block: . free, : cached and idle, ~ waits for a step in flight, a letter for the one sequence\n"
      "that uses it, a digit for how many share it. The same seed gives the same run.\n"
      "Live: space stops and goes on, another key shows one step more, q ends.\n"
      "Examples:\n"
      "  block_map --blocks 512 --load 1.2\n"
      "  generate --prompts-file prompts.txt --events run.jsonl & block_map --follow run.jsonl\n"
      "  block_map --follow run.jsonl --svg run.svg --animated --every 4\n"
      "{}",
      tools::exit_codes);
}

}  // namespace

std::optional<options> parse_options(int argc, char** argv, int& exit_code) {
  options result;
  serving_options& to = result.serving;
  CLI::App program("Shows the block pool while made-up conversations are served by bifolio's scheduler.", "block_map");
  program.footer(footer());
  program.set_version_flag("--version", "block_map of bifolio " BIFOLIO_VERSION);
  std::string group = "Pool and traffic";
  const auto add = [&](const char* name, auto& value, const char* what, const CLI::Validator& range) {
    return program.add_option(name, value, what)->capture_default_str()->check(range)->group(group);
  };
  add("--blocks", to.num_blocks, "Blocks of the device", between<std::int64_t>(8, 1 << 16));
  add("--host-blocks", to.num_host_blocks, "Blocks of the host, for sequences that are swapped out",
      between<std::int64_t>(0, 1 << 16));
  add("--block-size", to.block_size, "Tokens of a block", between<std::int32_t>(1, 1024));
  add("--max-running", to.max_running, "Sequences that hold blocks of the device", between<std::int32_t>(4, 4096));
  add("--max-tokens-per-step", to.max_tokens_per_step, "Tokens computed in one step",
      between<std::int32_t>(1, 1 << 20));
  add("--steps-in-flight", to.steps_in_flight, "Steps scheduled before the first of them is committed",
      between<std::int32_t>(1, 16));
  add("--window", to.window, "A second layer group, whose layers attend to so many tokens; 0: none",
      between<std::int32_t>(0, 1 << 20));
  add("--states", to.num_states, "A layer group with so many recurrent states; 0: none",
      between<std::int64_t>(0, 1 << 16));
  program.add_flag("--swap,!--no-swap", to.swap, "Preempt by swapping (default), or by computing again")->group(group);
  add("--load", to.traffic.load, "Requests a step, in the mean", between<double>(0.0, 100.0));
  add("--seed", to.traffic.seed, "Of the traffic", between<std::uint64_t>(0, UINT64_MAX));

  program
      .add_option("--follow", result.log_path,
                  "Instead: the run that wrote this log (generate --events, serve --events)")
      ->option_text("LOG")
      ->group(group);

  group = "Picture";
  CLI::Option* steps =
      add("--steps", result.num_steps, "Steps to show; 0: until it is interrupted", between<std::int64_t>(0, 1 << 30));
  steps->default_str("0; 200 where stdout is no terminal, or with --once or --svg");
  add("--from", result.from, "Steps before the first frame", between<std::int64_t>(0, 1 << 30));
  CLI::Option* every =
      add("--every", result.every, "Steps from a frame to the next", between<std::int64_t>(1, 1 << 20));
  bool once = false;
  add("--speed", result.frames_per_second, "Frames a second; 0: as fast as possible", between<double>(0.0, 1000.0));
  add("--columns", result.columns, "Blocks in a row; 0: as many as fit, at most 64", between<std::int32_t>(0, 1024));
  program
      .add_flag("--once", once,
                "The last frame alone, as plain text; where stdout is no terminal only --every prints more")
      ->group(group);
  program.add_option("--svg", result.svg_path, "Write the last frame to this file")
      ->option_text("FILE.svg")
      ->group(group);
  program.add_flag("--animated", result.animated, "All frames in the file of --svg, one after another")->group(group);
  program.add_flag("--check", result.check, "Check every invariant of scheduler and manager after every step")
      ->group(group);
  try {
    program.parse(argc, argv);
    if (result.animated && result.svg_path.empty()) throw CLI::ValidationError("--animated needs --svg");
    if (!result.svg_path.empty() && (to.window > 0 || to.num_states > 0)) {
      throw CLI::ValidationError("--svg draws one pool; leave out --window and --states");
    }
  } catch (const CLI::ParseError& problem) {
    exit_code = tools::end_of_parsing(program, problem);
    return std::nullopt;
  }
  result.live = !once && result.svg_path.empty() && ::isatty(STDOUT_FILENO) != 0;
  result.all_frames = !once && every->count() > 0;
  const bool is_log = !result.log_path.empty();
  if (!result.live && !is_log && steps->count() == 0) result.num_steps = 200;
  if (!result.live && !is_log) result.num_steps = std::max({result.num_steps, result.from, std::int64_t{1}});
  if (result.columns == 0) result.columns = fitting_columns();
  return result;
}

}  // namespace block_map

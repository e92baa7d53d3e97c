// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "report.hpp"
#include "simulation.hpp"
#include "trace.hpp"

namespace trace_replay {

struct options {
  std::string trace_path;
  trace_format format_in = trace_format::automatic;
  std::int64_t max_requests = 0;  ///< 0: all
  bool cache_only = false;
  bool full_blocks_only = false;
  /// Of each replay; --cache-only reads of it num_blocks, policy, num_kept and trace_block_size.
  simulation_options simulation;
  /// More than one of either: each with each is replayed, and they are compared. Never empty.
  std::vector<std::int64_t> num_blocks;
  std::vector<policy_kind> policies;
  tools::output_format format = tools::output_format::md;
  std::string plot_path;   ///< empty: none
  std::string html_path;   ///< empty: none
  std::string model_path;  ///< whose groups are in `simulation`; empty: none
  bool progress = false;
};

/// What the command line says; nothing when the program is to end now with `exit_code`, because help was asked for
/// (0) or an option is wrong (2); that is said on the right stream then.
[[nodiscard]] std::optional<options> parse_options(int argc, char** argv, int& exit_code);

}  // namespace trace_replay

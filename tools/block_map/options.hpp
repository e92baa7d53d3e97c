// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "serving.hpp"

namespace block_map {

struct options {
  serving_options serving;
  std::int64_t num_steps = 0;  ///< 0: until it is interrupted
  std::int64_t from = 0;       ///< steps before the first frame
  std::int64_t every = 1;      ///< steps from a frame to the next
  double frames_per_second = 10;
  std::int32_t columns = 0;  ///< 0: as many as fit, at most 64
  bool live = false;         ///< colours, each frame over the one before
  bool all_frames = false;   ///< as plain text, one below the other; else the last one alone
  std::string log_path;      ///< of a run to follow; empty: made-up traffic
  std::string svg_path;      ///< empty: none
  bool animated = false;
  bool check = false;  ///< all invariants, after every step
};

/// What the command line says; nothing when the program is to end now with `exit_code` (0 after --help, 2 after a wrong
/// option), which is said on the right stream then.
[[nodiscard]] std::optional<options> parse_options(int argc, char** argv, int& exit_code);

}  // namespace block_map

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A trace through the library's scheduler and cache manager, as an engine would drive them, but with a clock that
/// jumps: requests are submitted when their time has come, a step takes what the cost model says, its tokens are made
/// up, and when nothing can be computed the clock goes on to the next arrival.

#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "cost_model.hpp"
#include "eviction.hpp"
#include "measurements.hpp"
#include "progress.hpp"
#include "trace.hpp"

namespace trace_replay {

struct simulation_options {
  std::int64_t num_blocks = 0;  ///< 0: so many that nothing is evicted or preempted
  std::int32_t block_size = 16;
  std::int64_t num_host_blocks = 0;
  bifolio::preemption_mode preemption = bifolio::preemption_mode::recompute;
  std::int32_t steps_in_flight = 1;
  bool prefix_caching = true;
  policy_kind policy = policy_kind::lru;
  std::int64_t num_kept = 1;  ///< see make_policy
  std::int32_t max_tokens_per_step = 2048;
  std::int32_t max_running = 256;
  double speed = 1;  ///< requests arrive this many times as fast as in the trace
  cost_model costs;
  std::int64_t trace_block_size = 512;
  bool build_batches = false;                 ///< also make the arrays that kernels would read, in every step
  std::vector<bifolio::group_config> groups;  ///< of a model; empty: one, described above
};

/// What one layer group did; of a group with states a block is a state, and a look-up asks for one.
struct group_result {
  bifolio::group_kind kind = bifolio::group_kind::full;
  std::int64_t num_blocks = 0;
  std::int64_t peak_used_blocks = 0;
  std::int64_t lookups = 0;
  std::int64_t hits = 0;
  std::int64_t evictions = 0;
};

struct simulation_result {
  std::int64_t num_blocks = 0;
  std::int64_t num_requests = 0;
  std::int64_t num_refused = 0;  ///< larger than the whole pool
  std::int64_t num_finished = 0;
  std::int64_t num_prompt_tokens = 0;  ///< of requests that were not refused
  std::int64_t num_sampled_tokens = 0;
  std::int64_t num_computed_tokens = 0;  ///< in all steps; what was found in the cache is not among them
  std::int64_t num_steps = 0;
  std::int64_t lookups = 0;  ///< full blocks of prompts
  std::int64_t hits = 0;
  std::int64_t evictions = 0;
  std::int64_t preemptions = 0;
  std::int64_t num_swapped_out_blocks = 0;
  std::int64_t num_swapped_in_blocks = 0;
  std::int64_t peak_used_blocks = 0;
  double simulated_seconds = 0;  ///< from the first arrival to the end of the last step or to a later arrival
  percentiles queueing_ms;       ///< from arrival to the begin of the first step that computes a part of the prompt
  percentiles time_to_first_token_ms;  ///< from arrival to the end of the step that samples the first token
  percentiles time_per_token_ms;       ///< from a request's first to its last token, per token after the first
  percentiles latency_ms;              ///< from arrival to the end of the step that samples the last token
  double wall_seconds = 0;
  double bookkeeping_us_per_step = 0;  ///< wall time inside the scheduler (schedule, build if asked for, commit)
  timeline over_time;
  std::int64_t num_cached_tokens = 0;  ///< that every group had, of prompts and of what was computed again
  std::vector<group_result> groups;    ///< of a model
  /// Of each request, in the order of the trace: tokens that every group had when it was first admitted.
  std::vector<std::int64_t> first_cached_tokens;
};

/// Throws `input_error` for options that do not go together, `bifolio::error`.
[[nodiscard]] simulation_result simulate(const trace& what, const simulation_options& options, progress_bar& progress);

}  // namespace trace_replay

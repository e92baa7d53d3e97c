// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Scheduler, prefix cache, swapping and attention together, on a real trace, until time is up. Requests come with the
/// lengths and the shared beginnings of the trace, some are aborted, some swaps fail. What K and V hold is made from
/// token ids and positions, so that every block can be checked against the tokens that it should belong to.

#include <bifolio/backend.hpp>
#include <cstdint>
#include <string>

#include "trace.hpp"

namespace soak {

struct settings {
  std::uint64_t seed = 1;
  std::int64_t num_blocks = 0;  ///< 0: another number in each round
  /// Tokens of the trace that one token stands for: the pool and the oracle are small.
  std::int32_t shrink = 16;
  std::int64_t steps_per_round = 1000;
};

struct counts {
  std::int64_t num_rounds = 0;
  std::int64_t num_steps = 0;
  std::int64_t num_tokens = 0;
  std::int64_t num_finished = 0;
  std::int64_t num_aborted = 0;
  std::int64_t num_preemptions = 0;
  std::int64_t num_swap_outs = 0;
  std::int64_t num_swap_ins = 0;
  std::int64_t num_failed_swaps = 0;
  std::int64_t num_cached_tokens = 0;
  std::int64_t num_checked_tokens = 0;  ///< whose K and V in every layer were read back
  std::int64_t num_checked_rows = 0;    ///< of attention, against float64
};

/// One round: a manager, a scheduler and caches of some shape, `steps_per_round` steps, then every request to its end.
/// Requests begin at `next` of the trace, which moves on. Returns what is wrong; empty when nothing is.
[[nodiscard]] std::string run_round(bifolio::backend& where, const trace_replay::trace& requests, std::size_t& next,
                                    const settings& how, counts& sum);

}  // namespace soak

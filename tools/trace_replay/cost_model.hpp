// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bifolio/step.hpp>
#include <cstdint>

namespace trace_replay {

/// How long a step would take, in µs:
///
///   per_step + per_token · tokens computed + per_kv_token · tokens of KV read, once a sequence
///            + per_score · pairs of a computed token and a token visible to it
///            + per_swapped_token · tokens of blocks moved to the host or back
///
/// A step without tokens only moves blocks: it costs nothing but that.
///
/// The defaults are those of a model with 8·10⁹ weights in bf16, 32 layers, 32 query and 8 KV heads of 128, on one
/// H200; docs/trace_replay.md derives them. per_step and per_token are added although they overlap on a GPU, so short
/// prefills come out too slow by up to per_step; moving blocks is overlapped with nothing.
struct cost_model {
  double per_step = 3600;
  double per_token = 27;
  double per_kv_token = 0.03;
  double per_score = 0.001;
  double per_swapped_token = 2.6;
  /// Of the host before a step can begin (scheduling, inputs, sampling); hidden while an earlier step is in flight.
  double of_host = 0;
};

/// `block_size` in tokens, of the blocks that are swapped.
[[nodiscard]] double step_us(const cost_model& costs, const bifolio::step_plan& plan, std::int64_t block_size) noexcept;

}  // namespace trace_replay

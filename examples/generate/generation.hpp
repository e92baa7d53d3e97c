// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Many prompts at once, each with its continuations, through the `engine`.

#include <bifolio/backend.hpp>
#include <bifolio/model_cache.hpp>
#include <bifolio/scheduler.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine.hpp"
#include "model_runner.hpp"
#include "sampler.hpp"

namespace generate {

/// `max_running`: of sequences; never fewer than the continuations of a prompt.
struct generation_config : engine_config {
  std::int32_t num_samples = 1;  ///< continuations of each prompt
  /// Of each prompt the most tokens of a continuation, 0 for what max_positions allows; empty: 0 for all.
  std::vector<std::int32_t> max_new_tokens{};
  sampling how;
  std::uint64_t seed = 0;
};

struct generation_progress {
  std::int64_t num_steps = 0;
  std::int64_t num_running = 0;
  std::int64_t num_waiting = 0;
  std::int64_t num_finished = 0;
  std::int64_t num_fed = 0;  ///< tokens that went through the model
  std::int64_t used_blocks = 0;
  double seconds = 0;
};

/// Sequences are numbered prompt · num_samples + sample.
class generation_observer : public sequence_observer {
 public:
  virtual void on_step(const generation_progress& progress) = 0;
  /// After every step and once at the end, when the config says that it is watched. `letters`: `engine::letters`.
  virtual void on_frame(const tools::pool_frame& frame, const std::string& letters) {
    static_cast<void>(frame), static_cast<void>(letters);
  }
};

struct generation_stats {
  double seconds = 0;
  engine_record record;
  double attention_seconds = 0;  ///< appends included
  std::int64_t num_sequences = 0;
  bifolio::model_cache_config config;             ///< of the cache that was used
  bifolio::cache_stats cache;                     ///< at the end; of the first group
  std::vector<bifolio::cache_stats> more_groups;  ///< of groups 1, 2, …
  bifolio::prefix_stats prefix;                   ///< the same; zeros without prefix caching
  bifolio::scheduler_stats schedule;
};

/// Continues every prompt. A prompt of more than max_positions tokens is not fed and ends at once, by `steps`. Throws
/// as `engine::submit`.
generation_stats generate_all(model_runner& model, bifolio::backend& where, const cache_shape& shape,
                              const generation_config& config, std::span<const std::vector<bifolio::token_id>> prompts,
                              generation_observer& observer);

}  // namespace generate

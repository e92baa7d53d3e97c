// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Continuous batching: many sequences at once through one model, on bifolio's scheduler, manager, cache engine and
/// attention. What is done with the tokens is the observer's business.

#include <bifolio/cache_engine.hpp>
#include <bifolio/scheduler.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <span>
#include <vector>

#include "model_runner.hpp"
#include "sampler.hpp"

namespace generate {

struct generation_config {
  std::int32_t max_positions = 0;  ///< a sequence stops when that many tokens were fed, prompt included
  std::int32_t num_samples = 1;    ///< continuations of each prompt
  sampling how;
  std::uint64_t seed = 0;
  std::int32_t max_batch_tokens = 256;
  std::int32_t max_batch_seqs = 64;
  bool prefix_caching = false;  ///< prompts share the blocks of what others began with
  bifolio::preemption_mode preemption = bifolio::preemption_mode::automatic;
  bool deterministic = false;  ///< of a GPU's attention: a sequence says the same in any company
};

enum class ending : std::uint8_t {
  bos,    ///< the model produced the token that starts sequences, which ends a llama2.c story
  eos,    ///< it produced the token for the end, where that is another one
  steps,  ///< max_positions tokens were fed
};

/// "bos", "eos" or "steps".
[[nodiscard]] const char* to_string(ending how) noexcept;

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
class generation_observer {
 public:
  virtual ~generation_observer() = default;
  virtual void on_token(std::size_t sequence, bifolio::token_id token) = 0;
  virtual void on_end(std::size_t sequence, ending how) = 0;
  virtual void on_step(const generation_progress& progress) = 0;
};

struct generation_stats {
  double seconds = 0;
  double prefill_seconds = 0;  ///< a mixed step's time is divided by its numbers of tokens
  double decode_seconds = 0;
  double attention_seconds = 0;         ///< appends included
  std::int64_t num_prefill_tokens = 0;  ///< prompts, and what was computed again after a preemption
  std::int64_t num_decode_tokens = 0;
  std::int64_t num_sequences = 0;
  std::int64_t peak_table_entries = 0;  ///< most blocks in the tables of all sequences, a shared one counted each time
  bifolio::cache_stats cache;           ///< at the end
  bifolio::prefix_stats prefix;         ///< the same; zeros without prefix caching
  bifolio::scheduler_stats schedule;
};

/// Continues every prompt. The engine's layout is the model's (`cache_config`); its blocks are the whole pool.
/// `host`, if given, takes sequences that are swapped out: an engine of the same layout in host memory.
/// A prompt of more than max_positions tokens is not fed and ends at once, by `steps`.
/// Throws `input_error` when the pool cannot hold one sequence, `bifolio::error` on what the library refuses.
generation_stats generate_all(model_runner& model, bifolio::cache_engine& engine, const generation_config& config,
                              std::span<const std::vector<bifolio::token_id>> prompts, generation_observer& observer,
                              bifolio::cache_engine* host = nullptr);

}  // namespace generate

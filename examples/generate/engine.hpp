// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Continuous batching: requests come when they like, and each step computes a batch of them through one model, on
/// bifolio's scheduler and a cache of the model. What is done with the tokens is the business of the
/// observer that a request comes with. `generate_all` drives it for prompts that are all there, examples/serve for
/// those that arrive.

#include <bifolio/backend.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/metrics.hpp>
#include <bifolio/model_cache.hpp>
#include <bifolio/scheduler.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache_shape.hpp"
#include "model_runner.hpp"
#include "paged_attention.hpp"
#include "sampler.hpp"
#include "tools/common/pool_watcher.hpp"

namespace generate {

struct engine_config {
  std::int32_t max_positions = 0;  ///< of a sequence: tokens that are fed
  std::int32_t max_batch_tokens = 256;
  std::int32_t max_running = 64;  ///< sequences of one step
  bool prefix_caching = false;    ///< prompts share the blocks of what others began with
  bifolio::preemption_mode preemption = bifolio::preemption_mode::automatic;
  bool deterministic = false;  ///< of a GPU's attention: a sequence says the same in any company
  bool watched = false;        ///< `engine::frame` is called
};

struct text_request {
  std::vector<bifolio::token_id> prompt;
  std::int32_t max_new_tokens = 16;
  std::int32_t num_samples = 1;  ///< continuations; they share the prompt's blocks
  sampling how;
  std::uint64_t seed = 0;
  /// Number of the first sample; the others count on from it. The observer knows a sequence by it, and so do the random
  /// numbers (the `stream` of its `sampler`).
  std::size_t first_sequence = 0;
};

enum class ending : std::uint8_t {
  bos,      ///< the model produced the token that starts sequences, which ends a llama2.c story
  eos,      ///< it produced one of the tokens for the end, where that is another one
  steps,    ///< all tokens that were allowed are there
  stopped,  ///< the observer ended it
};

/// "bos", "eos", "steps" or "stopped".
[[nodiscard]] const char* to_string(ending how) noexcept;

/// A token that was sampled.
struct new_token {
  std::size_t sequence = 0;
  std::int32_t sample = 0;  ///< of its request
  bifolio::token_id id{};
  bool is_end = false;                 ///< the model's own end of a text, which has no text itself
  std::int64_t num_cached_tokens = 0;  ///< of its prompt, found in the cache and not computed
  char letter = '#';                   ///< in the frames of a config that is watched
};

/// What a request's tokens go to, from the engine's thread. It outlives the request.
class sequence_observer {
 public:
  virtual ~sequence_observer() = default;
  /// Whether the sequence ends with this token, although the model would go on.
  virtual bool on_token(const new_token& token) = 0;
  virtual void on_end(std::size_t sequence, ending how) = 0;
};

/// Where the time went, and what was there at once.
struct engine_record {
  double prefill_seconds = 0;  ///< a mixed step's time is divided by its numbers of tokens
  double decode_seconds = 0;
  std::int64_t num_prefill_tokens = 0;  ///< prompts, and what was computed again after a preemption
  std::int64_t num_decode_tokens = 0;
  std::int64_t peak_table_entries = 0;  ///< most blocks in the tables of all sequences, a shared one counted each time
  std::int64_t peak_sequences = 0;      ///< most that held blocks of the device at once
  std::int64_t peak_positions = 0;      ///< most tokens of all sequences at once, a shared one counted each time
};

/// One thread.
class engine {
 public:
  /// Model and device are borrowed. Throws `bifolio::error` on what the library refuses.
  engine(model_runner& model, bifolio::backend& where, const cache_shape& shape, const engine_config& config);

  /// The observer hears of it from the next step on. Throws `input_error` when the pool could never hold it,
  /// `bifolio::error` on what the scheduler refuses.
  void submit(text_request what, sequence_observer& observer);
  /// Ends all requests of an observer, which hears no more of them.
  void abort(const sequence_observer& observer);
  /// Schedules, computes, samples and commits one step. Whether there was anything to do.
  bool step();

  [[nodiscard]] const bifolio::model_cache& cache() const noexcept { return cache_; }
  [[nodiscard]] const bifolio::kv_cache_manager& manager() const noexcept { return cache_.manager(); }
  [[nodiscard]] const bifolio::scheduler& schedule() const noexcept { return scheduler_; }
  /// Counters of all three.
  [[nodiscard]] bifolio::metrics counts() const;
  [[nodiscard]] const engine_record& record() const noexcept { return record_; }
  /// The pool after the last step. For a config that is watched.
  [[nodiscard]] tools::pool_frame frame() const { return watcher_->snapshot(); }
  /// The letters that an observer's sequences have in it, by their numbers; a space for one that has none now.
  [[nodiscard]] std::string letters(const sequence_observer& observer, std::size_t num_sequences) const;

 private:
  struct open_request {
    sequence_observer* observer = nullptr;
    std::size_t first_sequence = 0;
    std::int32_t prompt_length = 0;
    std::int32_t num_running = 0;  ///< samples that have not ended
    std::int64_t num_cached_tokens = 0;
    std::vector<sampler> samplers;
  };

  void compute();
  void sample(const bifolio::step_plan& plan);
  void note_peaks();
  void note_time(const bifolio::step_plan& plan, double seconds);
  void commit();

  model_runner& model_;
  bifolio::model_cache cache_;
  bifolio::scheduler scheduler_;
  paged_attention attention_;
  std::optional<tools::pool_watcher> watcher_;
  std::unordered_map<std::uint64_t, open_request> requests_;  // by id

  std::vector<bifolio::request_id> aborted_;  // since the last step
  bifolio::model_step step_;
  std::span<const float> logits_;
  std::vector<bifolio::sampled_token> sampled_;
  engine_record record_;
};

}  // namespace generate

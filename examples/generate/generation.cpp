// SPDX-License-Identifier: Apache-2.0
#include "generation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <unordered_map>

#include "input_error.hpp"

namespace generate {
namespace {

using bifolio::request_id;
using bifolio::token_id;
using clock = std::chrono::steady_clock;

engine_config config_of(const generation_config& config, std::size_t num_prompts) {
  const std::int64_t wanted = static_cast<std::int64_t>(num_prompts) * config.num_samples;
  const auto max_running = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(wanted, config.num_samples, std::max(config.max_batch_seqs, config.num_samples)));
  return {.max_positions = config.max_positions,
          .max_batch_tokens = config.max_batch_tokens,
          .max_running = max_running,
          .prefix_caching = config.prefix_caching,
          .preemption = config.preemption,
          .deterministic = config.deterministic,
          .watched = config.watched};
}

class generator final : engine_observer {
 public:
  generator(model_runner& model, bifolio::cache_engine& cache, const generation_config& config,
            std::span<const std::vector<token_id>> prompts, generation_observer& observer, bifolio::cache_engine* host)
      : model_(model),
        config_(config),
        prompts_(prompts),
        observer_(observer),
        engine_(model, cache, config_of(config, prompts.size()), *this, host) {}

  generation_stats run() {
    const auto start = clock::now();
    for (std::size_t prompt = 0; prompt < prompts_.size(); ++prompt) submit(prompt);
    while (engine_.step()) {
      stats_.seconds = std::chrono::duration<double>(clock::now() - start).count();
      report_progress();
      report_frame();
    }
    report_frame();
    stats_.num_sequences = static_cast<std::int64_t>(prompts_.size()) * config_.num_samples;
    stats_.record = engine_.record();
    stats_.attention_seconds = model_.attention_seconds();
    stats_.cache = engine_.manager().stats();
    if (const bifolio::prefix_cache* prefix = engine_.manager().prefix()) stats_.prefix = prefix->stats();
    stats_.schedule = engine_.schedule().stats();
    return stats_;
  }

 private:
  [[nodiscard]] std::size_t sequence(std::size_t prompt, std::int32_t sample) const {
    return prompt * static_cast<std::size_t>(config_.num_samples) + static_cast<std::size_t>(sample);
  }

  [[nodiscard]] std::int32_t max_new_tokens(std::size_t prompt) const {
    const std::int32_t possible = config_.max_positions - static_cast<std::int32_t>(prompts_[prompt].size()) + 1;
    const std::int32_t wanted = config_.max_new_tokens.empty() ? 0 : config_.max_new_tokens[prompt];
    return wanted > 0 ? std::min(wanted, possible) : possible;
  }

  void submit(std::size_t prompt) {
    const auto length = static_cast<std::int32_t>(prompts_[prompt].size());
    if (length > config_.max_positions) {
      for (std::int32_t s = 0; s < config_.num_samples; ++s) observer_.on_end(sequence(prompt, s), ending::steps);
      return;
    }
    const bifolio::submit_result submitted = engine_.submit({.prompt = prompts_[prompt],
                                                             .max_new_tokens = max_new_tokens(prompt),
                                                             .num_samples = config_.num_samples,
                                                             .how = config_.how,
                                                             .seed = config_.seed,
                                                             .first_stream = sequence(prompt, 0)});
    if (submitted.status != bifolio::alloc_status::ok) {
      const bifolio::kv_cache_config& pool = engine_.manager().config();
      throw input_error(fmt::format(
          "prompt {} and its continuation can take {} positions, {} blocks of {}, and the pool of {} blocks cannot "
          "hold "
          "that: allow more blocks (--num-blocks, or --cache-mib when that is not given) or fewer positions "
          "(--max-positions)",
          prompt + 1, config_.max_positions, bifolio::blocks_for(config_.max_positions, pool.block_size),
          pool.block_size, pool.num_blocks));
    }
    prompt_of_.emplace(to_index(submitted.id), prompt);
  }

  bool on_token(request_id request, std::int32_t sample, token_id token) override {
    observer_.on_token(sequence(prompt_of_.at(to_index(request)), sample), token);
    return false;
  }
  void on_end(request_id request, std::int32_t sample, ending how) override {
    observer_.on_end(sequence(prompt_of_.at(to_index(request)), sample), how);
  }

  void report_progress() {
    const bifolio::scheduler_stats now = engine_.schedule().stats();
    generation_progress progress;
    progress.num_steps = now.num_steps;
    progress.num_running = now.num_running;
    progress.num_waiting = now.num_waiting;
    progress.num_finished = now.num_finished;
    progress.num_fed = now.num_scheduled_tokens;
    progress.used_blocks = engine_.manager().stats().num_used_blocks;
    progress.seconds = stats_.seconds;
    observer_.on_step(progress);
  }

  void report_frame() {
    if (!config_.watched) return;
    std::string letters(prompts_.size() * static_cast<std::size_t>(config_.num_samples), ' ');
    for (const auto& [request, prompt] : prompt_of_) {
      for (std::int32_t s = 0; s < config_.num_samples; ++s) {
        if (engine_.is_open(bifolio::request_id{request}))
          letters[sequence(prompt, s)] = engine_.letter(bifolio::request_id{request}, s);
      }
    }
    observer_.on_frame(engine_.frame(), letters);
  }

  model_runner& model_;
  const generation_config& config_;
  std::span<const std::vector<token_id>> prompts_;
  generation_observer& observer_;
  engine engine_;
  std::unordered_map<std::uint64_t, std::size_t> prompt_of_;  // by request
  generation_stats stats_;
};

}  // namespace

generation_stats generate_all(model_runner& model, bifolio::cache_engine& engine, const generation_config& config,
                              std::span<const std::vector<token_id>> prompts, generation_observer& observer,
                              bifolio::cache_engine* host) {
  return generator(model, engine, config, prompts, observer, host).run();
}

}  // namespace generate

// SPDX-License-Identifier: Apache-2.0
#include "generation.hpp"

#include <algorithm>
#include <chrono>

namespace generate {
namespace {

using bifolio::token_id;
using clock = std::chrono::steady_clock;

engine_config config_of(const generation_config& config, std::size_t num_prompts) {
  engine_config result = config;
  const std::int64_t wanted = static_cast<std::int64_t>(num_prompts) * config.num_samples;
  result.max_running = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(wanted, config.num_samples, std::max(config.max_running, config.num_samples)));
  return result;
}

/// Of a prompt of `length` tokens.
std::int32_t most_new_tokens(const generation_config& config, std::size_t prompt, std::int32_t length) {
  const std::int32_t possible = config.max_positions - length + 1;  // the last token is sampled and never fed
  const std::int32_t wanted = config.max_new_tokens.empty() ? 0 : config.max_new_tokens[prompt];
  return wanted > 0 ? std::min(wanted, possible) : possible;
}

void submit(engine& to, const generation_config& config, std::span<const std::vector<token_id>> prompts,
            generation_observer& observer) {
  const auto num_samples = static_cast<std::size_t>(config.num_samples);
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    const auto length = static_cast<std::int32_t>(prompts[p].size());
    if (length > config.max_positions) {
      for (std::size_t s = 0; s < num_samples; ++s) observer.on_end(p * num_samples + s, ending::steps);
      continue;
    }
    to.submit({.prompt = prompts[p],
               .max_new_tokens = most_new_tokens(config, p, length),
               .num_samples = config.num_samples,
               .how = config.how,
               .seed = config.seed,
               .first_sequence = p * num_samples},
              observer);
  }
}

generation_progress progress_of(const engine& now, double seconds) {
  const bifolio::scheduler_stats stats = now.schedule().stats();
  generation_progress progress;
  progress.num_steps = stats.num_steps;
  progress.num_running = stats.num_running;
  progress.num_waiting = stats.num_waiting;
  progress.num_finished = stats.num_finished;
  progress.num_fed = stats.num_scheduled_tokens;
  progress.used_blocks = now.manager().stats().num_used_blocks;
  progress.seconds = seconds;
  return progress;
}

}  // namespace

generation_stats generate_all(model_runner& model, bifolio::backend& where, const cache_shape& shape,
                              const generation_config& config, std::span<const std::vector<token_id>> prompts,
                              generation_observer& observer) {
  const std::size_t num_sequences = prompts.size() * static_cast<std::size_t>(config.num_samples);
  engine texts(model, where, shape, config_of(config, prompts.size()));
  const auto report_frame = [&] {
    if (config.watched) observer.on_frame(texts.frame(), texts.letters(observer, num_sequences));
  };
  generation_stats stats;
  const auto start = clock::now();
  submit(texts, config, prompts, observer);
  while (texts.step()) {
    stats.seconds = std::chrono::duration<double>(clock::now() - start).count();
    observer.on_step(progress_of(texts, stats.seconds));
    report_frame();
  }
  report_frame();
  const bifolio::metrics counts = texts.counts();
  stats.num_sequences = static_cast<std::int64_t>(num_sequences);
  stats.record = texts.record();
  stats.attention_seconds = model.attention_seconds();
  stats.config = texts.cache().config();
  stats.cache = counts.cache;
  for (std::int32_t g = 1; g < texts.manager().num_groups(); ++g) stats.more_groups.push_back(texts.manager().stats(g));
  stats.prefix = counts.prefix.value_or(bifolio::prefix_stats{});
  stats.schedule = *counts.scheduler;
  return stats;
}

}  // namespace generate

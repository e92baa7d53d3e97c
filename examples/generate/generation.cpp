// SPDX-License-Identifier: Apache-2.0
#include "generation.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>
#include <chrono>
#include <unordered_map>

#include "input_error.hpp"
#include "paged_attention.hpp"

namespace generate {
namespace {

using bifolio::token_id;
using clock = std::chrono::steady_clock;

double seconds_since(clock::time_point start) { return std::chrono::duration<double>(clock::now() - start).count(); }

bifolio::kv_cache_config manager_config(const bifolio::cache_engine& engine, const generation_config& config,
                                        std::size_t num_prompts, const bifolio::cache_engine* host) {
  bifolio::kv_cache_config result;
  result.block_size = engine.config().layout.block_size;
  result.num_blocks = engine.config().num_blocks;
  const std::int64_t wanted = static_cast<std::int64_t>(num_prompts) * config.num_samples;
  result.max_sequences = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(wanted, config.num_samples, std::max(config.max_batch_seqs, config.num_samples)));
  result.prefix.enabled = config.prefix_caching;
  if (host != nullptr) {
    result.num_host_blocks = host->config().num_blocks;
    result.max_sequences *= 2;  // half of them may be swapped out
  }
  result.max_seq_len = config.max_positions + 1;  // the last token is sampled and never fed
  return result;
}

bifolio::scheduler_config schedule_config(const generation_config& config, const bifolio::kv_cache_config& manager,
                                          std::int32_t vocab_size) {
  bifolio::scheduler_config result;
  result.max_tokens_per_step = config.max_batch_tokens;
  result.max_running = manager.num_host_blocks > 0 ? manager.max_sequences / 2 : manager.max_sequences;
  result.preemption = config.preemption;
  result.vocab_size = vocab_size;
  return result;
}

class generator {
 public:
  generator(model_runner& model, bifolio::cache_engine& engine, const generation_config& config,
            std::span<const std::vector<token_id>> prompts, generation_observer& observer, bifolio::cache_engine* host)
      : model_(model),
        config_(config),
        prompts_(prompts),
        observer_(observer),
        host_(host),
        manager_(manager_config(engine, config, prompts.size(), host)),
        scheduler_(manager_, schedule_config(config, manager_.config(), model.config().vocab_size)),
        attention_(engine, model, config.deterministic) {}

  generation_stats run() {
    const auto start = clock::now();
    for (std::size_t prompt = 0; prompt < prompts_.size(); ++prompt) submit(prompt);
    while (true) {
      const auto step_start = clock::now();
      const bifolio::step_plan& plan = scheduler_.schedule();
      if (plan.empty()) break;  // the oldest sequence always proceeds, so nothing is left
      note_peak();
      compute(plan);
      sample(plan);
      note_time(plan, seconds_since(step_start));
      commit(plan);
      stats_.seconds = seconds_since(start);
      report_progress();
    }
    if (scheduler_.has_work()) {
      throw bifolio::error(bifolio::errc::internal, "the scheduler has work and plans none of it");
    }
    stats_.num_sequences = static_cast<std::int64_t>(prompts_.size()) * config_.num_samples;
    stats_.attention_seconds = model_.attention_seconds();
    stats_.cache = manager_.stats();
    if (manager_.prefix() != nullptr) stats_.prefix = manager_.prefix()->stats();
    stats_.schedule = scheduler_.stats();
    return stats_;
  }

 private:
  [[nodiscard]] std::size_t sequence(std::size_t prompt, std::int32_t sample) const {
    return prompt * static_cast<std::size_t>(config_.num_samples) + static_cast<std::size_t>(sample);
  }

  void submit(std::size_t prompt) {
    for (std::int32_t s = 0; s < config_.num_samples; ++s) {
      samplers_.emplace_back(config_.how, config_.seed, sequence(prompt, s));
    }
    const auto length = static_cast<std::int32_t>(prompts_[prompt].size());
    if (length > config_.max_positions) {
      for (std::int32_t s = 0; s < config_.num_samples; ++s) observer_.on_end(sequence(prompt, s), ending::steps);
      return;
    }
    bifolio::request request;
    request.prompt = prompts_[prompt];
    request.max_new_tokens = config_.max_positions - length + 1;
    request.num_samples = config_.num_samples;
    const bifolio::submit_result submitted = scheduler_.submit(std::move(request));
    if (submitted.status != bifolio::alloc_status::ok) {
      throw input_error(fmt::format(
          "prompt {} and its continuation can take {} positions, {} blocks of {}, and the pool of {} blocks cannot "
          "hold "
          "that: allow more blocks (--num-blocks, or --cache-mib when that is not given) or fewer positions "
          "(--max-positions)",
          prompt + 1, config_.max_positions, bifolio::blocks_for(config_.max_positions, manager_.config().block_size),
          manager_.config().block_size, manager_.config().num_blocks));
    }
    prompt_of_.emplace(to_index(submitted.id), prompt);
  }

  void compute(const bifolio::step_plan& plan) {
    attention_.move_blocks(plan, host_);
    if (plan.seqs.empty()) return;  // sequences were swapped, and are computed from the next step on
    scheduler_.build(inputs_);
    attention_.begin_step(inputs_.batch);
    logits_ = model_.forward(inputs_.tokens, inputs_.positions, inputs_.sample_rows, attention_);
  }

  /// One row of logits for each sequence that samples; as many tokens from it as the plan requests, which is more than
  /// one when a prompt is complete and forks into its samples.
  void sample(const bifolio::step_plan& plan) {
    sampled_.clear();
    const auto vocab = static_cast<std::size_t>(model_.config().vocab_size);
    const std::vector<std::int32_t>& stops = model_.config().eos_ids;
    std::size_t row = 0;
    for (const bifolio::scheduled_seq& seq : plan.seqs) {
      if (seq.num_samples == 0) continue;
      const auto logits = logits_.subspan(row++ * vocab, vocab);
      const std::size_t prompt = prompt_of_.at(to_index(seq.request));
      for (std::int32_t s = 0; s < seq.num_samples; ++s) {
        const std::size_t which = sequence(prompt, seq.sample + s);
        const token_id token = samplers_[which].choose(logits);
        sampled_.push_back({token, std::ranges::find(stops, to_index(token)) != stops.end()});
        observer_.on_token(which, token);
      }
    }
  }

  void commit(const bifolio::step_plan& plan) {
    for (const bifolio::finished_sequence& ended : scheduler_.commit(plan, sampled_)) {
      const bool is_bos = to_index(ended.tokens.back()) == model_.config().bos_id;
      const ending stopped = is_bos ? ending::bos : ending::eos;
      observer_.on_end(sequence(prompt_of_.at(to_index(ended.request)), ended.sample),
                       ended.reason == bifolio::finish_reason::stop ? stopped : ending::steps);
    }
  }

  void note_time(const bifolio::step_plan& plan, double seconds) {
    std::int64_t prefill = 0;
    for (const bifolio::scheduled_seq& seq : plan.seqs) {
      const auto prompt_length = static_cast<std::int32_t>(prompts_[prompt_of_.at(to_index(seq.request))].size());
      const bool decodes = seq.query_len == 1 && seq.num_samples > 0 && seq.seq_len > prompt_length;
      if (!decodes) prefill += seq.query_len;
    }
    const double share = static_cast<double>(prefill) / static_cast<double>(std::max<std::int64_t>(1, plan.num_tokens));
    stats_.num_prefill_tokens += prefill;
    stats_.num_decode_tokens += plan.num_tokens - prefill;
    stats_.prefill_seconds += seconds * share;
    stats_.decode_seconds += seconds * (1 - share);
  }

  void note_peak() {
    stats_.peak_table_entries = std::max(stats_.peak_table_entries, manager_.stats().num_table_entries);
  }

  void report_progress() {
    const bifolio::scheduler_stats now = scheduler_.stats();
    generation_progress progress;
    progress.num_steps = now.num_steps;
    progress.num_running = now.num_running;
    progress.num_waiting = now.num_waiting;
    progress.num_finished = now.num_finished;
    progress.num_fed = now.num_scheduled_tokens;
    progress.used_blocks = manager_.stats().num_used_blocks;
    progress.seconds = stats_.seconds;
    observer_.on_step(progress);
  }

  model_runner& model_;
  const generation_config& config_;
  std::span<const std::vector<token_id>> prompts_;
  generation_observer& observer_;

  bifolio::cache_engine* host_;
  bifolio::kv_cache_manager manager_;
  bifolio::scheduler scheduler_;
  paged_attention attention_;
  std::vector<sampler> samplers_;                             // by sequence
  std::unordered_map<std::uint64_t, std::size_t> prompt_of_;  // by request

  bifolio::step_inputs inputs_;
  std::span<const float> logits_;
  std::vector<bifolio::sampled_token> sampled_;
  generation_stats stats_;
};

}  // namespace

const char* to_string(ending how) noexcept {
  switch (how) {
    case ending::bos:
      return "bos";
    case ending::eos:
      return "eos";
    case ending::steps:
      break;
  }
  return "steps";
}

generation_stats generate_all(model_runner& model, bifolio::cache_engine& engine, const generation_config& config,
                              std::span<const std::vector<token_id>> prompts, generation_observer& observer,
                              bifolio::cache_engine* host) {
  return generator(model, engine, config, prompts, observer, host).run();
}

}  // namespace generate

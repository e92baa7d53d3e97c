// SPDX-License-Identifier: Apache-2.0
#include "engine.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "input_error.hpp"

namespace generate {
namespace {

using bifolio::token_id;
using clock = std::chrono::steady_clock;

cache_load load_of(const engine_config& config) {
  return {.max_positions = config.max_positions,
          .step_tokens = config.max_batch_tokens,
          .max_sequences = config.max_running,
          .prefix_caching = config.prefix_caching,
          .deterministic = config.deterministic};
}

bifolio::scheduler_config schedule_config(const engine_config& config, std::int32_t vocab_size) {
  bifolio::scheduler_config result;
  result.max_tokens_per_step = config.max_batch_tokens;
  result.max_running = config.max_running;
  result.preemption = config.preemption;
  result.vocab_size = vocab_size;
  return result;
}

}  // namespace

const char* to_string(ending how) noexcept {
  switch (how) {
    case ending::bos:
      return "bos";
    case ending::eos:
      return "eos";
    case ending::stopped:
      return "stopped";
    case ending::steps:
      break;
  }
  return "steps";
}

engine::engine(model_runner& model, bifolio::backend& where, const cache_shape& shape, const engine_config& config)
    : model_(model),
      cache_(where, cache_config(model.config(), model.query_type(), shape, load_of(config))),
      scheduler_(cache_.manager(), schedule_config(config, model.config().vocab_size)),
      attention_(cache_, model.config()) {
  if (config.watched) watcher_.emplace(cache_.manager(), scheduler_);
}

void engine::submit(text_request what, sequence_observer& observer) {
  open_request open;
  open.observer = &observer;
  open.first_sequence = what.first_sequence;
  open.prompt_length = static_cast<std::int32_t>(what.prompt.size());
  open.num_running = what.num_samples;
  for (std::int32_t s = 0; s < what.num_samples; ++s) {
    open.samplers.emplace_back(what.how, what.seed, what.first_sequence + static_cast<std::size_t>(s));
  }
  bifolio::request request;
  request.prompt = std::move(what.prompt);
  request.max_new_tokens = what.max_new_tokens;
  request.num_samples = what.num_samples;
  const bifolio::submit_result submitted = scheduler_.submit(std::move(request));
  if (submitted.status != bifolio::alloc_status::ok) {
    const bifolio::kv_cache_config& pool = manager().config();
    const std::int64_t longest = std::int64_t{open.prompt_length} + what.max_new_tokens - 1;  // the last is never fed
    throw input_error(fmt::format(
        "a prompt of {} tokens and {} {} of up to {} more ({} blocks of {} for one alone) can never fit into the pool "
        "of {} blocks: allow more blocks (--num-blocks, or --cache-mib when that is not given) or fewer tokens",
        open.prompt_length, what.num_samples, what.num_samples == 1 ? "text" : "texts", what.max_new_tokens,
        bifolio::blocks_for(longest, pool.block_size), pool.block_size, pool.num_blocks));
  }
  requests_.emplace(to_index(submitted.id), std::move(open));
}

void engine::abort(const sequence_observer& observer) {
  std::erase_if(requests_, [&](const auto& entry) {
    if (entry.second.observer != &observer) return false;
    scheduler_.post_abort(bifolio::request_id{entry.first});
    aborted_.push_back(bifolio::request_id{entry.first});
    return true;
  });
}

bool engine::step() {
  const auto start = clock::now();
  step_ = cache_.begin_step(scheduler_, model_.stream());
  if (!step_) {
    // The plan of an empty step is not to be seen; the requests that ended before it are.
    if (watcher_) watcher_->look_at({.aborted = aborted_}, scheduler_.stats().num_steps + 1);
    aborted_.clear();
    if (scheduler_.has_work()) {  // the oldest sequence always proceeds
      throw bifolio::error(bifolio::errc::internal, "the scheduler has work and plans none of it");
    }
    return false;
  }
  aborted_.clear();
  const bifolio::step_plan& plan = step_.plan();
  if (watcher_) watcher_->look_at(plan, plan.step);
  note_peaks();
  compute();
  sample(plan);
  note_time(plan, std::chrono::duration<double>(clock::now() - start).count());
  commit();
  return true;
}

bifolio::metrics engine::counts() const {
  bifolio::metrics result{.cache = manager().stats(), .prefix = {}, .scheduler = scheduler_.stats()};
  if (const bifolio::prefix_cache* prefix = manager().prefix()) result.prefix = prefix->stats();
  return result;
}

std::string engine::letters(const sequence_observer& observer, std::size_t num_sequences) const {
  std::string result(num_sequences, ' ');
  for (const auto& [id, open] : requests_) {
    if (open.observer != &observer) continue;
    for (std::size_t s = 0; s < open.samplers.size(); ++s) {
      result[open.first_sequence + s] = watcher_->letter(bifolio::request_id{id}, static_cast<std::int32_t>(s));
    }
  }
  return result;
}

void engine::compute() {
  if (step_.num_tokens() == 0) return;  // sequences were swapped, and are computed from the next step on
  attention_.use(step_);
  const bifolio::step_inputs& inputs = step_.inputs();
  logits_ = model_.forward(inputs.tokens, inputs.positions, inputs.sample_rows, attention_);
}

/// One row of logits for each sequence that samples; as many tokens from it as the plan requests, which is more than
/// one when a prompt is complete and forks into its samples.
void engine::sample(const bifolio::step_plan& plan) {
  sampled_.clear();
  const auto vocab = static_cast<std::size_t>(model_.config().vocab_size);
  const std::vector<std::int32_t>& ends = model_.config().eos_ids;
  std::size_t row = 0;
  for (const bifolio::scheduled_seq& seq : plan.seqs) {
    open_request& open = requests_.at(to_index(seq.request));
    if (seq.num_cached_tokens > 0 && open.num_cached_tokens == 0) open.num_cached_tokens = seq.num_cached_tokens;
    if (seq.num_samples == 0) continue;
    const auto logits = logits_.subspan(row++ * vocab, vocab);
    for (std::int32_t s = seq.sample; s < seq.sample + seq.num_samples; ++s) {
      const auto index = static_cast<std::size_t>(s);
      const token_id token = open.samplers[index].choose(logits);
      const char letter = watcher_ ? watcher_->letter(seq.request, s) : '#';
      const bool is_end = std::ranges::find(ends, to_index(token)) != ends.end();
      const bool is_stopped =
          open.observer->on_token({open.first_sequence + index, s, token, is_end, open.num_cached_tokens, letter});
      sampled_.push_back({token, is_stopped || is_end});
    }
  }
}

void engine::note_peaks() {
  const bifolio::cache_stats now = manager().stats();
  record_.peak_table_entries = std::max(record_.peak_table_entries, now.num_table_entries);
  record_.peak_sequences = std::max(record_.peak_sequences, now.num_sequences - now.num_swapped_sequences);
  record_.peak_positions = std::max(record_.peak_positions, now.num_tokens);
}

void engine::note_time(const bifolio::step_plan& plan, double seconds) {
  std::int64_t prefill = 0;
  for (const bifolio::scheduled_seq& seq : plan.seqs) {
    const std::int32_t prompt_length = requests_.at(to_index(seq.request)).prompt_length;
    const bool decodes = seq.query_len == 1 && seq.num_samples > 0 && seq.seq_len > prompt_length;
    if (!decodes) prefill += seq.query_len;
  }
  const double share = static_cast<double>(prefill) / static_cast<double>(std::max<std::int64_t>(1, plan.num_tokens));
  record_.num_prefill_tokens += prefill;
  record_.num_decode_tokens += plan.num_tokens - prefill;
  record_.prefill_seconds += seconds * share;
  record_.decode_seconds += seconds * (1 - share);
}

void engine::commit() {
  const std::vector<std::int32_t>& ends = model_.config().eos_ids;
  const std::vector<bifolio::finished_sequence> finished = step_.commit(sampled_);
  if (watcher_) watcher_->look_at(finished);
  for (const bifolio::finished_sequence& ended : finished) {
    const std::int32_t last = to_index(ended.tokens.back());
    const ending stopped = std::ranges::find(ends, last) == ends.end() ? ending::stopped
                           : last == model_.config().bos_id            ? ending::bos
                                                                       : ending::eos;
    const auto open = requests_.find(to_index(ended.request));
    if (open == requests_.end()) continue;  // its observer ended it a moment ago
    sequence_observer& observer = *open->second.observer;
    const std::size_t sequence = open->second.first_sequence + static_cast<std::size_t>(ended.sample);
    if (--open->second.num_running == 0) requests_.erase(open);  // first, because the observer may go with its end
    observer.on_end(sequence, ended.reason == bifolio::finish_reason::stop ? stopped : ending::steps);
  }
}

}  // namespace generate

// SPDX-License-Identifier: Apache-2.0
/// What running sequences get of a step, and its arrays.

#include <algorithm>
#include <bifolio/scheduler.hpp>

#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "common/scheduler/core.hpp"

namespace bifolio::inline v0_2::detail {

// add_to_step for a plain sequence that decodes, which nearly all are.
void scheduler_core::add_decode(sample_state& sample, const block_copy& copy) noexcept {
  step_plan& plan = current_->plan;
  // Written field by field: a temporary would be read back before its small stores are done, 4 ns a row.
  step_row& row = current_->rows.emplace_back();
  row.sample = &sample;
  row.epoch = sample.epoch;
  row.is_pending = true;
  row.pending_source = sample.pending_source;
  scheduled_seq& what = plan.seqs.emplace_back();
  what.seq = sample.seq;
  what.query_len = 1;
  what.seq_len = ++sample.num_scheduled;
  what.request = sample.request;
  what.sample = sample.index;
  what.num_samples = 1;
  ++sample.num_pending;
  sample.pending_source = {plan.step, current_->num_sampled++};
  sample.step = plan.step;
  ++sample.num_rows_in_flight;
  ++plan.num_tokens;
  if (copy.src != invalid_block) plan.copies.push_back(copy);
}

void scheduler_core::add_to_step(sample_state& sample, std::int32_t query_len, const block_copy& copy) noexcept {
  step_plan& plan = current_->plan;
  const std::int32_t start = sample.num_scheduled;
  const std::int32_t end = start + query_len;
  const std::int32_t expected = sample.num_known + sample.num_pending;
  const std::int32_t num_drafts = std::max(0, end - expected);
  // A request that starts again has its first tokens already: its samples fork without sampling.
  const bool samples = end >= expected && (sample.owner->forked || sample.tokens.empty());
  const std::int32_t num_samples = !samples ? 0 : sample.owner->forked ? 1 + num_drafts : sample.owner->num_live;
  // The next step can go on without knowing the token if there is one, for one sequence alone.
  const bool is_pending =
      num_samples == 1 && sample.owner->forked && !sample.owner->beams && sample.owner->max_draft_tokens == 0;
  current_->rows.push_back({.sample = &sample,
                            .epoch = sample.epoch,
                            .is_ignored = false,
                            .is_pending = is_pending,
                            .is_beam = num_samples > 0 && sample.is_beam,
                            .pending_source = sample.pending_source});
  if (is_pending) {
    ++sample.num_pending;
    sample.pending_source = {plan.step, current_->num_sampled};
  }
  plan.seqs.push_back({.seq = sample.seq,
                       .query_len = query_len,
                       .seq_len = end,
                       .request = sample.request,
                       .sample = sample.index,
                       .num_samples = num_samples,
                       .num_drafts = num_drafts,
                       .num_cached_tokens = 0});
  plan.num_tokens += query_len;
  if (copy.src != invalid_block) plan.copies.push_back(copy);
  current_->num_sampled += num_samples;
  sample.num_scheduled = end;
  sample.step = plan.step;
  ++sample.num_rows_in_flight;
}

namespace {

/// Beams decode together, once each has only its last token to compute, and not in the step that gets it there.
bool is_ready(const sample_state& beam, std::int64_t step) noexcept {
  for (const sample_state& sample : beam.owner->all()) {
    if (sample.place == sample_place::running && (sample.num_to_schedule() != 1 || sample.step == step)) return false;
  }
  return true;
}

bool is_decoding(const sample_state& sample) noexcept { return sample.num_to_schedule() == 1 && sample.has_sampled(); }

}  // namespace

// The first sequence goes on in every step, also when those that decode could use up tokens and blocks alone. Of beams
// that are not ready for a common step, it is the first that has to catch up.
void scheduler_core::schedule_first(std::int64_t& budget) noexcept {
  sample_state* first = running_.head;
  if (first == nullptr) return;
  if (first->is_beam) {
    const request_state* owner = first->owner;
    while (first != nullptr && first->owner == owner && first->num_to_schedule() <= 1) first = first->next;
    if (first == nullptr || first->owner != owner) return;
  } else if (first->num_to_schedule() == 0 || is_decoding(*first)) {
    return;
  }
  schedule_prompt(*first, std::max<std::int64_t>(1, budget - (running_.size - 1)), budget);
}

// By rank. A sequence that finds no block takes it from the running sequence of the last rank, which this pass has not
// reached yet. When it is itself that sequence, it gives up its own blocks.
bool scheduler_core::schedule_decodes(std::int64_t& budget) noexcept {
  bool others = false;
  const std::int64_t step = current_->plan.step;
  for (sample_state* sample = running_.head; sample != nullptr && budget > 0;) {
    sample_state* next = sample->next;
    if (sample->is_beam) {
      while (next != nullptr && next->owner == sample->owner) next = next->next;
      if (!is_ready(*sample, step)) {
        others = true;
      } else if (budget >= sample->owner->num_live) {
        schedule_beams(*sample, budget);
      }
    } else if (sample->step != step) {
      if (is_decoding(*sample)) {
        schedule_decode(*sample, budget);
      } else {
        others = others || sample->num_to_schedule() > 0;
      }
    }
    if (next != nullptr && next->place != sample_place::running) next = nullptr;  // preempted, and all after it
    sample = next;
  }
  return others;
}

bool scheduler_core::waits_for_fences() noexcept {
  holds_back_ = manager_->has_fenced_blocks();
  return holds_back_;
}

bool scheduler_core::is_short_of(const sample_state& sample, std::int64_t num_tokens) const noexcept {
  if (manager_->blocks_to_append(sample.seq, num_tokens) > num_blocks_left(0)) return true;
  for (std::int32_t g = 1; g < num_groups_; ++g) {
    if (manager_->blocks_to_append(sample.seq, num_tokens, 0, g) > num_blocks_left(g)) return true;
  }
  return false;
}

std::int64_t scheduler_core::tokens_that_fit(const sample_state& sample, std::int64_t wanted) const noexcept {
  std::int64_t most = wanted;
  for (std::int32_t g = 0; g < num_groups_; ++g) {
    const std::int64_t missing = manager_->blocks_to_append(sample.seq, wanted, 0, g) - num_blocks_left(g);
    if (missing <= 0) continue;
    if (kind_of(g) == group_kind::state) return 0;
    const kv_cache_config& cache = manager_->config();
    const std::int64_t block_size =
        num_groups_ == 1 ? cache.block_size : cache.groups[static_cast<std::size_t>(g)].block_size;
    const std::int64_t end = (sample.num_scheduled + wanted + block_size - 1) / block_size - missing;
    most = std::min(most, end * block_size - sample.num_scheduled);
  }
  return most;
}

// Slots for more tokens.
append_result scheduler_core::grow(sample_state& sample, std::int32_t num_tokens) noexcept {
  if (holds_back_ && is_short_of(sample, num_tokens)) return {};
  append_result grown = manager_->append(sample.seq, num_tokens);
  while (grown.status != alloc_status::ok) {
    if (waits_for_fences()) return {};
    sample_state& victim = *running_.tail;
    const bool is_itself = &victim == &sample;
    preempt(victim);
    if (is_itself) return {};
    grown = manager_->append(sample.seq, num_tokens);
  }
  return grown;
}

void scheduler_core::schedule_decode(sample_state& sample, std::int64_t& budget) noexcept {
  if (sample.is_plain && manager_->append_in_place(sample.seq, 1)) [[likely]] {
    add_decode(sample, {});
    --budget;
    return;
  }
  std::int32_t query_len = 1;
  if (sample.has_drafts) {
    const std::int64_t most =
        std::min({static_cast<std::int64_t>(sample.drafts.size()), std::int64_t{sample.limit} - sample.num_known - 1,
                  chunk_limit() - 1, budget - 1});
    query_len += static_cast<std::int32_t>(std::max<std::int64_t>(0, most));
    // No sequence gives up blocks for drafts.
    if (is_short_of(sample, query_len)) query_len = 1;
  }
  const append_result grown = grow(sample, query_len);
  if (grown.status != alloc_status::ok) return;
  if (sample.is_plain) [[likely]] {
    add_decode(sample, grown.copy);
  } else {
    add_to_step(sample, query_len, grown.copy);
  }
  budget -= query_len;
}

// All of them or none.
void scheduler_core::schedule_beams(sample_state& first, std::int64_t& budget) noexcept {
  group_blocks needed{};
  for_unit(first, [&](sample_state& sample) {
    for (std::int32_t g = 0; g < num_groups_; ++g) {
      needed[static_cast<std::size_t>(g)] += manager_->blocks_to_append(sample.seq, 1, 0, g);
    }
  });
  const auto is_short = [&] {
    for (std::int32_t g = 0; g < num_groups_; ++g) {
      if (needed[static_cast<std::size_t>(g)] > num_blocks_left(g)) return true;
    }
    return false;
  };
  while (is_short()) {
    if (waits_for_fences()) return;
    const bool is_itself = running_.tail->owner == first.owner;
    preempt(*running_.tail);
    if (is_itself) return;
  }
  // No beam needs more than was counted: a block that all share is copied by all but the last of them.
  for_unit(first, [&](sample_state& sample) {
    const append_result grown = manager_->append(sample.seq, 1);
    add_to_step(sample, 1, grown.copy);
    --budget;
  });
}

// By rank, in chunks. A sequence that decodes and is not part of the step sits it out: it finds no block here either.
void scheduler_core::schedule_prompts(std::int64_t& budget) noexcept {
  for (sample_state* sample = running_.head; sample != nullptr && budget > 0; sample = sample->next) {
    if (sample->step != current_->plan.step && sample->num_to_schedule() > 0) schedule_prompt(*sample, budget, budget);
  }
}

// A prompt takes blocks only from sequences after it that are not part of the step. When there are none it takes what
// is free, and otherwise sits this step out, while the sequences that are in the step proceed.
void scheduler_core::schedule_prompt(sample_state& sample, std::int64_t most, std::int64_t& budget) noexcept {
  // A beam's last known token is computed together with those of the others.
  const std::int64_t remaining = sample.num_to_schedule() - (sample.is_beam ? 1 : 0);
  std::int64_t wanted = std::min({remaining, most, chunk_limit()});
  if (wanted <= 0) return;
  if (num_groups_ > 1) wanted = std::min(wanted, manager_->step_limit(sample.seq));
  for (sample_state* victim = running_.tail; victim != &sample && is_short_of(sample, wanted);) {
    if (waits_for_fences()) break;
    bool is_in_step = victim->owner == sample.owner && sample.is_beam;
    sample_state* earlier = victim->prev;
    for_unit(*victim, [&](const sample_state& each) { is_in_step = is_in_step || each.step == current_->plan.step; });
    while (victim->is_beam && earlier != &sample && earlier->owner == victim->owner) earlier = earlier->prev;
    if (!is_in_step) preempt(*victim);
    victim = earlier;
  }
  const std::int64_t query_len = tokens_that_fit(sample, wanted);
  if (query_len <= 0) return;
  const append_result grown = manager_->append(sample.seq, query_len);
  if (grown.status != alloc_status::ok) return;
  add_to_step(sample, static_cast<std::int32_t>(query_len), grown.copy);
  budget -= query_len;
}

void scheduler_core::build(step_inputs& inputs) const {
  if (unbuilt_ == nullptr) {
    refuse(errc::failed_precondition, "build: the step scheduled last is not in flight; call schedule first");
  }
  const step_plan& plan = unbuilt_->plan;
  const auto num_tokens = static_cast<std::size_t>(plan.num_tokens);
  translate_bad_alloc("build", [&] {
    inputs.tokens.reserve(num_tokens);
    inputs.positions.reserve(num_tokens);
    inputs.sample_rows.reserve(static_cast<std::size_t>(unbuilt_->num_sampled));
    inputs.placeholders.reserve(is_async() ? plan.seqs.size() : 0);
    inputs.groups.resize(static_cast<std::size_t>(num_groups_) - 1);
  });
  manager_->build(inputs.batch, inputs.groups, plan);
  inputs.tokens.resize(num_tokens);
  inputs.positions.resize(num_tokens);
  inputs.sample_rows.clear();
  inputs.placeholders.clear();
  std::int32_t at = 0;
  for (std::size_t i = 0; i < plan.seqs.size(); ++i) {
    const scheduled_seq& row = plan.seqs[i];
    const step_row& in_flight = unbuilt_->rows[i];
    const sample_state& sample = *in_flight.sample;
    if (row.query_len == 1 && row.num_samples == 1 && row.seq_len == sample.num_known &&
        sample.num_known > sample.num_prompt) [[likely]] {  // decodes after its last token
      inputs.tokens[static_cast<std::size_t>(at)] = sample.last_token;
      inputs.positions[static_cast<std::size_t>(at)] = row.seq_len - 1;
      inputs.sample_rows.push_back(at++);
      continue;
    }
    for (std::int32_t position = row.seq_len - row.query_len; position < row.seq_len; ++position, ++at) {
      token_id token{-1};
      if (position < sample.num_known) [[likely]] {
        token = token_at(sample, position);
      } else if (row.num_drafts > 0) {
        token = sample.drafts[static_cast<std::size_t>(position - sample.num_known)];
      } else {
        inputs.placeholders.push_back({in_flight.pending_source.step, in_flight.pending_source.sampled, at});
      }
      inputs.tokens[static_cast<std::size_t>(at)] = token;
      inputs.positions[static_cast<std::size_t>(at)] = position;
    }
    if (row.num_samples > 0) {
      for (std::int32_t k = row.num_drafts; k >= 0; --k) inputs.sample_rows.push_back(at - 1 - k);
    }
  }
}

}  // namespace bifolio::inline v0_2::detail

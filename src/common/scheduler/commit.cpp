// SPDX-License-Identifier: Apache-2.0
/// The second half of a step: what its results change. scheduler_beams.cpp has the part of beams.

#include <algorithm>
#include <bifolio/scheduler.hpp>
#include <bit>

#include "common/base/refuse.hpp"
#include "common/base/translate.hpp"
#include "common/scheduler/core.hpp"

namespace bifolio::inline v0_2::detail {

std::vector<finished_sequence> scheduler_core::commit(const step_plan& plan, std::span<const sampled_token> sampled) {
  require_commit(plan, sampled);
  std::vector<finished_sequence> finished;
  if (plan.empty()) return finished;
  step_in_flight& step = flight(0);
  translate_bad_alloc("commit", [&] { reserve_for_commit(step, sampled, finished); });
  if (is_async()) manager_->retire(step.fence);
  if (unbuilt_ == &step) unbuilt_ = nullptr;
  ++stats_.num_steps;
  stats_.num_scheduled_tokens += step.plan.num_tokens;
  const std::size_t num_rows = step.rows.size();
  const bool publishes = manager_->prefix() != nullptr;
  for (std::size_t i = 0; i < num_rows;) {
    const step_row& row = step.rows[i];
    if (sample_state& sample = *row.sample; row.is_pending && !row.is_ignored && row.epoch == sample.epoch &&
                                            sample.place == sample_place::running &&
                                            sample.num_known > sample.num_prompt) [[likely]] {
      // One more token of a plain sequence. What was computed is the one before it.
      --sample.num_rows_in_flight;
      --sample.num_pending;
      if (step.plan.seqs[i].query_len == 1) [[likely]] {
        publishes ? manager_->commit(sample.seq, std::span(&sample.last_token, 1)) : manager_->commit(sample.seq, 1);
        ++sample.num_computed;
      } else {
        commit_positions(sample, step.plan.seqs[i].query_len);
      }
      append_token(sample, sampled[0], finished);
      sampled = sampled.subspan(1);
      ++i;
      continue;
    }
    if (row.is_beam) [[unlikely]] {
      const std::size_t num_beams = num_beam_rows(step, i);
      commit_beams(step, i, sampled.first(num_beams), finished);
      sampled = sampled.subspan(num_beams);
      i += num_beams;
      continue;
    }
    const auto count = static_cast<std::size_t>(step.plan.seqs[i].num_samples);
    commit_row(row, step.plan.seqs[i], sampled.first(count), finished);
    sampled = sampled.subspan(count);
    ++i;
  }
  first_in_flight_ = (first_in_flight_ + 1) % steps_.size();
  --num_in_flight_;
  return finished;
}

void scheduler_core::require_commit(const step_plan& plan, std::span<const sampled_token> sampled) const {
  if (num_in_flight_ == 0) {
    if (plan.empty()) return;
    refuse(errc::failed_precondition, "commit of step ", plan.step, ": no step is in flight; it was committed already");
  }
  const step_in_flight& step = flight(0);
  if (plan.empty() && plan.step > flight(static_cast<std::size_t>(num_in_flight_) - 1).plan.step) return;
  if (plan.step != step.plan.step || plan.seqs.size() != step.plan.seqs.size()) {
    refuse(errc::invalid_argument, "commit of step ", plan.step, " with ", plan.seqs.size(), " sequences, but step ",
           step.plan.step, " with ", step.plan.seqs.size(), " is the oldest in flight");
  }
  if (sampled.size() != static_cast<std::size_t>(step.num_sampled)) {
    refuse(errc::invalid_argument, "commit got ", sampled.size(), " sampled tokens, the step's sequences need ",
           step.num_sampled);
  }
  bool names_parents = false;
  const std::int32_t last = config_.vocab_size > 0 ? config_.vocab_size - 1 : INT32_MAX;
  for (const sampled_token& token : sampled) {
    if (to_index(token.token) < 0 || to_index(token.token) > last) [[unlikely]]
      require_token("sampled token", token.token);
    names_parents = names_parents || token.from_sample != -1;
  }
  if (names_parents) require_parents(step, sampled);
}

void scheduler_core::reserve_for_commit(const step_in_flight& step, std::span<const sampled_token> sampled,
                                        std::vector<finished_sequence>& finished) {
  demands_.clear();
  const bool publishes = manager_->prefix() != nullptr;
  const bool slides = manager_->config().sliding_window > 0;
  const auto block_size = static_cast<std::uint32_t>(manager_->config().block_size);
  std::size_t num_ending = 0;
  for (std::size_t i = 0; i < step.rows.size();) {
    const scheduled_seq& row = step.plan.seqs[i];
    sample_state& sample = *step.rows[i].sample;
    const auto count = static_cast<std::size_t>(row.num_samples);
    const bool is_there = step.rows[i].epoch == sample.epoch && sample.place == sample_place::running;
    if (is_there) require_own("commit", sample);
    const bool fills = row.query_len > 1 || static_cast<std::uint32_t>(row.seq_len) % block_size == 0;
    if (is_there && (slides || (publishes && fills) || (num_groups_ > 1 && changes_groups(row)))) {
      demands_.push_back({row.seq, row.seq_len});
    }
    if (step.rows[i].is_beam) [[unlikely]] {
      const std::size_t num_beams = num_beam_rows(step, i);
      reserve_beams(step, i, sampled.first(num_beams));
      num_ending += num_beams;
      sampled = sampled.subspan(num_beams);
      i += num_beams;
      continue;
    }
    if (!sample.owner->forked && sample.place == sample_place::running) [[unlikely]] {
      for (sample_state& each : sample.owner->all()) {
        each.tokens.reserve(each.tokens.size() + 1);
        if (&each != &sample) demands_.push_back({invalid_seq, row.seq_len});
      }
      num_ending += count;
    } else if (count > 0) {
      if (sample.tokens.capacity() - sample.tokens.size() < count)
        sample.tokens.reserve(2 * sample.tokens.size() + 16 + count);
      for (std::size_t k = 0; k < count; ++k) num_ending += count > 1 || ends_with(sample, sampled[k]) ? 1U : 0U;
    }
    sampled = sampled.subspan(count);
    ++i;
  }
  finished.reserve(num_ending);
  if (!demands_.empty()) manager_->reserve_host_memory(demands_);
}

// Whether the commit of a row may need host memory in another group than the first: to give back a window's blocks, or
// to register an encoder's output.
bool scheduler_core::changes_groups(const scheduled_seq& row) const noexcept {
  if (row.query_len > 1) return true;
  if (has_cross_ && manager_->num_committed(row.seq) == 0) return true;
  for (const group_config& group : windows_) {
    if (row.seq_len < group.window) continue;
    const auto past = static_cast<std::uint32_t>(row.seq_len + 1 - group.window);
    const auto block_size = static_cast<std::uint32_t>(group.block_size);
    if ((std::has_single_bit(block_size) ? past & (block_size - 1) : past % block_size) == 0) return true;
  }
  return false;
}

void scheduler_core::commit_row(const step_row& row, const scheduled_seq& what, std::span<const sampled_token> sampled,
                                std::vector<finished_sequence>& finished) noexcept {
  sample_state& sample = *row.sample;
  --sample.num_rows_in_flight;
  if (sample.place == sample_place::draining) {
    if (sample.num_rows_in_flight == 0) finish_draining(sample);
    return;
  }
  if (row.is_ignored) return;
  if (row.is_pending) --sample.num_pending;
  if (row.epoch == sample.epoch) {
    if (what.num_drafts > 0) {
      commit_drafts(sample, sampled, finished);
      return;
    }
    commit_positions(sample, what.query_len);
  }
  if (!sample.owner->forked) [[unlikely]] {
    if (!sampled.empty()) commit_forking_row(sample, sampled, finished);
    if (sampled.empty() && sample.owner->beams && !sample.tokens.empty() && sample.num_computed == sample.num_prompt) {
      fork_beams(sample);
    }
    return;
  }
  if (!sampled.empty()) append_token(sample, sampled[0], finished);
}

void scheduler_core::commit_positions(sample_state& sample, std::int32_t num_tokens) noexcept {
  if (manager_->prefix() == nullptr) {
    manager_->commit(sample.seq, num_tokens);
    sample.num_computed += num_tokens;
    return;
  }
  const std::int32_t from_prompt = std::min(num_tokens, std::max(0, sample.num_prompt - sample.num_computed));
  if (from_prompt > 0) {
    manager_->commit(
        sample.seq, std::span<const token_id>(sample.owner->prompt)
                        .subspan(static_cast<std::size_t>(sample.num_computed), static_cast<std::size_t>(from_prompt)));
    sample.num_computed += from_prompt;
  }
  if (num_tokens > from_prompt) {
    manager_->commit(sample.seq, std::span<const token_id>(sample.tokens)
                                     .subspan(static_cast<std::size_t>(sample.num_computed - sample.num_prompt),
                                              static_cast<std::size_t>(num_tokens - from_prompt)));
    sample.num_computed += num_tokens - from_prompt;
  }
}

// The drafts that were sampled as well are kept, and the token after them.
void scheduler_core::commit_drafts(sample_state& sample, std::span<const sampled_token> sampled,
                                   std::vector<finished_sequence>& finished) noexcept {
  std::int32_t num_new = 0;
  bool ends = false;
  bool stopped = false;
  const std::size_t num_drafts = sampled.size() - 1;
  for (std::size_t k = 0; k <= num_drafts && !ends; ++k) {
    ends = ends_with(sample, sampled[k]);
    stopped = sampled[k].stop;
    sample.tokens.push_back(sampled[k].token);
    ++num_new;
    if (k < num_drafts && sampled[k].token != sample.drafts[k]) break;
  }
  stats_.num_draft_tokens += static_cast<std::int64_t>(num_drafts);
  stats_.num_accepted_drafts += num_new - 1;
  stats_.num_sampled_tokens += num_new;
  sample.last_token = sample.tokens.back();
  sample.has_drafts = false;
  sample.drafts.clear();
  commit_positions(sample, num_new);
  sample.num_known += num_new;
  if (ends) {
    finish(sample, stopped, finished);
    return;
  }
  manager_->truncate(sample.seq, sample.num_computed);
  sample.num_scheduled = sample.num_computed;
}

// The prompt is computed: from here on each sample is a sequence of its own. One that ends with its first token needs
// none, and one that gets none (other code opened sequences in the manager) computes the prompt again; beams do
// that together.
void scheduler_core::commit_forking_row(sample_state& first, std::span<const sampled_token> sampled,
                                        std::vector<finished_sequence>& finished) noexcept {
  request_state& owner = *first.owner;
  num_running_slots_taken_ -= first.num_running_slots - 1;
  first.num_running_slots = 1;
  owner.forked = true;
  for (sample_state& sample : owner.all()) {
    sample.is_beam = owner.beams;
    sample.is_plain = !owner.beams && owner.max_draft_tokens == 0;
  }
  sample_state* lacking = nullptr;
  for (std::size_t k = 1; k < sampled.size(); ++k) {
    sample_state& sample = owner.samples[k];
    if (ends_with(sample, sampled[k]) || fork(sample, first)) continue;
    lacking = &sample;
    sample.place = sample_place::waiting;
    waiting_.insert(sample);
  }
  for (std::size_t k = 0; k < sampled.size(); ++k) append_token(owner.samples[k], sampled[k], finished);
  if (lacking != nullptr && lacking->is_beam) recompute(*lacking);
}

bool scheduler_core::fork(sample_state& child, const sample_state& parent) noexcept {
  try {
    const allocate_result forked = manager_->fork(parent.seq);
    if (forked.status != alloc_status::ok) return false;
    start_running(child, forked.seq, parent.num_computed);
    return true;
  } catch (...) {
    return false;  // for lack of host memory
  }
}

void scheduler_core::append_token(sample_state& sample, const sampled_token& what,
                                  std::vector<finished_sequence>& finished) noexcept {
  const bool ends = ends_with(sample, what);
  sample.tokens.push_back(what.token);
  sample.last_token = what.token;
  ++sample.num_known;
  if (sample.has_drafts) [[unlikely]] {
    sample.has_drafts = false;
    sample.drafts.clear();
  }
  ++stats_.num_sampled_tokens;
  if (ends) finish(sample, what.stop, finished);
}

void scheduler_core::finish(sample_state& sample, bool stopped, std::vector<finished_sequence>& finished) noexcept {
  finished.push_back({.request = sample.owner->id,
                      .sample = sample.index,
                      .reason = stopped ? finish_reason::stop : finish_reason::length,
                      .tokens = std::move(sample.tokens),
                      .num_cached_tokens = std::max<std::int64_t>(0, sample.owner->num_cached_tokens)});
  sample.tokens.clear();
  ++stats_.num_finished;
  end(sample);
}

}  // namespace bifolio::inline v0_2::detail

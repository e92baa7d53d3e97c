// SPDX-License-Identifier: Apache-2.0
/// The second half of a step: its arrays, and what its results change.

#include <algorithm>
#include <bifolio/scheduler.hpp>

#include "common/scheduler_state.hpp"
#include "common/translate.hpp"

namespace bifolio {

using detail::sample_place;
using detail::translate_bad_alloc;

void scheduler::build(step_inputs& inputs) const {
  if (!in_flight_) throw error(errc::failed_precondition, "build: no step is in flight; call schedule first");
  const auto num_tokens = static_cast<std::size_t>(plan_.num_tokens);
  translate_bad_alloc("build", [&] {
    inputs.tokens.reserve(num_tokens);
    inputs.positions.reserve(num_tokens);
    inputs.sample_rows.reserve(plan_.seqs.size());
  });
  manager_->build(inputs.batch, plan_);
  inputs.tokens.clear();
  inputs.positions.clear();
  inputs.sample_rows.clear();
  for (std::size_t i = 0; i < plan_.seqs.size(); ++i) {
    const scheduled_seq& row = plan_.seqs[i];
    for (std::int32_t position = row.seq_len - row.query_len; position < row.seq_len; ++position) {
      inputs.tokens.push_back(step_samples_[i]->token_at(position));
      inputs.positions.push_back(position);
    }
    if (row.num_samples > 0) inputs.sample_rows.push_back(static_cast<std::int32_t>(inputs.tokens.size()) - 1);
  }
}

std::vector<finished_sequence> scheduler::commit(const step_plan& plan, std::span<const sampled_token> sampled) {
  require_commit(plan, sampled);
  std::vector<finished_sequence> finished;
  if (!in_flight_) return finished;
  translate_bad_alloc("commit", [&] { reserve_for_commit(sampled, finished); });
  ++stats_.num_steps;
  stats_.num_scheduled_tokens += plan_.num_tokens;
  for (std::size_t i = 0; i < plan_.seqs.size(); ++i) {
    const auto count = static_cast<std::size_t>(plan_.seqs[i].num_samples);
    commit_row(*step_samples_[i], plan_.seqs[i], sampled.first(count), finished);
    sampled = sampled.subspan(count);
  }
  in_flight_ = false;
  return finished;
}

void scheduler::require_commit(const step_plan& plan, std::span<const sampled_token> sampled) const {
  if (!in_flight_ && !plan.seqs.empty()) {
    throw error(errc::failed_precondition,
                "commit of step " + std::to_string(plan.step) + ": no step is in flight; it was committed already");
  }
  if (plan.step != plan_.step || plan.seqs.size() != plan_.seqs.size()) {
    throw error(errc::invalid_argument, "commit of step " + std::to_string(plan.step) + " with " +
                                            std::to_string(plan.seqs.size()) + " sequences, but step " +
                                            std::to_string(plan_.step) + " with " + std::to_string(plan_.seqs.size()) +
                                            " is in flight");
  }
  std::size_t expected = 0;
  for (const scheduled_seq& row : plan_.seqs) expected += static_cast<std::size_t>(row.num_samples);
  if (sampled.size() != expected) {
    throw error(errc::invalid_argument, "commit got " + std::to_string(sampled.size()) +
                                            " sampled tokens, the step's " + "sequences need " +
                                            std::to_string(expected));
  }
  for (const sampled_token& one : sampled) {
    const std::int32_t value = to_index(one.token);
    if (value < 0 || (config_.vocab_size > 0 && value >= config_.vocab_size)) {
      throw error(errc::invalid_argument,
                  "sampled token " + std::to_string(value) + " is not a token id: they are at least 0" +
                      (config_.vocab_size > 0 ? " and below " + std::to_string(config_.vocab_size) : std::string()));
    }
  }
}

bool scheduler::ends_with(const sample_state& one, sampled_token what) const noexcept {
  return what.stop || static_cast<std::int64_t>(one.tokens.size()) + 1 >= one.owner->max_new_tokens;
}

void scheduler::reserve_for_commit(std::span<const sampled_token> sampled, std::vector<finished_sequence>& finished) {
  demands_.clear();
  std::size_t num_ending = 0;
  std::size_t at = 0;
  std::size_t num_forks = 0;
  for (const scheduled_seq& row : plan_.seqs) {
    if (row.num_samples > 1) num_forks += static_cast<std::size_t>(row.num_samples) - 1;
  }
  demands_.reserve(plan_.seqs.size() + num_forks);
  for (std::size_t i = 0; i < plan_.seqs.size(); ++i) {
    const scheduled_seq& row = plan_.seqs[i];
    request_state& owner = *step_samples_[i]->owner;
    demands_.push_back({row.seq, row.seq_len});
    for (std::int32_t k = 0; k < row.num_samples; ++k, ++at) {
      sample_state& one = row.num_samples > 1 ? owner.samples[static_cast<std::size_t>(k)] : *step_samples_[i];
      if (one.tokens.size() == one.tokens.capacity()) one.tokens.reserve(2 * one.tokens.size() + 16);
      if (ends_with(one, sampled[at])) ++num_ending;
      if (k > 0) demands_.push_back({invalid_seq, row.seq_len});
    }
  }
  finished.reserve(num_ending);
  manager_->reserve_host_memory(demands_);
}

void scheduler::commit_row(sample_state& one, const scheduled_seq& row, std::span<const sampled_token> sampled,
                           std::vector<finished_sequence>& finished) noexcept {
  one.in_step = false;
  request_state& owner = *one.owner;
  if (owner.aborted) {
    const std::int32_t num_ending = owner.forked ? 1 : owner.num_open;
    stats_.num_aborted += num_ending;
    owner.num_open -= num_ending - 1;
    end(one);
    return;
  }
  manager_->commit(one.seq, row.query_len);
  one.num_computed += row.query_len;
  if (row.num_samples == 0) return;
  if (!owner.forked) fork_samples(one, sampled);
  for (std::size_t k = 0; k < sampled.size(); ++k) {
    append_token(sampled.size() > 1 ? owner.samples[k] : one, sampled[k], finished);
  }
}

// The prompt is computed: from here on each sample is a sequence of its own. One that ends with its first token needs
// none, and one that gets none (somebody else opened sequences in the manager) waits and computes the prompt again.
void scheduler::fork_samples(sample_state& first, std::span<const sampled_token> sampled) noexcept {
  request_state& owner = *first.owner;
  num_seats_taken_ -= owner.num_samples - 1;
  owner.forked = true;
  for (std::size_t k = 1; k < sampled.size(); ++k) {
    sample_state& one = owner.samples[k];
    if (ends_with(one, sampled[k])) continue;
    const allocate_result forked = manager_->fork(first.seq);
    if (forked.status == alloc_status::ok) {
      start_running(one, forked.seq, first.num_computed);
    } else {
      one.place = sample_place::waiting;
      insert(waiting_, one);
    }
  }
}

void scheduler::append_token(sample_state& one, sampled_token what, std::vector<finished_sequence>& finished) noexcept {
  const bool ends = ends_with(one, what);
  one.tokens.push_back(what.token);
  ++stats_.num_sampled_tokens;
  if (!ends) return;
  finished.push_back({.request = one.owner->id,
                      .sample = one.index,
                      .reason = what.stop ? finish_reason::stop : finish_reason::length,
                      .tokens = std::move(one.tokens)});
  ++stats_.num_finished;
  end(one);
}

}  // namespace bifolio

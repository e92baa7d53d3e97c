// SPDX-License-Identifier: Apache-2.0
/// Beam search: all beams of a request decode in one step, and each commit selects which of them go on. A beam that
/// goes on once keeps its sequence, one that goes on more often is forked, one that is not selected is freed.

#include <algorithm>
#include <bifolio/scheduler.hpp>

#include "common/base/refuse.hpp"
#include "common/scheduler/core.hpp"

namespace bifolio::inline v0_2::detail {

std::size_t scheduler_core::num_beam_rows(const step_in_flight& step, std::size_t first) noexcept {
  if (!step.rows[first].is_beam) return 0;
  const request_state* owner = step.rows[first].sample->owner;
  std::size_t end = first + 1;
  while (end < step.rows.size() && step.rows[end].sample->owner == owner) ++end;
  return end - first;
}

void scheduler_core::require_parents(const step_in_flight& step, std::span<const sampled_token> sampled) const {
  for (std::size_t i = 0; i < step.rows.size();) {
    const std::size_t num_beams = num_beam_rows(step, i);
    const auto count = num_beams > 0 ? num_beams : static_cast<std::size_t>(step.plan.seqs[i].num_samples);
    const std::size_t num_rows = std::max<std::size_t>(1, num_beams);
    for (const sampled_token& token : sampled.first(count)) {
      bool is_there = token.from_sample == -1;
      for (std::size_t k = i; k < i + num_rows; ++k)
        is_there = is_there || token.from_sample == step.plan.seqs[k].sample;
      if (!is_there) {
        refuse(errc::invalid_argument, "from_sample ", token.from_sample,
               " is not a sample that this step computed for request ", to_index(step.plan.seqs[i].request));
      }
    }
    sampled = sampled.subspan(count);
    i += num_rows;
  }
}

void scheduler_core::reserve_beams(const step_in_flight& step, std::size_t first,
                                   std::span<const sampled_token> sampled) {
  if (beam_tokens_.size() < step.rows.size()) beam_tokens_.resize(step.rows.size());
  beam_seqs_.resize(std::max(beam_seqs_.size(), 3 * sampled.size()));
  for (std::size_t j = 0; j < sampled.size(); ++j) {
    const sample_state& own = *step.rows[first + j].sample;
    if (own.place == sample_place::draining || step.rows[first + j].is_ignored) continue;
    require_own("commit", own);
    const std::int32_t from = sampled[j].from_sample;
    const std::vector<token_id>& before =
        from < 0 ? own.tokens : own.owner->samples[static_cast<std::size_t>(from)].tokens;
    std::vector<token_id>& tokens = beam_tokens_[first + j];
    tokens.clear();
    tokens.reserve(std::max(before.size() + 1, own.tokens.capacity()));
    tokens = before;
    tokens.push_back(sampled[j].token);
    const scheduled_seq& row = step.plan.seqs[first + j];
    demands_.push_back({row.seq, row.seq_len});
    demands_.push_back({invalid_seq, row.seq_len});
  }
}

void scheduler_core::commit_beams(step_in_flight& step, std::size_t first, std::span<const sampled_token> sampled,
                                  std::vector<finished_sequence>& finished) noexcept {
  const std::size_t count = sampled.size();
  const auto beam = [&](std::size_t j) -> sample_state& { return *step.rows[first + j].sample; };
  const bool is_ignored = step.rows[first].is_ignored;
  const bool drains = beam(0).place == sample_place::draining;
  for (std::size_t j = 0; j < count; ++j) {
    --beam(j).num_rows_in_flight;
    if (drains && beam(j).num_rows_in_flight == 0) finish_draining(beam(j));  // the last one takes the request with it
  }
  if (drains || is_ignored) return;

  seq_id* old_seqs = beam_seqs_.data();  // [count], invalid once a beam goes on with it
  seq_id* new_seqs = old_seqs + count;   // [count]
  seq_id* heirs = new_seqs + count;      // [count], who went on with it
  const auto ends = [&](std::size_t j) { return ends_with(beam(j), sampled[j]); };
  const auto parent = [&](std::size_t j) {
    if (sampled[j].from_sample < 0) return j;
    std::size_t p = 0;
    while (beam(p).index != sampled[j].from_sample) ++p;
    return p;
  };
  const auto inherit = [&](std::size_t j) {
    const std::size_t p = parent(j);
    new_seqs[j] = heirs[p] = old_seqs[p];
    old_seqs[p] = invalid_seq;
  };
  for (std::size_t j = 0; j < count; ++j) {
    commit_positions(beam(j), step.plan.seqs[first + j].query_len);
    old_seqs[j] = beam(j).seq;
    new_seqs[j] = heirs[j] = invalid_seq;
  }
  for (std::size_t j = 0; j < count; ++j) {
    if (!ends(j) && parent(j) == j) inherit(j);
  }
  for (std::size_t j = 0; j < count; ++j) {
    if (!ends(j) && new_seqs[j] == invalid_seq && old_seqs[parent(j)] != invalid_seq) inherit(j);
  }
  for (std::size_t j = 0; j < count; ++j) {
    if (old_seqs[j] != invalid_seq) manager_->free(old_seqs[j]);
  }
  sample_state* lacking = nullptr;
  for (std::size_t j = 0; j < count; ++j) {
    if (ends(j) || new_seqs[j] != invalid_seq) continue;
    try {
      const allocate_result forked = manager_->fork(heirs[parent(j)]);
      if (forked.status == alloc_status::ok) new_seqs[j] = forked.seq;
    } catch (...) {  // for lack of host memory
    }
    if (new_seqs[j] == invalid_seq) lacking = &beam(j);
  }
  stats_.num_sampled_tokens += static_cast<std::int64_t>(count);
  for (std::size_t j = 0; j < count; ++j) {
    sample_state& sample = beam(j);
    const bool ending = ends(j);
    sample.seq = new_seqs[j];
    sample.tokens.swap(beam_tokens_[first + j]);
    sample.last_token = sampled[j].token;
    ++sample.num_known;
    if (ending) finish(sample, sampled[j].stop, finished);
  }
  if (lacking != nullptr) recompute(*lacking);
}

// A request that started again has computed its prompt: each beam goes on from there with its own tokens.
void scheduler_core::fork_beams(sample_state& leader) noexcept {
  request_state& owner = *leader.owner;
  num_running_slots_taken_ -= leader.num_running_slots - 1;
  leader.num_running_slots = 1;
  owner.forked = true;
  for (sample_state& sample : owner.all()) {
    if (sample.place >= sample_place::draining) continue;
    sample.is_beam = true;
    sample.num_known = sample.num_prompt + static_cast<std::int32_t>(sample.tokens.size());
    if (&sample == &leader || fork(sample, leader)) continue;
    recompute(leader);
    return;
  }
}

}  // namespace bifolio::inline v0_2::detail

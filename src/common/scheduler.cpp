// SPDX-License-Identifier: Apache-2.0
/// Intake, lifetime of requests, and the decisions of a step. scheduler_commit.cpp holds the other half of a step.

#include <algorithm>
#include <bifolio/scheduler.hpp>
#include <utility>

#include "common/request_intake.hpp"
#include "common/require.hpp"
#include "common/scheduler_state.hpp"
#include "common/translate.hpp"

namespace bifolio {

using detail::require_between;
using detail::sample_place;
using detail::translate_bad_alloc;

namespace {

scheduler_config validated(const scheduler_config& config, const kv_cache_manager& manager) {
  require_between("max_tokens_per_step", config.max_tokens_per_step, 1, INT32_MAX);
  require_between("max_running", config.max_running, 1, manager.config().max_sequences);
  require_between("max_chunk_tokens", config.max_chunk_tokens, 0, INT32_MAX);
  require_between("vocab_size", config.vocab_size, 0, INT32_MAX);
  return config;
}

constexpr std::size_t num_buckets = 1024;

}  // namespace

std::string_view to_string(finish_reason reason) noexcept {
  return reason == finish_reason::length ? "length" : "stop";
}

scheduler::scheduler(kv_cache_manager& manager, const scheduler_config& config)
    : manager_(&manager), config_(validated(config, manager)) {
  translate_bad_alloc("scheduler", [&] {
    intake_ = std::make_unique<detail::request_intake>();
    buckets_.resize(num_buckets, nullptr);
    const auto seats = static_cast<std::size_t>(config_.max_running);
    plan_.seqs.reserve(seats);
    plan_.copies.reserve(seats);
    plan_.preempted.reserve(seats);
    step_samples_.reserve(seats);
    demands_.reserve(2 * seats);
  });
}

scheduler::~scheduler() {
  detail::intake_message message;
  while (intake_->try_pop(message)) delete message.arrived;
  while (arrivals_ != nullptr) delete std::exchange(arrivals_, arrivals_->next);
  while (running_.head != nullptr) stop_running(*running_.head);
  for (request_state* chain : buckets_) {
    while (chain != nullptr) delete std::exchange(chain, chain->next);
  }
}

submit_result scheduler::submit(request what) {
  if (what.prompt.empty()) throw error(errc::invalid_argument, "a request's prompt has 0 tokens, at least 1 is needed");
  require_between("max_new_tokens", what.max_new_tokens, 1, INT32_MAX);
  require_between("num_samples", what.num_samples, 1, config_.max_running);
  const std::int64_t last_token = config_.vocab_size == 0 ? INT32_MAX : config_.vocab_size - 1;
  for (const token_id token : what.prompt) require_between("token id", to_index(token), 0, last_token);
  // The last sampled token is never fed, so it needs no slot.
  const std::int64_t num_slots = static_cast<std::int64_t>(what.prompt.size()) + what.max_new_tokens - 1;
  require_between("prompt tokens + max_new_tokens - 1", num_slots, 1, manager_->config().max_seq_len);
  if (manager_->blocks_at_peak(num_slots, chunk_limit()) > manager_->config().num_blocks) {
    return {invalid_request, alloc_status::never};
  }
  return translate_bad_alloc("submit", [&]() -> submit_result {
    auto state = std::make_unique<request_state>();
    state->samples = std::make_unique<sample_state[]>(static_cast<std::size_t>(what.num_samples));
    state->prompt = std::move(what.prompt);
    state->max_new_tokens = what.max_new_tokens;
    state->num_samples = state->num_open = what.num_samples;
    for (std::int32_t i = 0; i < what.num_samples; ++i) {
      state->samples[static_cast<std::size_t>(i)].owner = state.get();
      state->samples[static_cast<std::size_t>(i)].index = i;
    }
    const request_id id{next_request_.fetch_add(1, std::memory_order_relaxed)};
    state->id = id;
    num_unseen_.fetch_add(1, std::memory_order_relaxed);
    try {
      intake_->push({state.get(), invalid_request});
    } catch (...) {
      num_unseen_.fetch_sub(1, std::memory_order_relaxed);
      throw;
    }
    (void)state.release();
    return {id, alloc_status::ok};
  });
}

void scheduler::post_abort(request_id id) {
  translate_bad_alloc("post_abort", [&] { intake_->push({nullptr, id}); });
}

const step_plan& scheduler::schedule() {
  if (in_flight_) {
    throw error(errc::failed_precondition,
                "step " + std::to_string(plan_.step) + " was not committed yet; one step at a time is in flight");
  }
  translate_bad_alloc("schedule", [&] {
    receive();
    reserve_for_step();
  });
  ++plan_.step;
  plan_.seqs.clear();
  plan_.copies.clear();
  plan_.preempted.clear();
  plan_.aborted.clear();
  plan_.num_tokens = 0;
  step_samples_.clear();
  accept_arrivals();
  std::int64_t budget = config_.max_tokens_per_step;
  // The oldest goes on in every step, also when those that decode could use up tokens and blocks alone.
  if (running_.head != nullptr && !running_.head->is_decoding()) {
    schedule_prompt(*running_.head, std::max<std::int64_t>(1, budget - (running_.size - 1)), budget);
  }
  if (schedule_decodes(budget)) schedule_prompts(budget);
  if (plan_.preempted.empty()) admit(budget);
  in_flight_ = !plan_.seqs.empty();
  return plan_;
}

void scheduler::receive() {
  detail::intake_message message;
  while (true) {
    if (posted_aborts_.size() == posted_aborts_.capacity()) posted_aborts_.reserve(2 * posted_aborts_.size() + 8);
    if (!intake_->try_pop(message)) return;
    if (message.arrived == nullptr) {
      posted_aborts_.push_back(message.dropped);
    } else {
      message.arrived->next = std::exchange(arrivals_, message.arrived);
    }
  }
}

void scheduler::reserve_for_step() {
  plan_.aborted.reserve(posted_aborts_.size());
  demands_.clear();
  for (const sample_state* one = running_.head; one != nullptr; one = one->next) {
    demands_.push_back({one->seq, one->num_computed + std::min(one->num_remaining(), chunk_limit())});
  }
  // Any of the candidates may get any of the free records, so each record is made ready for the longest.
  const std::int64_t num_new = config_.max_running - num_seats_taken_;
  std::int64_t longest = 0;
  std::int64_t candidates = 0;
  for (const sample_state* one = waiting_.head; one != nullptr && candidates < num_new; one = one->next, ++candidates) {
    longest = std::max(longest, one->num_known());
  }
  for (const request_state* one = arrivals_; one != nullptr; one = one->next, ++candidates) {
    longest = std::max(longest, static_cast<std::int64_t>(one->prompt.size()));
  }
  longest = std::min(longest, chunk_limit());
  for (std::int64_t i = 0; i < std::min(num_new, candidates); ++i) demands_.push_back({invalid_seq, longest});
  manager_->reserve_host_memory(demands_);
}

void scheduler::accept_arrivals() noexcept {
  while (arrivals_ != nullptr) {
    request_state* arrived = std::exchange(arrivals_, arrivals_->next);
    num_unseen_.fetch_sub(1, std::memory_order_relaxed);
    remember(*arrived);
    arrived->samples[0].place = sample_place::waiting;
    insert(waiting_, arrived->samples[0]);
  }
  for (const request_id id : posted_aborts_) {
    if (abort(id) == errc::ok) plan_.aborted.push_back(id);
  }
  posted_aborts_.clear();
}

// Oldest first. Whoever finds no block takes it from the latest arrival, which this pass has not reached yet, and gives
// up its own when it is the latest itself.
bool scheduler::schedule_decodes(std::int64_t& budget) noexcept {
  bool others = false;
  for (sample_state* one = running_.head; one != nullptr && budget > 0;) {
    sample_state* next = one->next;
    if (!one->in_step && one->is_decoding()) {
      append_result grown = manager_->append(one->seq, 1);
      while (grown.status != alloc_status::ok) {
        sample_state* victim = running_.tail;
        if (victim == next) next = nullptr;
        preempt(*victim);
        if (victim == one) break;
        grown = manager_->append(one->seq, 1);
      }
      if (one->place == sample_place::running) {
        add_to_step(*one, 1, grown.copy);
        --budget;
      }
    } else {
      others = others || !one->in_step;
    }
    one = next;
  }
  return others;
}

// Oldest first, in chunks.
void scheduler::schedule_prompts(std::int64_t& budget) noexcept {
  for (sample_state* one = running_.head; one != nullptr && budget > 0; one = one->next) {
    if (!one->in_step && !one->is_decoding()) schedule_prompt(*one, budget, budget);
  }
}

// A prompt takes blocks only from later arrivals that are not part of the step; when there are none it takes what is
// free, and otherwise sits this step out, while the sequences that are in the step proceed.
void scheduler::schedule_prompt(sample_state& one, std::int64_t most, std::int64_t& budget) noexcept {
  const std::int64_t block_size = manager_->config().block_size;
  const std::int64_t wanted = std::min({one.num_remaining(), most, chunk_limit()});
  for (sample_state* victim = running_.tail;
       victim != &one && manager_->can_append(one.seq, wanted) != alloc_status::ok;) {
    sample_state* earlier = victim->prev;
    if (!victim->in_step) preempt(*victim);
    victim = earlier;
  }
  const std::int64_t room = manager_->num_table_blocks(one.seq) * block_size - one.num_computed;
  const std::int64_t query_len = std::min(wanted, room + manager_->num_free_blocks() * block_size);
  if (query_len == 0) return;
  const append_result grown = manager_->append(one.seq, query_len);
  if (grown.status != alloc_status::ok) return;
  add_to_step(one, query_len, grown.copy);
  budget -= query_len;
}

// In order of arrival, and never past one that has to wait, so that nobody waits for ever.
void scheduler::admit(std::int64_t& budget) noexcept {
  if (waiting_.head == nullptr) return;
  std::int64_t promised = promised_blocks();
  while (waiting_.head != nullptr && budget > 0) {
    sample_state& one = *waiting_.head;
    if (num_seats_taken_ + one.num_seats() > config_.max_running) return;
    const std::int64_t forks = one.num_seats() - 1;  // each will want a block of its own
    // Alone in the pool a request needs no watermark: it was accepted because it fits.
    if (running_.size > 0 && manager_->can_allocate(one.num_known(), chunk_limit(),
                                                    std::min(promised + forks, max_num_blocks)) != alloc_status::ok) {
      return;
    }
    const std::int64_t query_len = std::min({one.num_known(), budget, chunk_limit()});
    const allocate_result opened = manager_->allocate(query_len);
    if (opened.status != alloc_status::ok) return;
    remove(waiting_, one);
    start_running(one, opened.seq, 0);
    add_to_step(one, query_len, {});
    budget -= query_len;
    promised += forks + manager_->blocks_at_peak(one.num_known(), chunk_limit()) -
                manager_->blocks_at_peak(query_len, chunk_limit());
  }
}

// What prompts that were admitted will still ask for. Growth by decoding is what the watermark is for.
std::int64_t scheduler::promised_blocks() const noexcept {
  std::int64_t promised = 0;
  for (const sample_state* one = running_.head; one != nullptr; one = one->next) {
    promised += one->num_seats() - 1;
    const std::int64_t held = manager_->num_table_blocks(one->seq) - manager_->num_released_blocks(one->seq);
    promised += std::max<std::int64_t>(0, manager_->blocks_at_peak(one->num_known(), chunk_limit()) - held);
  }
  return promised;
}

std::int64_t scheduler::chunk_limit() const noexcept {
  return config_.max_chunk_tokens == 0 ? config_.max_tokens_per_step
                                       : std::min(config_.max_tokens_per_step, config_.max_chunk_tokens);
}

void scheduler::add_to_step(sample_state& one, std::int64_t query_len, const block_copy& copy) noexcept {
  const bool completes = query_len == one.num_remaining();
  plan_.seqs.push_back({.seq = one.seq,
                        .query_len = static_cast<std::int32_t>(query_len),
                        .seq_len = static_cast<std::int32_t>(one.num_computed + query_len),
                        .request = one.owner->id,
                        .sample = one.index,
                        .num_samples = completes ? static_cast<std::int32_t>(one.num_seats()) : 0});
  plan_.num_tokens += query_len;
  if (copy.src != invalid_block) plan_.copies.push_back(copy);
  step_samples_.push_back(&one);
  one.in_step = true;
}

void scheduler::preempt(sample_state& victim) noexcept {
  plan_.preempted.push_back(victim.seq);
  stop_running(victim);
  victim.place = sample_place::waiting;
  insert(waiting_, victim);
  ++stats_.num_preemptions;
}

void scheduler::start_running(sample_state& one, seq_id seq, std::int64_t num_computed) noexcept {
  one.seq = seq;
  one.num_computed = num_computed;
  one.place = sample_place::running;
  num_seats_taken_ += one.num_seats();
  insert(running_, one);
}

void scheduler::stop_running(sample_state& one) noexcept {
  manager_->free(one.seq);  // this scheduler's own handle, so it is open
  remove(running_, one);
  num_seats_taken_ -= one.num_seats();
  one.seq = invalid_seq;
  one.num_computed = 0;
}

void scheduler::end(sample_state& one) noexcept {
  if (one.place == sample_place::running) stop_running(one);
  if (one.place == sample_place::waiting) remove(waiting_, one);
  one.place = sample_place::ended;
  if (--one.owner->num_open == 0) {
    forget(*one.owner);
    delete one.owner;
  }
}

errc scheduler::abort(request_id id) noexcept {
  request_state* found = find(id);
  if (found == nullptr || found->aborted) return errc::not_found;
  found->aborted = true;
  // The step in flight still writes into the blocks of its sequences: those go when it is committed, and an unforked
  // request goes with its sample 0.
  const std::int32_t num_samples = found->num_samples;
  const bool whole = !found->forked && found->samples[0].in_step;
  for (std::int32_t i = whole ? num_samples : 0; i < num_samples; ++i) {
    sample_state& one = found->samples[static_cast<std::size_t>(i)];
    if (one.in_step || one.place == sample_place::ended) continue;
    ++stats_.num_aborted;
    const bool last = found->num_open == 1;
    end(one);
    if (last) break;
  }
  return errc::ok;
}

detail::request_state* scheduler::find(request_id id) const noexcept {
  request_state* one = buckets_[to_index(id) % num_buckets];
  while (one != nullptr && one->id != id) one = one->next;
  return one;
}

void scheduler::remember(request_state& one) noexcept {
  request_state*& bucket = buckets_[to_index(one.id) % num_buckets];
  one.next = bucket;
  bucket = &one;
}

void scheduler::forget(request_state& one) noexcept {
  request_state** link = &buckets_[to_index(one.id) % num_buckets];
  while (*link != &one) link = &(*link)->next;
  *link = one.next;
}

std::span<const token_id> scheduler::output(request_id id, std::int32_t sample) const noexcept {
  const request_state* found = find(id);
  if (found == nullptr || sample < 0 || sample >= found->num_samples) return {};
  return found->samples[static_cast<std::size_t>(sample)].tokens;
}

scheduler_stats scheduler::stats() const noexcept {
  scheduler_stats result = stats_;
  result.num_waiting = waiting_.size;
  result.num_running = running_.size;
  return result;
}

}  // namespace bifolio

// SPDX-License-Identifier: Apache-2.0
/// Intake, lifetime of requests, and the order of a step's decisions.

#include <algorithm>
#include <bifolio/scheduler.hpp>
#include <utility>

#include "common/base/make_room.hpp"
#include "common/base/refuse.hpp"
#include "common/base/require.hpp"
#include "common/base/translate.hpp"
#include "common/cache/require_limits.hpp"
#include "common/scheduler/core.hpp"
#include "common/scheduler/request_intake.hpp"

namespace bifolio::inline v0_2 {

std::string_view to_string(finish_reason reason) noexcept {
  return reason == finish_reason::length ? "length" : "stop";
}

scheduler::scheduler(kv_cache_manager& manager, const scheduler_config& config)
    : core_(detail::translate_bad_alloc("scheduler",
                                        [&] { return std::make_unique<detail::scheduler_core>(manager, config); })) {}
scheduler::~scheduler() = default;

const scheduler_config& scheduler::config() const noexcept { return core_->config(); }
const kv_cache_manager& scheduler::manager() const noexcept { return core_->manager(); }
submit_result scheduler::submit(request what) { return core_->submit(std::move(what)); }
void scheduler::post_abort(request_id id) { core_->post_abort(id); }
void scheduler::propose(request_id id, std::int32_t sample, std::span<const token_id> drafts) {
  core_->propose(id, sample, drafts);
}
const step_plan& scheduler::schedule() { return core_->schedule(); }
void scheduler::build(step_inputs& inputs) const { core_->build(inputs); }
std::vector<finished_sequence> scheduler::commit(const step_plan& plan, std::span<const sampled_token> sampled) {
  return core_->commit(plan, sampled);
}
std::int64_t scheduler::fail_swaps(const step_plan& plan) { return core_->fail_swaps(plan); }
errc scheduler::abort(request_id id) noexcept { return core_->abort(id); }
bool scheduler::has_work() const noexcept { return core_->has_work(); }
std::int32_t scheduler::num_steps_in_flight() const noexcept { return core_->num_in_flight(); }
std::span<const token_id> scheduler::output(request_id id, std::int32_t sample) const noexcept {
  return core_->output(id, sample);
}
scheduler_stats scheduler::stats() const noexcept { return core_->stats(); }
std::string scheduler::check() const { return core_->check(); }
std::uint64_t scheduler::digest() const noexcept { return core_->digest(); }

namespace detail {
namespace {

scheduler_config validated(const scheduler_config& config, const kv_cache_manager& manager) {
  require_between("max_tokens_per_step", config.max_tokens_per_step, 1, INT32_MAX);
  require_between("max_running", config.max_running, 1, manager.config().max_sequences);
  require_between("max_chunk_tokens", config.max_chunk_tokens, 0, INT32_MAX);
  require_between("vocab_size", config.vocab_size, 0, INT32_MAX);
  require_between("max_steps_in_flight", config.max_steps_in_flight, 1, block_pool::max_open_fences);
  require_between("preemption", static_cast<std::int64_t>(config.preemption), 0, 2);
  require_between("priority_span", config.priority_span, 0, 1'000'000'000);
  for (std::size_t g = 0; g < manager.config().groups.size(); ++g) {
    const group_config& group = manager.config().groups[g];
    if (group.kind != group_kind::state) continue;
    // The state before the first step in flight, and those that the steps write.
    const std::int64_t least = 1 + std::max<std::int64_t>(config.max_steps_in_flight, 1 + group.num_draft_slots);
    require_between(("group " + std::to_string(g) + ": num_blocks for max_steps_in_flight and num_draft_slots").c_str(),
                    group.num_blocks, least, max_num_blocks);
  }
  if (!(config.swap_block_cost >= 0)) {
    refuse(errc::invalid_argument, "swap_block_cost ", config.swap_block_cost, " is not a number of at least 0");
  }
  return config;
}

constexpr std::size_t num_buckets = 1024;

void prefetch_sample(const sample_state& sample) noexcept {
  for (std::size_t at = 0; at < sizeof sample; at += 64) prefetch_to_write(reinterpret_cast<const char*>(&sample) + at);
}

}  // namespace

scheduler_core::scheduler_core(kv_cache_manager& manager, const scheduler_config& config)
    : manager_(&manager),
      num_groups_(manager.num_groups()),
      config_(validated(config, manager)),
      intake_(std::make_unique<request_intake>()) {
  for (const group_config& group : manager.config().groups) {
    if (group.kind == group_kind::window) windows_.push_back(group);
    has_cross_ = has_cross_ || group.kind == group_kind::cross;
  }
  buckets_.resize(num_buckets, nullptr);
  const auto seats = static_cast<std::size_t>(config_.max_running);
  steps_.resize(static_cast<std::size_t>(config_.max_steps_in_flight));
  for (step_in_flight& step : steps_) {
    step.rows.reserve(seats);
    step.plan.seqs.reserve(seats);
    step.plan.copies.reserve(seats);
    step.plan.preempted.reserve(seats);
    step.plan.swapped_out.reserve(seats);
    step.plan.swapped_in.reserve(seats);
    if (num_groups_ == 1) continue;
    step.plan.encoded.reserve(seats);
    step.plan.groups.resize(static_cast<std::size_t>(num_groups_) - 1);
    for (group_moves& group : step.plan.groups) group.copies.reserve(seats);
  }
  moves_.resize(static_cast<std::size_t>(num_groups_));
  unit_seqs_.reserve(seats);
  demands_.reserve(2 * seats);
}

scheduler_core::~scheduler_core() {
  intake_message message;
  while (intake_->try_pop(message)) delete message.arrived;
  for (const arrival& arrived : arrivals_) delete arrived.state;
  for (; num_in_flight_ > 0; --num_in_flight_) {
    try {
      if (is_async()) manager_->retire(flight(0).fence);
    } catch (const error&) {
      // Somebody else has an older one open, or retired it; what it holds back stays with the manager.
    }
    first_in_flight_ = (first_in_flight_ + 1) % steps_.size();
  }
  for (request_state* chain : buckets_) {
    while (chain != nullptr) {
      for (sample_state& sample : chain->all()) {
        if (manager_->contains(sample.seq)) manager_->free(sample.seq);
      }
      delete std::exchange(chain, chain->next);
    }
  }
}

void scheduler_core::require_token(const char* what, token_id token) const {
  require_between(what, to_index(token), 0, config_.vocab_size == 0 ? INT32_MAX : config_.vocab_size - 1);
}

void scheduler_core::require_group_limits(const request& what) const {
  std::int32_t max_cross_tokens = 0;
  for (const group_config& group : manager_->config().groups) {
    if (group.kind == group_kind::cross) max_cross_tokens = group.max_tokens;
    if (group.kind == group_kind::state && num_groups_ > 1) {
      require_between("max_draft_tokens with num_draft_slots of states", what.max_draft_tokens, 0,
                      group.num_draft_slots);
    }
  }
  require_between("num_cross_tokens", what.num_cross_tokens, 0, max_cross_tokens);
}

// Blocks of a group that a request needs when it is alone.
std::int64_t scheduler_core::blocks_needed(const request& what, std::int64_t num_slots, std::int32_t group) const {
  const kv_cache_config& cache = manager_->config();
  const std::int64_t block_size =
      num_groups_ == 1 ? cache.block_size : cache.groups[static_cast<std::size_t>(group)].block_size;
  const group_kind kind = num_groups_ > 1             ? kind_of(group)
                          : cache.sliding_window == 0 ? group_kind::full
                                                      : group_kind::window;
  if (kind == group_kind::cross) return (what.num_cross_tokens + block_size - 1) / block_size;
  const std::int64_t needed = peak_of(num_slots, group);
  if (what.beam_width <= 1) return needed;
  if (kind == group_kind::state) return what.beam_width * needed;
  // Beams hold their blocks at the same time; only the prompt's full blocks are certain to be shared.
  // A tail that two share is copied for both before it is given up.
  const auto num_prompt = static_cast<std::int64_t>(what.prompt.size());
  const std::int64_t shared = kind == group_kind::full ? num_prompt / block_size : 0;
  return shared + what.beam_width * (needed - shared) + what.beam_width / 2;
}

submit_result scheduler_core::submit(request&& what) {
  if (what.prompt.empty()) {
    refuse(errc::invalid_argument, "a request's prompt has 0 tokens, at least 1 is needed");
  }
  require_between("max_new_tokens", what.max_new_tokens, 1, INT32_MAX);
  require_between("num_samples", what.num_samples, 1, config_.max_running);
  // All beams decode in the same step.
  require_between("beam_width", what.beam_width, 0, std::min(config_.max_running, config_.max_tokens_per_step));
  require_between("max_draft_tokens", what.max_draft_tokens, 0, chunk_limit() - 1);
  require_between("priority", what.priority, -1'000'000, 1'000'000);
  if (what.beam_width > 0 && (what.num_samples > 1 || what.max_draft_tokens > 0)) {
    refuse(errc::invalid_argument, "beam_width ", what.beam_width,
           " goes with num_samples 1 and max_draft_tokens 0, not with ", what.num_samples, " and ",
           what.max_draft_tokens);
  }
  for (const token_id token : what.prompt) require_token("token id", token);
  const auto num_prompt = static_cast<std::int64_t>(what.prompt.size());
  std::int64_t position = 0;
  for (const owned_extra_key& extra : what.extras) {
    require_between("an extra key's position", extra.position, position, num_prompt - 1);
    position = extra.position;
  }
  require_salt(what.prefix_salt);
  require_extras(what.extras);
  // The last sampled token is never fed, so it needs no slot.
  const std::int64_t num_slots = num_prompt + what.max_new_tokens - 1;
  require_between("prompt tokens + max_new_tokens - 1", num_slots, 1, manager_->config().max_seq_len);
  require_group_limits(what);
  for (std::int32_t g = 0; g < num_groups_; ++g) {
    if (blocks_needed(what, num_slots, g) > manager_->pool(g).num_blocks())
      return {invalid_request, alloc_status::never};
  }
  return translate_bad_alloc("submit", [&]() -> submit_result {
    auto state = std::make_unique<request_state>();
    state->width = state->num_open = state->num_live = std::max(what.num_samples, what.beam_width);
    state->samples = std::make_unique<sample_state[]>(static_cast<std::size_t>(state->width));
    state->extra_views.reserve(what.extras.size());
    state->prompt = std::move(what.prompt);
    state->beams = what.beam_width > 0;
    state->forked = state->width == 1 && !state->beams;
    state->max_draft_tokens = what.max_draft_tokens;
    state->priority = what.priority;
    state->salt = std::move(what.prefix_salt);
    state->adapter_id = what.adapter_id;
    state->extras = std::move(what.extras);
    for (const owned_extra_key& extra : state->extras) {
      state->extra_views.push_back({extra.position, extra.kind, extra.value});
    }
    state->retention = what.retention;
    state->num_cross_tokens = what.num_cross_tokens;
    state->cross_digest = std::move(what.cross_digest);
    for (sample_state& sample : state->all()) {
      sample.owner = state.get();
      sample.index = static_cast<std::int32_t>(&sample - state->samples.get());
      sample.num_known = sample.num_prompt = static_cast<std::int32_t>(num_prompt);
      sample.limit = sample.num_prompt + what.max_new_tokens;
      sample.is_plain = state->forked && what.max_draft_tokens == 0;
    }
    const request_id id{next_request_.fetch_add(1, std::memory_order_relaxed)};
    state->id = id;
    for (sample_state& sample : state->all()) sample.request = id;
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

void scheduler_core::post_abort(request_id id) {
  translate_bad_alloc("post_abort", [&] { intake_->push({nullptr, id}); });
}

void scheduler_core::propose(request_id id, std::int32_t index, std::span<const token_id> drafts) {
  request_state* found = find(id);
  const bool is_there = found != nullptr && index >= 0 && index < found->width &&
                        found->samples[static_cast<std::size_t>(index)].place < sample_place::draining;
  if (!is_there) {
    refuse(errc::not_found, "propose: sample ", index, " of request ", to_index(id), " is unknown or has ended");
  }
  require_between("number of drafts", static_cast<std::int64_t>(drafts.size()), 0, found->max_draft_tokens);
  for (const token_id token : drafts) require_token("draft token", token);
  sample_state& sample = found->samples[static_cast<std::size_t>(index)];
  if (sample.num_rows_in_flight > 0) {
    refuse(errc::failed_precondition, "propose: a step in flight computes request ", to_index(id),
           "; its next token is not known yet");
  }
  translate_bad_alloc("propose", [&] { sample.drafts.reserve(drafts.size()); });
  sample.drafts.assign(drafts.begin(), drafts.end());
  sample.has_drafts = !drafts.empty();
}

const step_plan& scheduler_core::schedule() {
  if (num_in_flight_ == config_.max_steps_in_flight) {
    refuse(errc::failed_precondition, "step ", flight(0).plan.step, " was not committed yet; max_steps_in_flight is ",
           config_.max_steps_in_flight);
  }
  if (is_async() && manager_->pool().num_open_fences() == block_pool::max_open_fences) {
    refuse(errc::failed_precondition, "schedule: all ", block_pool::max_open_fences,
           " fences of the manager are open, and a step needs one; retire the oldest");
  }
  translate_bad_alloc("schedule", [&] {
    receive();
    reserve_for_step();
  });
  current_ = &flight(static_cast<std::size_t>(num_in_flight_));
  step_plan& plan = current_->plan;
  plan.step = ++num_planned_;
  plan.seqs.clear();
  plan.copies.clear();
  plan.swap_outs.clear();
  plan.swap_ins.clear();
  plan.swapped_out.clear();
  plan.swapped_in.clear();
  plan.preempted.clear();
  plan.aborted.clear();
  plan.encoded.clear();
  for (group_moves& group : plan.groups) {
    group.copies.clear();
    group.swap_outs.clear();
    group.swap_ins.clear();
  }
  plan.num_tokens = 0;
  current_->rows.clear();
  current_->num_sampled = 0;
  unbuilt_ = nullptr;
  holds_back_ = lacked_memory_ = false;

  accept_arrivals();
  std::int64_t budget = config_.max_tokens_per_step;
  schedule_first(budget);
  if (schedule_decodes(budget)) schedule_prompts(budget);
  if (plan.preempted.empty() && plan.swapped_out.empty() && !holds_back_) admit(budget);
  end_scheduling();
  return plan;
}

void scheduler_core::end_scheduling() {
  step_plan& plan = current_->plan;
  // There is room for one copy of each running sequence.
  for (std::int32_t g = 1; g < num_groups_; ++g) {
    manager_->drain_copies(g, plan.groups[static_cast<std::size_t>(g) - 1].copies);
  }
  if (plan.empty() && lacked_memory_ && num_in_flight_ == 0) {
    --num_planned_;
    refuse(errc::out_of_memory, "schedule: the host has no memory to admit a request; nothing was scheduled");
  }
  for (const request_id id : dropped_) plan.aborted.push_back(id);
  dropped_.clear();
  if (plan.empty()) return;
  if (is_async()) current_->fence = manager_->open_fence();
  ++num_in_flight_;
  unbuilt_ = current_;
}

void scheduler_core::receive() {
  intake_message message;
  while (true) {
    make_room(posted_aborts_, 1);
    make_room(arrivals_, 1);
    if (!intake_->try_pop(message)) break;
    if (message.arrived == nullptr) {
      posted_aborts_.push_back(message.dropped);
    } else {
      const std::int64_t rank = -std::int64_t{message.arrived->priority} * config_.priority_span;
      arrivals_.push_back({rank, message.arrived->id, message.arrived});
    }
  }
  if (arrivals_.size() > 1) {  // not only new ones: a call before this may have failed ahead of here
    std::sort(arrivals_.begin(), arrivals_.end(),
              [](const arrival& a, const arrival& b) { return a.rank != b.rank ? a.rank < b.rank : a.id < b.id; });
  }
  const std::size_t num_dropped = dropped_.size() + posted_aborts_.size();
  dropped_.reserve(num_dropped);
  flight(static_cast<std::size_t>(num_in_flight_)).plan.aborted.reserve(num_dropped);
}

bool scheduler_core::is_own(const sample_state& sample) const noexcept {
  if (sample.place == sample_place::running) [[likely]]
    return manager_->is_at(sample.seq, sample.num_scheduled, sample.num_computed);
  return manager_->contains(sample.seq) &&
         manager_->is_swapped_out(sample.seq);  // and can only be freed and swapped in
}

void scheduler_core::require_own(const char* call, const sample_state& sample) const {
  if (is_own(sample)) [[likely]]
    return;
  const bool is_there = manager_->contains(sample.seq);
  refuse(is_there ? errc::failed_precondition : errc::not_found, call, ": the sequence of request ",
         to_index(sample.request), ", sample ", sample.index, ", was ", is_there ? "changed" : "freed",
         " on the manager by other code than its scheduler; abort the request");
}

void scheduler_core::reserve_for_step() {
  demands_.clear();
  // The lists run through memory in any order. Nearly all that run now were part of the last step (those that ended
  // since only cost the hint).
  for (const step_row& row : flight(static_cast<std::size_t>(num_in_flight_) + steps_.size() - 1).rows) {
    prefetch_to_write(row.sample);
    prefetch_to_write(reinterpret_cast<const char*>(row.sample) + 64);
  }
  // Decisions cannot fail, so what they rely on is checked here. No decision is about requests that will be aborted.
  const auto is_dropped = [&](const sample_state& sample) {
    if (is_own(sample)) [[likely]]
      return false;
    const bool is_aborted =
        std::find(posted_aborts_.begin(), posted_aborts_.end(), sample.request) != posted_aborts_.end();
    if (!is_aborted) require_own("schedule", sample);
    return true;
  };
  for (const sample_state* sample = swapped_.head; sample != nullptr; sample = sample->next) (void)is_dropped(*sample);
  for (const sample_state* sample = running_.head; sample != nullptr; sample = sample->next) {
    if (is_dropped(*sample)) continue;
    const std::int32_t wanted = sample->num_to_schedule();
    if (!sample->has_drafts && manager_->has_room(sample->seq, wanted)) continue;
    const std::int64_t with_drafts = wanted + static_cast<std::int64_t>(sample->drafts.size());
    demands_.push_back({sample->seq, sample->num_scheduled + std::min(with_drafts, chunk_limit())});
  }
  if (waiting_.head != nullptr || !arrivals_.empty()) {
    const bool looks_up = manager_->prefix() != nullptr;
    // Those that may be admitted, by rank. Any of them may get any of the free records, so each record is made ready
    // for the longest.
    const std::int64_t num_new = config_.max_running - num_running_slots_taken_;
    const std::int64_t this_step = num_planned_ + 1;
    std::int64_t longest = 0;
    std::int64_t candidates = 0;
    sample_state* waiting = waiting_.head;
    auto arrived = arrivals_.begin();
    for (; candidates < num_new && (waiting != nullptr || arrived != arrivals_.end()); ++candidates) {
      const bool takes_waiting =
          arrived == arrivals_.end() || (waiting != nullptr && waiting->owner->rank <= arrived->rank + this_step);
      sample_state& sample = takes_waiting ? *waiting : arrived->state->samples[0];
      if (takes_waiting) {
        waiting = waiting->next;
      } else {
        ++arrived;
      }
      longest = std::max<std::int64_t>(longest, sample.num_known);
      if (looks_up) prepare_look_up(sample);
    }
    longest = std::min(longest, chunk_limit());
    for (std::int64_t i = 0; i < candidates; ++i) demands_.push_back({invalid_seq, longest});
  }
  if (!demands_.empty()) manager_->reserve_host_memory(demands_);
}

// Keys are computed once, and go on where the sequence went on.
void scheduler_core::prepare_look_up(sample_state& sample) const {
  const auto num_known = static_cast<std::size_t>(sample.num_known);
  if (sample.num_known > sample.num_prompt && sample.known.size() != num_known) {
    std::vector<token_id> known;
    known.reserve(num_known);
    known = sample.owner->prompt;
    known.insert(known.end(), sample.tokens.begin(), sample.tokens.end());
    sample.known.swap(known);
  }
  const auto num_full = num_known / static_cast<std::size_t>(manager_->config().block_size);
  if (sample.keys.size() < num_full) manager_->append_keys(view_of(sample), sample.keys);
}

void scheduler_core::accept_arrivals() noexcept {
  // From the last one on, so that each has its place at or before that of the one before.
  constexpr std::size_t ahead = 8;  // of memory that other threads wrote
  const sample_state* successor = nullptr;
  for (std::size_t i = arrivals_.size(); i-- > 0;) {
    if (i >= ahead) prefetch_sample(arrivals_[i - ahead].state->samples[0]);
    request_state& arrived = *arrivals_[i].state;
    arrived.rank = num_planned_ + arrivals_[i].rank;
    remember(arrived);
    sample_state& leader = arrived.samples[0];
    leader.place = sample_place::waiting;
    waiting_.insert(leader, successor);
    successor = &leader;
  }
  num_unseen_.fetch_sub(static_cast<std::int64_t>(arrivals_.size()), std::memory_order_relaxed);
  arrivals_.clear();
  for (const request_id id : posted_aborts_) {
    if (abort(id) == errc::ok) dropped_.push_back(id);
  }
  posted_aborts_.clear();
}

errc scheduler_core::abort(request_id id) noexcept {
  request_state* found = find(id);
  if (found == nullptr || found->num_live == 0) return errc::not_found;
  stats_.num_aborted += found->num_live;
  // Ending the last sample deletes the request.
  for (std::int32_t i = 0, left = found->num_live; left > 0; ++i) {
    sample_state& sample = found->samples[static_cast<std::size_t>(i)];
    if (sample.place >= sample_place::draining) continue;
    --left;
    end(sample);
  }
  return errc::ok;
}

request_state* scheduler_core::find(request_id id) const noexcept {
  request_state* owner = buckets_[to_index(id) % num_buckets];
  while (owner != nullptr && owner->id != id) owner = owner->next;
  return owner;
}

void scheduler_core::remember(request_state& owner) noexcept {
  request_state*& bucket = buckets_[to_index(owner.id) % num_buckets];
  owner.next = bucket;
  bucket = &owner;
}

void scheduler_core::forget(request_state& owner) noexcept {
  request_state** link = &buckets_[to_index(owner.id) % num_buckets];
  while (*link != &owner) link = &(*link)->next;
  *link = owner.next;
}

std::span<const token_id> scheduler_core::output(request_id id, std::int32_t index) const noexcept {
  const request_state* found = find(id);
  if (found == nullptr || index < 0 || index >= found->width) return {};
  const sample_state& sample = found->samples[static_cast<std::size_t>(index)];
  if (sample.place >= sample_place::draining) return {};
  return sample.tokens;
}

scheduler_stats scheduler_core::stats() const noexcept {
  scheduler_stats result = stats_;
  result.num_waiting = waiting_.size;
  result.num_running = running_.size;
  result.num_swapped = swapped_.size;
  return result;
}

}  // namespace detail
}  // namespace bifolio::inline v0_2

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The implementation of `scheduler`: requests, their samples, the lists that hold the samples, the steps in flight,
/// and the decisions. The sources are split by subject: requests.cpp (intake and the order of a step), step.cpp
/// (running sequences), admission.cpp, preemption.cpp (and failed swaps), commit.cpp, beams.cpp, check.cpp.
///
/// Preparation (receive, reserve_…) may throw and decides nothing; decisions are noexcept. Host memory for their calls
/// of the manager is reserved before. Where that is not possible (interned scopes, lists of swapped blocks) a lack of
/// host memory counts as "later".

#include <algorithm>
#include <atomic>
#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bifolio::inline v0_2::detail {

class request_intake;
struct request_state;

enum class sample_place : std::uint8_t {
  unforked,  ///< its request's prompt is still being computed, by the leading sample for all
  waiting,   ///< in the waiting list, without blocks
  running,   ///< in the running list, with a sequence of the manager
  swapped,   ///< in the swapped list, with a sequence that is swapped out
  draining,  ///< ended, but part of steps in flight; keeps its sequence until those are committed
  ended,
};

/// Which token of which step in flight a sequence goes on with.
struct token_source {
  std::int64_t step = 0;
  std::int32_t sampled = 0;
};

struct alignas(64) sample_state {
  // Read in every step: three cache lines.
  sample_state* next = nullptr;
  seq_id seq = invalid_seq;        ///< while running or swapped, perhaps while draining
  std::int32_t num_known = 0;      ///< prompt and, unless the request is unforked, sampled tokens
  std::int32_t num_pending = 0;    ///< tokens after those, which steps in flight sample
  std::int32_t num_scheduled = 0;  ///< leading tokens with slots
  std::int32_t num_computed = 0;   ///< leading tokens whose K and V are in the cache for good
  std::int32_t num_prompt = 0;
  std::int32_t limit = 0;  ///< num_prompt + max_new_tokens
  std::int64_t step = 0;   ///< the last one that it is part of
  sample_place place = sample_place::unforked;
  bool is_plain = false;  ///< decodes token by token, independently of other samples
  bool is_beam = false;   ///< of a beam search whose prompt is computed: proceeds with the others
  bool has_drafts = false;
  std::int32_t index = 0;

  std::int32_t num_rows_in_flight = 0;
  std::uint32_t epoch = 0;  ///< rows of steps in flight with another one were computed in blocks that it lost
  token_id last_token{};    ///< sampled last, also when `tokens` went to the caller
  request_id request = invalid_request;
  request_state* owner = nullptr;
  std::vector<token_id> tokens;  ///< sampled
  token_source pending_source;   ///< where its last pending token comes from

  sample_state* prev = nullptr;
  std::int32_t num_running_slots = 0;  ///< running sequences that it counts as, while it holds device blocks
  std::int64_t swap_step = 0;          ///< the last step that moved its blocks
  std::vector<token_id> drafts;        ///< proposed
  std::vector<token_id> known;         ///< while waiting with sampled tokens: prompt and tokens, for looking it up
  std::vector<content_key> keys;       ///< of the first full blocks, computed once

  /// Tokens that the next step could compute. 0: it waits for a commit.
  [[nodiscard]] std::int32_t num_to_schedule() const noexcept {
    const std::int32_t expected = num_known + num_pending;
    return expected < limit ? expected - num_scheduled : 0;
  }
  [[nodiscard]] bool has_sampled() const noexcept { return num_known + num_pending > num_prompt; }
};

struct request_state {
  request_id id = invalid_request;
  std::int64_t rank = 0;      ///< smaller goes first
  std::int32_t width = 1;     ///< samples or beams
  std::int32_t num_open = 1;  ///< samples that have not ended, draining ones included
  std::int32_t num_live = 1;  ///< samples that are neither draining nor ended
  bool beams = false;
  bool forked = true;  ///< each sample goes its own way; false while one computes the prompt for all
  std::int32_t max_draft_tokens = 0;
  std::int32_t priority = 0;
  std::int64_t num_cached_tokens = -1;  ///< when first admitted
  std::vector<token_id> prompt;
  std::unique_ptr<sample_state[]> samples;  // [width]
  std::string salt;
  std::uint64_t adapter_id = 0;
  std::vector<owned_extra_key> extras;
  std::vector<extra_key> extra_views;  // of extras
  std::int32_t num_cross_tokens = 0;
  std::vector<std::byte> cross_digest;
  retention_hint retention;
  request_state* next = nullptr;  ///< in its bucket

  [[nodiscard]] std::span<sample_state> all() const noexcept {
    return {samples.get(), static_cast<std::size_t>(width)};
  }
};

/// The token at a position below num_known.
[[nodiscard]] inline token_id token_at(const sample_state& sample, std::int32_t position) noexcept {
  if (position < sample.num_prompt) return sample.owner->prompt[static_cast<std::size_t>(position)];
  const auto i = static_cast<std::size_t>(position - sample.num_prompt);
  return i < sample.tokens.size() ? sample.tokens[i] : sample.last_token;
}

[[nodiscard]] inline bool ranks_before(const sample_state& a, const sample_state& b) noexcept {
  if (a.owner == b.owner) return a.index < b.index;
  if (a.owner->rank != b.owner->rank) return a.owner->rank < b.owner->rank;
  return a.owner->id < b.owner->id;
}

/// Calls `what` for a sample, or for all its beams in the same place: they are preempted and return together.
template <class What>
void for_unit(sample_state& sample, What what) {
  if (!sample.is_beam) {
    what(sample);
    return;
  }
  const sample_place place = sample.place;
  for (sample_state& other : sample.owner->all()) {
    if (other.place == place) what(other);
  }
}

/// Samples by rank, through their own links.
struct sample_list {
  sample_state* head = nullptr;
  sample_state* tail = nullptr;
  std::int64_t size = 0;

  /// Searches its place from the back, where nearly all belong, or from `successor`, a sample of the list that ranks
  /// after it.
  void insert(sample_state& sample, const sample_state* successor = nullptr) noexcept {
    sample_state* before = successor != nullptr ? successor->prev : tail;
    while (before != nullptr && ranks_before(sample, *before)) before = before->prev;
    sample_state* after = before != nullptr ? before->next : head;
    sample.prev = before;
    sample.next = after;
    (before != nullptr ? before->next : head) = &sample;
    (after != nullptr ? after->prev : tail) = &sample;
    ++size;
  }
  void remove(sample_state& sample) noexcept {
    (sample.prev != nullptr ? sample.prev->next : head) = sample.next;
    (sample.next != nullptr ? sample.next->prev : tail) = sample.prev;
    sample.prev = sample.next = nullptr;
    --size;
  }
};

/// A request that no decision has seen yet, with what it is sorted by.
struct arrival {
  std::int64_t rank = 0;  ///< less the step that will accept it
  request_id id = invalid_request;
  request_state* state = nullptr;  ///< owned
};

/// A sequence's part of a step in flight.
struct step_row {
  sample_state* sample = nullptr;
  std::uint32_t epoch = 0;
  bool is_ignored = false;  ///< its results count for nothing
  bool is_pending = false;  ///< its one token is counted in num_pending
  bool is_beam = false;     ///< one of the beams that decode together
  token_source pending_source;
};

struct step_in_flight {
  step_plan plan;
  std::vector<step_row> rows;  // [plan.seqs.size()]
  std::int32_t num_sampled = 0;
  fence_id fence{};  ///< only with several steps in flight
};

class scheduler_core {
 public:
  scheduler_core(kv_cache_manager& manager, const scheduler_config& config);
  scheduler_core(const scheduler_core&) = delete;
  scheduler_core& operator=(const scheduler_core&) = delete;
  ~scheduler_core();

  submit_result submit(request&& what);
  void post_abort(request_id id);
  void propose(request_id id, std::int32_t index, std::span<const token_id> drafts);
  const step_plan& schedule();
  void build(step_inputs& inputs) const;
  std::vector<finished_sequence> commit(const step_plan& plan, std::span<const sampled_token> sampled);
  std::int64_t fail_swaps(const step_plan& plan);
  errc abort(request_id id) noexcept;
  [[nodiscard]] bool has_work() const noexcept {
    return waiting_.size + running_.size + swapped_.size > 0 || num_in_flight_ > 0 ||
           num_unseen_.load(std::memory_order_relaxed) > 0;
  }
  [[nodiscard]] std::int32_t num_in_flight() const noexcept { return num_in_flight_; }
  [[nodiscard]] std::span<const token_id> output(request_id id, std::int32_t index) const noexcept;
  [[nodiscard]] scheduler_stats stats() const noexcept;
  [[nodiscard]] std::string check() const;
  [[nodiscard]] std::uint64_t digest() const noexcept;
  [[nodiscard]] const scheduler_config& config() const noexcept { return config_; }
  [[nodiscard]] const kv_cache_manager& manager() const noexcept { return *manager_; }

 private:
  // requests.cpp
  void receive();
  void reserve_for_step();
  void prepare_look_up(sample_state& sample) const;
  void accept_arrivals() noexcept;
  /// Whether the manager's record of a sequence with blocks is as this scheduler left it.
  [[nodiscard]] bool is_own(const sample_state& sample) const noexcept;
  void require_own(const char* call, const sample_state& sample) const;
  void end_scheduling();
  [[nodiscard]] request_state* find(request_id id) const noexcept;
  void remember(request_state& owner) noexcept;
  void forget(request_state& owner) noexcept;
  void require_token(const char* what, token_id token) const;
  void require_group_limits(const request& what) const;
  [[nodiscard]] std::int64_t blocks_needed(const request& what, std::int64_t num_slots, std::int32_t group) const;

  // step.cpp
  void schedule_first(std::int64_t& budget) noexcept;
  /// Whether sequences run that still compute known tokens.
  [[nodiscard]] bool schedule_decodes(std::int64_t& budget) noexcept;
  void schedule_decode(sample_state& sample, std::int64_t& budget) noexcept;
  void schedule_beams(sample_state& first, std::int64_t& budget) noexcept;
  void schedule_prompts(std::int64_t& budget) noexcept;
  void schedule_prompt(sample_state& sample, std::int64_t most, std::int64_t& budget) noexcept;
  /// Blocks of a layer group that this step may still take.
  [[nodiscard]] std::int64_t num_blocks_left(std::int32_t group) const noexcept {
    if (holds_back_) return 0;
    return group == 0 ? manager_->num_free_blocks() : manager_->num_free_blocks(group);
  }
  /// Whether any layer group lacks blocks for so many more tokens of a sequence.
  [[nodiscard]] bool is_short_of(const sample_state& sample, std::int64_t num_tokens) const noexcept;
  /// At most `wanted` tokens, as many as the blocks that are left suffice for.
  [[nodiscard]] std::int64_t tokens_that_fit(const sample_state& sample, std::int64_t wanted) const noexcept;
  /// Whether steps in flight still hold released blocks. These come back by themselves, so until then no sequence is
  /// preempted for blocks, and sequences that are served later in this step take none.
  [[nodiscard]] bool waits_for_fences() noexcept;
  [[nodiscard]] append_result grow(sample_state& sample, std::int32_t num_tokens) noexcept;
  void add_decode(sample_state& sample, const block_copy& copy) noexcept;
  void add_to_step(sample_state& sample, std::int32_t query_len, const block_copy& copy) noexcept;
  [[nodiscard]] std::int64_t chunk_limit() const noexcept {
    return config_.max_chunk_tokens == 0 ? config_.max_tokens_per_step
                                         : std::min(config_.max_tokens_per_step, config_.max_chunk_tokens);
  }

  // admission.cpp
  void admit(std::int64_t& budget) noexcept;
  [[nodiscard]] bool admit_waiting(sample_state& sample, std::int64_t& budget, group_blocks& promised) noexcept;
  [[nodiscard]] bool return_swapped(sample_state& first, group_blocks& promised) noexcept;
  [[nodiscard]] group_blocks promised_blocks() const noexcept;
  /// Blocks of a group that a sequence of `num_tokens` holds at its peak.
  [[nodiscard]] std::int64_t peak_of(std::int64_t num_tokens, std::int32_t group) const noexcept {
    return num_groups_ == 1 ? manager_->blocks_at_peak(num_tokens, chunk_limit())
                            : manager_->blocks_at_peak(num_tokens, chunk_limit(), group);
  }
  /// Blocks of a group that a fork needs at once.
  [[nodiscard]] std::int64_t blocks_of_fork(std::int32_t group) const noexcept;
  [[nodiscard]] group_kind kind_of(std::int32_t group) const noexcept {
    return num_groups_ == 1 ? group_kind::full : manager_->config().groups[static_cast<std::size_t>(group)].kind;
  }
  [[nodiscard]] prompt_view view_of(const sample_state& sample) const noexcept;

  // preemption.cpp
  /// Swaps unit_seqs_, the copies to the plan's lists. Throws as the manager does.
  [[nodiscard]] alloc_status move_unit(bool out);
  void preempt(sample_state& sample) noexcept;
  [[nodiscard]] bool swap_out(sample_state& sample) noexcept;
  void recompute(sample_state& sample) noexcept;
  void ignore_rows(sample_state& sample, std::int64_t from_step, bool pending_ones) noexcept;
  void start_running(sample_state& sample, seq_id seq, std::int32_t num_computed) noexcept;
  /// Leaves its list; the blocks stay.
  void leave_list(sample_state& sample) noexcept;
  void drop_blocks(sample_state& sample) noexcept;
  /// Out of all lists; gone at once or when no step in flight has it any more.
  void end(sample_state& sample) noexcept;
  void finish_draining(sample_state& sample) noexcept;

  // commit.cpp
  void require_commit(const step_plan& plan, std::span<const sampled_token> sampled) const;
  void reserve_for_commit(const step_in_flight& step, std::span<const sampled_token> sampled,
                          std::vector<finished_sequence>& finished);
  [[nodiscard]] bool changes_groups(const scheduled_seq& row) const noexcept;
  void commit_row(const step_row& row, const scheduled_seq& what, std::span<const sampled_token> sampled,
                  std::vector<finished_sequence>& finished) noexcept;
  void commit_forking_row(sample_state& first, std::span<const sampled_token> sampled,
                          std::vector<finished_sequence>& finished) noexcept;
  void commit_positions(sample_state& sample, std::int32_t num_tokens) noexcept;
  void commit_drafts(sample_state& sample, std::span<const sampled_token> sampled,
                     std::vector<finished_sequence>& finished) noexcept;
  [[nodiscard]] bool fork(sample_state& child, const sample_state& parent) noexcept;
  void append_token(sample_state& sample, const sampled_token& what, std::vector<finished_sequence>& finished) noexcept;
  void finish(sample_state& sample, bool stopped, std::vector<finished_sequence>& finished) noexcept;
  [[nodiscard]] static bool ends_with(const sample_state& sample, const sampled_token& what) noexcept {
    return what.stop || sample.num_prompt + static_cast<std::int32_t>(sample.tokens.size()) + 1 >= sample.limit;
  }

  // beams.cpp
  void require_parents(const step_in_flight& step, std::span<const sampled_token> sampled) const;
  /// Rows of beams that decode in this step, one after another, from `first` on; 0 for another row.
  [[nodiscard]] static std::size_t num_beam_rows(const step_in_flight& step, std::size_t first) noexcept;
  void reserve_beams(const step_in_flight& step, std::size_t first, std::span<const sampled_token> sampled);
  void commit_beams(step_in_flight& step, std::size_t first, std::span<const sampled_token> sampled,
                    std::vector<finished_sequence>& finished) noexcept;
  void fork_beams(sample_state& leader) noexcept;

  [[nodiscard]] step_in_flight& flight(std::size_t age) noexcept {
    return steps_[(first_in_flight_ + age) % steps_.size()];
  }
  [[nodiscard]] const step_in_flight& flight(std::size_t age) const noexcept {
    return steps_[(first_in_flight_ + age) % steps_.size()];
  }
  [[nodiscard]] bool is_async() const noexcept { return steps_.size() > 1; }

  kv_cache_manager* manager_;
  std::int32_t num_groups_;
  std::vector<group_config> windows_;  // layer groups of this kind
  bool has_cross_ = false;             // a layer group of this kind
  scheduler_config config_;
  std::unique_ptr<request_intake> intake_;
  // Numbers only: the queue is what hands requests from one thread to another.
  std::atomic<std::uint64_t> next_request_{1};
  std::atomic<std::int64_t> num_unseen_{0};

  std::vector<arrival> arrivals_;          // taken from the intake, seen by no decision yet; by rank
  std::vector<request_id> posted_aborts_;  // the same
  std::vector<request_id> dropped_;        // by those, not reported yet
  std::vector<request_state*> buckets_;    // requests by id, chained
  sample_list waiting_;
  sample_list running_;
  sample_list swapped_;
  std::int64_t num_running_slots_taken_ =
      0;  // sequences with device blocks, an unforked request counting all its samples

  std::vector<step_in_flight> steps_;  // ring
  std::size_t first_in_flight_ = 0;
  std::int32_t num_in_flight_ = 0;
  std::int64_t num_planned_ = 0;       // steps, empty ones included
  step_in_flight* current_ = nullptr;  // the one that is being decided
  step_in_flight* unbuilt_ = nullptr;  // scheduled last, if it is in flight
  bool holds_back_ = false;            // a sequence waits for fenced blocks: later ones take none in this step
  bool lacked_memory_ = false;         // something was deferred for lack of host memory in this step

  // The waiting prompt that did not fit: it is looked up again only when something changed.
  const sample_state* deferred_ = nullptr;
  std::int64_t deferred_free_blocks_ = 0;
  std::int64_t deferred_step_ = 0;

  std::vector<seq_id> unit_seqs_;                   // scratch of swaps
  std::vector<std::vector<block_copy>> moves_;      // scratch of swaps, [num_groups_]
  std::vector<std::vector<token_id>> beam_tokens_;  // scratch of commit, [rows of beams], what each will have
  std::vector<seq_id> beam_seqs_;                   // scratch of commit, [3 · beams]
  std::vector<host_demand> demands_;
  scheduler_stats stats_;
};

}  // namespace bifolio::inline v0_2::detail

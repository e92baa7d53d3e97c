// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Continuous batching: decides in each step which sequences compute how many tokens, and asks the cache manager for
/// their slots. It knows tokens and block counts, never memory, devices or models; the caller computes and samples.
///
///   submit → waiting → running → finished      one step: schedule, build, (compute, sample), commit
///               ↑         │
///               └ preempt ┘ by recomputation: blocks are released, tokens kept
///
/// Both queues are in order of arrival. A step first serves the oldest running sequence, then gives one token to each
/// that is decoding, then what is left of the token budget to prompts in chunks, oldest first, then admits waiting
/// requests while their blocks fit beside the watermark and beside what admitted prompts will still ask for. When
/// blocks run out, the latest arrival is preempted; the oldest sequence is part of every step, because a request that
/// does not fit into an empty pool is never accepted. So a full pool never stops the schedule, and no request waits
/// forever.
///
/// A request with several samples computes its prompt once; when that is done it forks, and its samples share the
/// prompt's blocks, copying on write.

#include <atomic>
#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/stats.hpp>
#include <bifolio/step.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace bifolio {

struct scheduler_config {
  std::int32_t max_tokens_per_step = 2048;  ///< computed in one step, ≥ 1
  std::int32_t max_running = 256;           ///< sequences with blocks, 1 … the manager's max_sequences
  std::int32_t max_chunk_tokens = 0;        ///< of one sequence in one step, ≥ 1; 0: only the step's budget limits it
  std::int32_t vocab_size = 0;              ///< token ids are below it; 0: unknown
};

struct request {
  std::vector<token_id> prompt;      ///< at least one; ids ≥ 0
  std::int32_t max_new_tokens = 16;  ///< of each sample, ≥ 1
  std::int32_t num_samples = 1;      ///< continuations of the one prompt, 1 … max_running
};

struct submit_result {
  request_id id = invalid_request;  ///< valid if ok
  alloc_status status = alloc_status::never;
};

/// What the caller sampled. `stop` ends the sequence after this token (end of text, a stop word, the user left).
struct sampled_token {
  token_id token{};
  bool stop = false;
};

enum class finish_reason : std::uint8_t {
  length,  ///< max_new_tokens are there
  stop,    ///< the caller said so
};

/// "length" or "stop".
[[nodiscard]] BIFOLIO_API std::string_view to_string(finish_reason reason) noexcept;

struct finished_sequence {
  request_id request = invalid_request;
  std::int32_t sample = 0;
  finish_reason reason = finish_reason::length;
  std::vector<token_id> tokens;  ///< sampled ones, the last included; the prompt is not repeated
};

/// Everything a model needs of one step. Capacity is kept between steps.
struct step_inputs {
  step_batch batch;                     ///< what attention and append read
  std::vector<token_id> tokens;         ///< [num_tokens], of the plan's sequences one after another
  std::vector<std::int32_t> positions;  ///< [num_tokens], 0 for a sequence's first token
  std::vector<std::int32_t>
      sample_rows;  ///< rows whose logits are sampled: the last one of each sequence with num_samples > 0
};

namespace detail {
struct request_state;
struct sample_state;
class request_intake;
/// Samples in the order of (request, sample), through their own links.
struct sample_list {
  sample_state* head = nullptr;
  sample_state* tail = nullptr;
  std::int64_t size = 0;
};
}  // namespace detail

/// Thread-safety: `submit` and `post_abort` from any thread at any time; everything else from one thread at a time, the
/// one that owns the manager too. Failed calls leave `digest()` as it was.
class BIFOLIO_API scheduler {
 public:
  /// `manager` is borrowed and must outlive the scheduler. Throws `error`: invalid_argument, out_of_memory.
  scheduler(kv_cache_manager& manager, const scheduler_config& config);
  scheduler(const scheduler&) = delete;
  scheduler& operator=(const scheduler&) = delete;
  /// Releases the sequences that are still running.
  ~scheduler();

  [[nodiscard]] const scheduler_config& config() const noexcept { return config_; }
  [[nodiscard]] const kv_cache_manager& manager() const noexcept { return *manager_; }

  /// Queues a request; it is seen by the next `schedule`. `never` when prompt and continuation cannot fit even into an
  /// empty pool (nothing is queued then); otherwise `ok`. Thread-safe.
  /// Throws `error`: invalid_argument (an empty prompt, a token id outside the vocabulary, max_new_tokens or
  /// num_samples outside their range, more tokens than the manager's max_seq_len), out_of_memory.
  [[nodiscard]] submit_result submit(request what);

  /// Queues an `abort` for the next `schedule`, which lists it in step_plan::aborted if the request was still there.
  /// Thread-safe. Throws `error` (out_of_memory).
  void post_abort(request_id id);

  /// Decides the next step. The plan is valid until the next call; its `seqs` are empty when nothing can be computed.
  /// Throws `error`: failed_precondition (a step with sequences was not committed yet), out_of_memory.
  const step_plan& schedule();

  /// Flattens the step in flight. Throws `error`: failed_precondition (none is), out_of_memory.
  void build(step_inputs& inputs) const;

  /// Ends the step in flight: its tokens are computed, and `sampled` holds what was sampled: for each of plan.seqs in
  /// order, its num_samples tokens. Returns the sequences that ended; their blocks are free again. Tokens of requests
  /// that were aborted meanwhile are ignored. Committing an empty plan does nothing.
  /// Throws `error`: failed_precondition (no step in flight), invalid_argument (another step's plan, another number of
  /// tokens, a token outside the vocabulary), out_of_memory; the step is then still in flight.
  std::vector<finished_sequence> commit(const step_plan& plan, std::span<const sampled_token> sampled);

  /// Drops a request and releases its blocks, those that the step in flight uses when it is committed. Its sequences
  /// are not reported as finished. Returns ok, or not_found for one that is unknown or has ended already. Requests that
  /// no `schedule` has seen yet are unknown: use `post_abort`.
  [[nodiscard]] errc abort(request_id id) noexcept;

  /// Whether any accepted request has not ended, also one that no `schedule` has seen yet.
  [[nodiscard]] bool has_work() const noexcept {
    return waiting_.size + running_.size > 0 || num_unseen_.load(std::memory_order_relaxed) > 0;
  }

  /// What a sequence sampled so far; valid until the next `commit` or `abort`. Empty for one that is unknown or ended.
  [[nodiscard]] std::span<const token_id> output(request_id id, std::int32_t sample = 0) const noexcept;

  [[nodiscard]] scheduler_stats stats() const noexcept;
  /// The first broken invariant as a sentence; empty when all hold.
  [[nodiscard]] std::string check() const;
  /// Hash of everything that later decisions depend on, the manager's digest included. Requests enter it with the
  /// `schedule` that sees them first.
  [[nodiscard]] std::uint64_t digest() const noexcept;

 private:
  using sample_state = detail::sample_state;
  using request_state = detail::request_state;

  // Preparation: may throw, decides nothing.
  void receive();
  void reserve_for_step();
  void reserve_for_commit(std::span<const sampled_token> sampled, std::vector<finished_sequence>& finished);
  void require_commit(const step_plan& plan, std::span<const sampled_token> sampled) const;

  // Decisions: nothing here allocates, so nothing fails half-way.
  void accept_arrivals() noexcept;
  /// Whether other sequences run that still compute known tokens.
  [[nodiscard]] bool schedule_decodes(std::int64_t& budget) noexcept;
  void schedule_prompts(std::int64_t& budget) noexcept;
  void schedule_prompt(sample_state& one, std::int64_t most, std::int64_t& budget) noexcept;
  void admit(std::int64_t& budget) noexcept;
  void add_to_step(sample_state& one, std::int64_t query_len, const block_copy& copy) noexcept;
  void preempt(sample_state& victim) noexcept;
  void commit_row(sample_state& one, const scheduled_seq& row, std::span<const sampled_token> sampled,
                  std::vector<finished_sequence>& finished) noexcept;
  void fork_samples(sample_state& first, std::span<const sampled_token> sampled) noexcept;
  void append_token(sample_state& one, sampled_token what, std::vector<finished_sequence>& finished) noexcept;
  void start_running(sample_state& one, seq_id seq, std::int64_t num_computed) noexcept;
  void stop_running(sample_state& one) noexcept;
  [[nodiscard]] bool ends_with(const sample_state& one, sampled_token what) const noexcept;
  void end(sample_state& one) noexcept;
  [[nodiscard]] std::int64_t promised_blocks() const noexcept;
  [[nodiscard]] std::int64_t chunk_limit() const noexcept;
  [[nodiscard]] request_state* find(request_id id) const noexcept;
  void remember(request_state& one) noexcept;
  void forget(request_state& one) noexcept;

  kv_cache_manager* manager_;
  scheduler_config config_;
  std::unique_ptr<detail::request_intake> intake_;
  // Numbers only: the queue is what hands requests from one thread to another.
  std::atomic<std::uint64_t> next_request_{1};
  std::atomic<std::int64_t> num_unseen_{0};

  request_state* arrivals_ = nullptr;      // taken from the intake, seen by no decision yet; newest first
  std::vector<request_id> posted_aborts_;  // the same
  std::vector<request_state*> buckets_;    // requests by id, chained
  detail::sample_list waiting_;
  detail::sample_list running_;
  std::int64_t num_seats_taken_ = 0;  // running sequences, an unforked request counting all its samples
  bool in_flight_ = false;
  step_plan plan_;
  std::vector<sample_state*> step_samples_;  // [plan_.seqs.size()] while in flight
  std::vector<host_demand> demands_;
  scheduler_stats stats_;
};

}  // namespace bifolio

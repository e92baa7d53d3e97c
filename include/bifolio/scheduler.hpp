// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Continuous batching: decides in each step which sequences compute how many tokens, and allocates their slots from
/// the cache manager. The scheduler knows tokens and block counts, never memory, devices or models; the caller computes
/// and samples.
///
///   submit → waiting ⇄ running → finished      one step: schedule, build, (compute, sample), commit
///                         ⇅
///                      swapped                 ⇄ preemption by recomputation (blocks released, tokens kept) and
///                                              admission; ⇅ by swapping (blocks moved to the host) and return
///
/// Sequences are served in order of rank: the step in which their request arrived, minus priority · priority_span
/// steps. So one level of priority is worth that many steps of waiting, a request is overtaken only by requests that
/// arrive within (difference of priorities) · priority_span steps after it, and equal priorities are served in order
/// of arrival.
///
/// A step first serves the first running sequence, then schedules one token of each sequence that decodes, then spends
/// the rest of the token budget on prompts in chunks. Then it swaps in and admits in order of rank, never past a
/// sequence that has to wait, while blocks fit besides the watermark and the blocks that admitted prompts will still
/// need. When blocks run out, the running sequence of the last rank is preempted. The first sequence is part of every
/// step, because a request that does not fit into an empty pool is never accepted. So a full pool never stops the
/// schedule, and no request waits forever: a request that ranks after others (or finds them running) starts at the
/// latest after the sum, over those, of (prompt tokens + samples · (max_new_tokens + 1)) steps, times
/// max_steps_in_flight.
///
/// Preemption swaps when the manager has host blocks and enough of them are free, and when that is cheaper by
/// `swap_block_cost`; otherwise it recomputes. With prefix caching, a sequence that is recomputed finds those of its
/// blocks that were not evicted meanwhile.
///
/// With layer groups a step fits only if it fits in all of them. Prompts are computed in steps that end where a state
/// group wants a snapshot. Drafts need as many num_draft_slots.
///
/// A request with several samples computes its prompt once; when that is done it forks, and its samples share the
/// prompt's blocks, copying on write. The beams of a beam search do the same; they decode in the same steps and are
/// preempted together.
///
/// The sequences belong to the scheduler alone. When other code frees, grows, truncates or swaps one on the manager,
/// the next `schedule` or `commit` that needs it reports its request's id: not_found if the sequence is gone,
/// failed_precondition if it was changed. The request can then be aborted, and all others go on.
///
/// Steps in flight: up to max_steps_in_flight steps may be scheduled before the first of them is committed; they are
/// executed, and committed, in order. A decoding sequence then goes on with a token that is not sampled yet
/// (`step_inputs::placeholders`); if that turns out to be its last token, results of later steps for it are ignored.
/// Samples, beams and drafts need to know their tokens: they wait for the commit. Blocks that are released meanwhile
/// are handed out again only when the steps that may touch them have been committed.

#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/request.hpp>
#include <bifolio/stats.hpp>
#include <bifolio/step.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace bifolio::inline v0_2 {

enum class preemption_mode : std::uint8_t {
  recompute,
  swap,       ///< whenever enough host blocks are free
  automatic,  ///< if, in addition, its computed tokens > swap_block_cost · its blocks
};

struct scheduler_config {
  std::int32_t max_tokens_per_step = 2048;  ///< computed in one step, ≥ 1
  std::int32_t max_running = 256;           ///< sequences with device blocks, 1 … the manager's max_sequences
  std::int32_t max_chunk_tokens = 0;        ///< of one sequence in one step, ≥ 1; 0: only the step's budget limits it
  std::int32_t vocab_size = 0;              ///< token ids are below it; 0: unknown
  std::int32_t max_steps_in_flight = 1;     ///< 1 … block_pool::max_open_fences
  /// Swapped sequences keep a record of the manager: at most its max_sequences − max_running are swapped at once.
  preemption_mode preemption = preemption_mode::automatic;
  double swap_block_cost = 4;         ///< tokens that compute as fast as one block moves out and back, ≥ 0
  std::int32_t priority_span = 1000;  ///< steps of waiting that one level of priority is worth, 0 … 10^9
};

namespace detail {
class scheduler_core;
}

/// Thread-safety: `submit` and `post_abort` from any thread at any time; everything else from one thread at a time, the
/// one that owns the manager too. Failed calls leave `digest()` as it was.
class BIFOLIO_API scheduler {
 public:
  /// `manager` is borrowed and must outlive the scheduler. Throws `error`: invalid_argument, out_of_memory.
  scheduler(kv_cache_manager& manager, const scheduler_config& config);
  scheduler(const scheduler&) = delete;
  scheduler& operator=(const scheduler&) = delete;
  /// Releases the sequences that are still there.
  ~scheduler();

  [[nodiscard]] const scheduler_config& config() const noexcept;
  [[nodiscard]] const kv_cache_manager& manager() const noexcept;

  /// Queues a request; it is seen by the next `schedule`. `never` when prompt and continuation cannot fit even into an
  /// empty pool (nothing is queued then), of a beam search all beams at once; otherwise `ok`. Thread-safe.
  /// Throws `error`: invalid_argument (an empty prompt, a token id outside the vocabulary, a field outside its range, a
  /// salt or extra keys that are too large, beams together with samples or drafts, more tokens than the manager's
  /// max_seq_len, more drafts than a state group has slots for, an encoder's output without a group for it or too long
  /// for it), out_of_memory.
  [[nodiscard]] submit_result submit(request what);

  /// Queues an `abort` for the next `schedule`, which lists it in step_plan::aborted if the request was still there.
  /// Thread-safe. Throws `error` (out_of_memory).
  void post_abort(request_id id);

  /// Proposes drafts of the tokens after a sequence's last sampled token. The next step that decodes the sequence
  /// computes the drafts after that token (fewer when budget or blocks do not suffice: no sequence is preempted for a
  /// draft) and samples after each. `commit` keeps the drafts up to the first that was not sampled, and the token
  /// sampled in its place; the slots of the others are rolled back. Replaces earlier drafts; dropped when the sequence
  /// gets a token.
  /// Throws `error`: not_found (unknown, ended); invalid_argument (more than the request's max_draft_tokens, a token
  /// outside the vocabulary); failed_precondition (a step in flight computes it); out_of_memory.
  void propose(request_id id, std::int32_t sample, std::span<const token_id> drafts);

  /// Decides the next step. The plan is valid until max_steps_in_flight more calls. When it is empty (`step_plan::
  /// empty`), nothing can be done before a step in flight is committed, and nothing at all if none is. A plan with
  /// sequences or swaps is in flight until it is committed.
  /// Throws `error`: failed_precondition (max_steps_in_flight are in flight; a sequence was changed on the manager;
  /// with several steps in flight, others have all fences of the manager open), not_found (a sequence was freed there),
  /// out_of_memory. Requests that arrived are queued all the same.
  const step_plan& schedule();

  /// Flattens the step scheduled last. Throws `error`: failed_precondition (it is empty or committed), out_of_memory.
  void build(step_inputs& inputs) const;

  /// Ends the oldest step in flight: its tokens are computed, and `sampled` holds the sampled tokens: for each of
  /// plan.seqs in order, its num_samples tokens. Returns the sequences that ended. Tokens of sequences that were
  /// aborted or ended meanwhile are ignored, as are those of beams and samples that lost their blocks meanwhile and
  /// will be computed again. Committing an empty plan does nothing.
  /// Throws `error`: failed_precondition (no step in flight; a sequence was changed on the manager), not_found (one was
  /// freed there), invalid_argument (another step's plan, another number of tokens, a token outside the vocabulary, a
  /// beam that is not there), out_of_memory; the step is then still in flight.
  std::vector<finished_sequence> commit(const step_plan& plan, std::span<const sampled_token> sampled);

  /// Copies of `plan.swap_outs` or `plan.swap_ins` failed; call this before the plan is committed. The sequences that
  /// this step and later ones swapped go back to the waiting queue and are recomputed; results of later steps in flight
  /// for them are ignored. Returns the number of these sequences.
  /// Throws `error` (failed_precondition): the plan is not in flight.
  std::int64_t fail_swaps(const step_plan& plan);

  /// Drops a request and releases its blocks; blocks that steps in flight use are released when the last of these steps
  /// is committed. The request's sequences are not reported as finished. Returns ok, or not_found for one that is
  /// unknown or has ended already. Requests that no `schedule` has seen yet are unknown: use `post_abort`.
  [[nodiscard]] errc abort(request_id id) noexcept;

  /// Whether any accepted request has not ended, also one that no `schedule` has seen yet, or a step is in flight.
  [[nodiscard]] bool has_work() const noexcept;
  [[nodiscard]] std::int32_t num_steps_in_flight() const noexcept;

  /// The tokens that a sequence sampled so far; valid until the next `commit` or `abort`. Empty for a sequence that is
  /// unknown or ended.
  [[nodiscard]] std::span<const token_id> output(request_id id, std::int32_t sample = 0) const noexcept;

  [[nodiscard]] scheduler_stats stats() const noexcept;
  /// The first broken invariant as a sentence; empty when all hold.
  [[nodiscard]] std::string check() const;
  /// Hash of everything that later decisions depend on, the manager's digest included. Requests enter it with the
  /// `schedule` call that receives them first.
  [[nodiscard]] std::uint64_t digest() const noexcept;

 private:
  std::unique_ptr<detail::scheduler_core> core_;
};

}  // namespace bifolio::inline v0_2

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The cache of one model on one device, from one configuration: manager, cache engine (and a second one for host
/// blocks), plans and the arrays of a step. It does what every engine does in the same way: it grows sequences, carries
/// out copies and swaps, uploads the step's arrays and plans attention. Nothing is hidden: `manager()`, `engine()` and
/// the plan and arrays of each step are there, and may be used next to it.
///
///   model_cache cache(*where, {.num_layers = 32, .attention = {…}, .memory_bytes = …});
///   const auto prompt = cache.open(tokens);
///   model_step step = cache.begin_step({{{prompt.seq, tokens}}});
///   for each layer: step.attend(layer, q, k, v, out);
///   step.commit();
///
/// A model whose layers keep different things (layer_groups.hpp) has a manager with groups, and an engine, a batch and
/// plans for each of them; `attend` finds those of its layer. Layers of a state group have the places of their states
/// (`model_step::states`) instead of keys and values.
///
/// What a call cannot do for lack of blocks is a value (`alloc_status`); wrong use throws `error` when a cache is made
/// and a step begun; calls of a layer return an `errc`. The same program runs on every backend: arrays that kernels
/// read are on the device, and the arrays of `model_step::inputs` are the host's.

#include <bifolio/attention.hpp>
#include <bifolio/backend.hpp>
#include <bifolio/cache_engine.hpp>
#include <bifolio/device.hpp>
#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <bifolio/kv_cache_config.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/kv_layout.hpp>
#include <bifolio/prefix_cache.hpp>
#include <bifolio/request.hpp>
#include <bifolio/scheduler.hpp>
#include <bifolio/stats.hpp>
#include <bifolio/step.hpp>
#include <bifolio/tensor_view.hpp>
#include <bifolio/types.hpp>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace bifolio::inline v0_2 {

namespace detail {
struct model_state;
struct model_step_state;
}  // namespace detail

/// The layers of one group of `kv_cache_config::groups`.
struct model_group {
  /// Their numbers in the model. Each layer of the model is in one group. May be empty: the first group is then an
  /// index of texts, without storage.
  std::vector<std::int32_t> layers{};
  layout_kind layout = layout_kind::hnd;
  /// As `model_cache_config::attention`, of these layers; block_size 0 is that of the group. Of a window group
  /// window_left is window − 1 if it says nothing, and must not reach further back; of a cross group `causal` is false
  /// whatever it says. A state group has none.
  attention_spec attention{};
  std::vector<std::int32_t> layer_windows{};  ///< as `model_cache_config::layer_windows`; [layers.size()] or empty
  std::vector<float> k_scales{};              ///< as those of `model_cache_config`, of these layers
  std::vector<float> v_scales{};
  std::int64_t state_bytes = 0;  ///< of a state group: of one state in one layer, a multiple of 4
};

struct model_cache_config {
  std::int32_t num_layers = 0;
  layout_kind layout = layout_kind::hnd;
  /// Heads, head dimensions, types and mask of every layer. v_head_dim 0 is qk_head_dim, block_size 0 is that of
  /// `cache`. Where `cache.sliding_window` is set, windows must not reach further back; window_left is then
  /// sliding_window − 1 if it says nothing.
  attention_spec attention{};
  /// window_left of each layer, for models whose layers differ in it; empty: attention.window_left for all.
  /// [num_layers]
  std::vector<std::int32_t> layer_windows{};
  /// Static scales, where the codes have them; see cache_engine_config.
  std::vector<float> k_scales{};
  std::vector<float> v_scales{};
  kv_cache_config cache{};
  /// With `cache.groups`, one for each of these; layout, attention, layer_windows and scales above and the budgets
  /// below are then left as they are (`plan_group_memory` divides a budget).
  std::vector<model_group> groups{};
  std::int64_t memory_bytes = 0;       ///< of all layers together; sets cache.num_blocks if that is 0
  std::int64_t host_memory_bytes = 0;  ///< sets cache.num_host_blocks likewise
  bool zero_fill = false;              ///< as cache_engine_config::zero_fill
  /// Steps of a `scheduler` that may be begun before the first of them is committed; as its max_steps_in_flight.
  std::int32_t max_steps_in_flight = 1;
};

/// One sequence's part of a step: its next tokens after the committed ones. A sequence has one row in a step.
struct step_row {
  seq_id seq = invalid_seq;
  /// The tokens, ≥ 1; copied. Prefix caching needs them.
  std::span<const token_id> tokens{};
  /// Without `tokens`: how many. With them: 0, or their number.
  std::int32_t num_tokens = 0;
};

/// The states of a layer in a step. All pointers are of the device.
struct layer_states {
  std::byte* data = nullptr;     ///< of this layer: state i begins i · state_bytes after it
  std::int64_t state_bytes = 0;  ///< what they mean is the caller's business
  /// [batch.num_seqs, rows_stride]: the state that the step reads (`invalid_block`: begin with the initial state), then
  /// those that it writes, as `kv_cache_manager::build` says.
  const std::int32_t* rows = nullptr;
  std::int64_t rows_stride = 0;
};

/// One step that was begun: what a model reads, and the calls of its layers. Moves, never copies; the cache must
/// outlive it. A step of rows that is destroyed before `commit` takes back the slots that it took. A step of a
/// `scheduler` stays in flight there: its requests can be aborted. Thread-safety: as the cache.
class BIFOLIO_API model_step {
 public:
  /// Empty: there is nothing to compute.
  model_step() = default;
  model_step(model_step&& other) noexcept;
  model_step& operator=(model_step&& other) noexcept;
  ~model_step();

  /// Whether the step was begun and not committed yet.
  explicit operator bool() const noexcept { return slot_ != nullptr; }
  /// ok for a step that was begun, and for one of a scheduler that has nothing to do; otherwise why blocks were
  /// lacking.
  [[nodiscard]] alloc_status status() const noexcept { return status_; }

  // The following require a step that was begun.

  /// What was decided: rows, copies and swaps (which are carried out), the scheduler's preemptions.
  [[nodiscard]] const step_plan& plan() const noexcept;
  /// Tokens, positions, the rows to sample from (the last of each sequence), and the host arrays of the batch. Of rows
  /// without tokens, tokens are −1.
  [[nodiscard]] const step_inputs& inputs() const noexcept;
  [[nodiscard]] std::int64_t num_tokens() const noexcept;
  /// The step's arrays on the device; of a group that has layers. Those on the host are in `inputs`.
  [[nodiscard]] const device_step_view& batch(std::int32_t group = 0) const noexcept;
  /// The states of a layer. Requires a layer of a state group.
  [[nodiscard]] layer_states states(std::int32_t layer) const noexcept;
  /// The plan that a layer runs on. Requires a layer of the model that is not of a state group.
  [[nodiscard]] const attention_plan& attention_plan_of(std::int32_t layer) const noexcept;

  /// What a captured CUDA graph of the step's layers depends on, but for the arguments of the calls: the cache, the
  /// numbers of sequences and tokens, where the step's arrays are on the device, and `cuda::graph_epoch` of its plans.
  /// A graph that captured the calls of one step computes every later step whose key is equal: it is launched in that
  /// step's stream, after the step was begun and before the next one is. Empty where calls cannot be captured, as on
  /// the CPU. Requires also that no step was begun after this one. May throw std::bad_alloc.
  [[nodiscard]] std::vector<std::uint64_t> graph_key() const;

  /// Stores the rows of k and v, then attends: q [num_tokens, num_q_heads, qk_head_dim] against all that the layer
  /// holds of the sequences, the new rows included. Where V is part of K, v is {}. Allocates nothing. Returns what
  /// `cache_engine::append` and `backend::attention` return; failed_precondition for a step that is empty, committed,
  /// or not the one begun last; unsupported for a layer of a state group, and for storing in one of a cross group: the
  /// encoder's output goes to `model_cache::engine` of the group, at `kv_cache_manager::slot_at`.
  [[nodiscard]] errc attend(std::int32_t layer, const const_tensor_view& q, const const_tensor_view& k,
                            const const_tensor_view& v, const tensor_view& out) noexcept;
  /// The same with what else a layer has (scale, soft cap, slopes, sinks, bias, lse). `params.kv` and `params.batch`
  /// are not looked at.
  [[nodiscard]] errc attend(std::int32_t layer, const attention_params& params, const const_tensor_view& k,
                            const const_tensor_view& v) noexcept;
  /// Its halves, for layers that read what another one stored.
  [[nodiscard]] errc append(std::int32_t layer, const const_tensor_view& k, const const_tensor_view& v) noexcept;
  [[nodiscard]] errc attention(std::int32_t layer, const attention_params& params) noexcept;
  /// In place of `append`: heads of q and k are normalised and rotated first (bifolio/rotate_append.hpp).
  /// `params.append.kv` and its slot_mapping are not looked at.
  [[nodiscard]] errc rotate_append(std::int32_t layer, const rotate_append_params& params) noexcept;
  /// Why `attend` with these arguments would return, or returned, another code than ok, as a sentence; empty when it
  /// would not. A step that is empty or over has one too.
  [[nodiscard]] std::optional<error> find_problem(std::int32_t layer, const attention_params& params,
                                                  const const_tensor_view& k, const const_tensor_view& v) const;
  /// The same of `rotate_append`.
  [[nodiscard]] std::optional<error> find_problem(std::int32_t layer, const rotate_append_params& params) const;
  /// `params` with the cache of the layer and the step's arrays: what `attention` passes to the backend, and what
  /// `find_problem` explains. Requires a layer of the model that is not of a state group.
  [[nodiscard]] attention_params complete(std::int32_t layer, const attention_params& params) const noexcept;

  /// Ends a step of rows: the tokens are computed for good, and full blocks of them published. The step is then empty.
  /// Throws `error`: failed_precondition (empty; of a scheduler), out_of_memory (the step is then as before).
  void commit();
  /// The same for the first num_accepted[i] tokens of row i; the slots of the others are taken back. Throws also
  /// invalid_argument (another number of rows, a number not in 0 … the row's tokens).
  void commit(std::span<const std::int32_t> num_accepted);
  /// Ends a step of a scheduler; see `scheduler::commit`, which throws the same. Throws failed_precondition for a step
  /// of rows.
  std::vector<finished_sequence> commit(std::span<const sampled_token> sampled);

 private:
  friend class model_cache;
  model_step(detail::model_state* model, detail::model_step_state* slot, alloc_status status) noexcept
      : model_(model), slot_(slot), status_(status) {}
  void drop() noexcept;
  [[nodiscard]] std::optional<error> find_step_problem(std::int32_t layer, std::int64_t num_rows) const;
  [[nodiscard]] std::optional<error> find_health_problem() const;
  [[nodiscard]] errc find_code(std::int32_t layer, bool stores) const noexcept;
  [[nodiscard]] rotate_append_params complete(std::int32_t layer, const rotate_append_params& params) const noexcept;

  detail::model_state* model_ = nullptr;
  detail::model_step_state* slot_ = nullptr;
  alloc_status status_ = alloc_status::ok;
};

/// Thread-safety: one thread at a time.
class BIFOLIO_API model_cache {
 public:
  /// `where` is borrowed and must outlive the cache. Throws `error`: what the manager and the cache engine throw, and
  /// invalid_argument for numbers that do not fit together (a size given both in blocks and in bytes, memory for less
  /// than a block, windows that reach past what the manager keeps, layers that are in no group or in two).
  model_cache(backend& where, const model_cache_config& config);
  model_cache(model_cache&& other) noexcept;
  model_cache& operator=(model_cache&& other) noexcept;
  ~model_cache();

  /// As given, with what was derived filled in: numbers of blocks, head dimensions, block size.
  [[nodiscard]] const model_cache_config& config() const noexcept;

  /// Opens a sequence with slots for its whole prompt; the leading num_cached_tokens are in the cache already, so that
  /// its first step computes the tokens after those. Copies a block where the manager asks for it. With state groups
  /// there are slots up to where the first snapshot is to be left; a step of rows that ends there, and later ones where
  /// `kv_cache_manager::step_limit` says, leaves it. Throws as `kv_cache_manager::open`, and device_lost.
  [[nodiscard]] open_result open(const prompt_view& prompt, stream_ref stream = {});
  [[nodiscard]] open_result open(std::span<const token_id> prompt, stream_ref stream = {}) {
    return open(prompt_view{.tokens = prompt}, stream);
  }
  /// A second sequence with the committed tokens of the first, whose blocks it shares. Throws as
  /// `kv_cache_manager::fork`.
  [[nodiscard]] allocate_result fork(seq_id seq);
  /// Back to the first `num_tokens` ≤ committed tokens. Throws as `kv_cache_manager::truncate`, and failed_precondition
  /// for a sequence of a step that is not committed; so do `free` and `swap_out`.
  void truncate(seq_id seq, std::int64_t num_tokens);
  void free(seq_id seq);
  /// Moves whole sequences to host blocks and back, with their contents. Throw as the manager, and device_lost: the
  /// sequences are then to be freed.
  [[nodiscard]] alloc_status swap_out(std::span<const seq_id> seqs, stream_ref stream = {});
  [[nodiscard]] alloc_status swap_in(std::span<const seq_id> seqs, stream_ref stream = {});

  /// Begins a step that computes the next tokens of each row's sequence, after the committed ones: takes slots, carries
  /// out copies, uploads and plans. All rows or none: `later` or `never` (`model_step::status`) when blocks are
  /// lacking, and no sequence is longer than before. Everything that is computed for it must be given to `stream`.
  /// Throws `error`: not_found (a sequence); invalid_argument (no rows, a row without tokens, a sequence twice, more
  /// than its max_seq_len); failed_precondition (another step is not committed yet, a sequence is swapped out); what
  /// upload and planning throw. No sequence is then longer than before; lookahead that was reserved is dropped.
  [[nodiscard]] model_step begin_step(std::span<const step_row> rows, stream_ref stream = {});
  [[nodiscard]] model_step begin_step(std::initializer_list<step_row> rows, stream_ref stream = {}) {
    return begin_step(std::span<const step_row>(rows.begin(), rows.size()), stream);
  }
  /// Begins the next step of a scheduler on this cache's manager: schedules, carries out copies and swaps (those that
  /// fail are reported to it), uploads and plans. An empty step when it has nothing to do. A call that throws after
  /// the step was scheduled is made again with the same scheduler, and goes on where it stopped.
  /// Throws `error`: invalid_argument (a scheduler of another manager), failed_precondition (max_steps_in_flight are
  /// begun), what `schedule`, upload and planning throw.
  [[nodiscard]] model_step begin_step(scheduler& requests, stream_ref stream = {});

  [[nodiscard]] kv_cache_manager& manager() noexcept;
  [[nodiscard]] const kv_cache_manager& manager() const noexcept;
  /// The engine of a group that has layers, which are its layers in the order of `model_group::layers`. Blocks of a
  /// state group are states: planes of K alone.
  [[nodiscard]] cache_engine& engine(std::int32_t group = 0) noexcept;
  [[nodiscard]] const cache_engine& engine(std::int32_t group = 0) const noexcept;
  /// The engine of host blocks; null without any.
  [[nodiscard]] cache_engine* host_engine(std::int32_t group = 0) noexcept;
  [[nodiscard]] backend& where() const noexcept;
  /// Requires a layer of the model.
  [[nodiscard]] std::int32_t group_of(std::int32_t layer) const noexcept;
  /// What the attention of a layer is planned with. Requires a layer of the model that is not of a state group.
  [[nodiscard]] const attention_spec& spec_of(std::int32_t layer) const noexcept;
  [[nodiscard]] cache_stats stats() const noexcept { return manager().stats(); }

 private:
  std::unique_ptr<detail::model_state> state_;
};

}  // namespace bifolio::inline v0_2

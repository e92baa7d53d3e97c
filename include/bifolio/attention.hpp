// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention over a paged cache: one call for prefill, chunked prefill, decode and any mix of them in one batch.
///
/// For the t-th of a sequence's query_len new tokens, at position p = seq_len − query_len + t (bottom-right alignment)
/// or, where the batch has query_positions, p = query_positions[sequence] + t, and query head h reading KV head h /
/// group_size, over the visible positions j:
///
///   s_j = scale · q·k_j;   s_j = soft_cap · tanh(s_j / soft_cap) if soft_cap > 0;   s_j += alibi_slopes[h] · (j − p);
///   s_j += bias[t, h, j]
///   visible: 0 ≤ j < seq_len, j ≤ p if causal, j ≥ p − window_left if window_left ≥ 0, j ≤ p + window_right if ≥ 0
///   m = max(s_j, sinks[h]);   out = Σ exp(s_j − m) v_j / (Σ exp(s_j − m) + exp(sinks[h] − m))
///   lse = m + ln(Σ exp(s_j − m) + exp(sinks[h] − m))
///
/// Positions count from the first key of the sequence's table row, so that a part of a sequence (its prefix, a middle
/// part, what lives on another device) is attended with its own row and query_positions; the parts' results are joined
/// by `backend::merge_states`, with the sinks in one of them. p may be negative, or past the last key: such a row
/// attends to what its mask leaves of the part, which may be nothing. query_len may exceed seq_len. A key whose score
/// is −inf weighs nothing. A row with nothing visible, or nothing but scores of −inf, gives output 0; its LSE is −inf,
/// or the sink alone where there is one. Everything is accumulated in float32. What is planned once per step is the
/// work (lengths and mask); what is passed per layer is data and numbers.

#include <bifolio/dtype.hpp>
#include <bifolio/error.hpp>
#include <bifolio/export.hpp>
#include <bifolio/kv_layout.hpp>
#include <bifolio/step.hpp>
#include <bifolio/tensor_view.hpp>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>

namespace bifolio::inline v0_2 {

/// What a plan is made for; the same for every layer that runs on it.
struct attention_spec {
  std::int32_t num_q_heads = 0;  ///< a multiple of num_kv_heads
  std::int32_t num_kv_heads = 0;
  std::int32_t qk_head_dim = 0;  ///< of q and K, ≥ 1
  std::int32_t v_head_dim = 0;   ///< of V and out, ≥ 1; often the same
  std::int32_t block_size = 0;   ///< ≥ 1
  dtype q_type = dtype::f32;
  kv_code k_code{};     ///< attention reads the values that are stored, also those of this step's own tokens
  kv_code v_code{};     ///< may be another; with v_in_k the same
  bool v_in_k = false;  ///< V is the first v_head_dim dims of K (multi-head latent attention)
  dtype out_type = dtype::f32;
  bool causal = true;
  std::int32_t window_left = -1;   ///< positions visible before the token's own; negative = all
  std::int32_t window_right = -1;  ///< positions visible after it; negative = all; with causal, only 0 is left of it
  /// A token's bits depend on its sequence alone: not on the other sequences of the batch, physical blocks or how the
  /// prompt was cut into chunks. Always so on the CPU; on a GPU it costs some percent, and where one kernel computes
  /// all tokens several times prefill's time (docs/reproducibility.md). It holds there for rows that are aligned alike.
  bool deterministic = false;
  /// Name of the implementation that must compute the calls (`backend::explain` lists them); empty: the first of the
  /// backend's list that accepts and needs no name, or the one that the environment variable BIFOLIO_ATTENTION names. A
  /// call that the named one does not take is refused (unsupported). Read while planning: the text need not outlive it,
  /// because `attention_plan::spec` then holds the backend's own.
  std::string_view implementation{};
  friend constexpr bool operator==(const attention_spec&, const attention_spec&) = default;
};

/// Backend's private part of a plan.
struct attention_plan_state {
  explicit attention_plan_state(const void* made_by) noexcept : owner(made_by) {}
  virtual ~attention_plan_state() = default;
  /// What `cuda::graph_epoch` returns for the plan; 0 where calls cannot be captured.
  [[nodiscard]] virtual std::uint64_t graph_epoch() const noexcept { return 0; }
  /// Address that identifies who made this state, and with it its type: a backend recognises its own plans by it.
  const void* const owner;
};

/// The cut of one step's work into items, and the workspace of its partial results. Made by `backend::plan_attention`,
/// reused by every layer of the step and, re-planned, by the following steps (capacity is kept). Move-only; one plan
/// serves one attention call at a time.
struct attention_plan {
  attention_spec spec;
  std::int32_t num_seqs = 0;
  std::int64_t num_tokens = 0;
  std::int64_t num_blocks = 0;         ///< every block id of the planned tables is below this
  std::int64_t num_table_entries = 0;  ///< entries of a table row that the longest sequence reaches
  std::int32_t max_seq_len = 0;        ///< of the planned sequences
  bool has_query_positions = false;    ///< whether the batch had them
  std::unique_ptr<attention_plan_state> state;
};

/// Numbers added to the scores: a relative-position bias, or a mask of 0 and −inf. Element (t, h, j) goes to the score
/// of row t of q, query head h, and the key at position j of that row's sequence. An extent of 1 is read for every
/// token, or every head. Where a row does not see position j its element is not read, and may be anything.
///
/// −inf hides a key: it weighs nothing, although K and V there are still read, so that a NaN in them may show. NaN or
/// +inf makes the rows that see it NaN, and no others.
struct attention_bias_view {
  const void* data = nullptr;     ///< [num_tokens, num_heads, num_keys], elements of a row contiguous; null = no bias
  dtype type = dtype::f32;        ///< f32, f16 or bf16, whatever q and the cache are
  std::int64_t num_tokens = 0;    ///< that of the batch, or 1
  std::int32_t num_heads = 0;     ///< num_q_heads, or 1
  std::int32_t num_keys = 0;      ///< at least the longest seq_len of the plan
  std::int64_t token_stride = 0;  ///< elements from a token to the next, ≥ 1; not looked at when there is one
  std::int64_t head_stride = 0;   ///< elements from a head to the next, ≥ 1; not looked at when there is one
};

/// Data and numbers of one layer's call. Pointers are of the backend's device. What is written (out, lse) must not
/// share memory with anything else of the call; what is read may, K and V included.
///
/// Slopes, sinks, bias and block tables are data on the device: the host does not look at them. A slope that is
/// not finite, or a sink of +inf or NaN, spoils the rows of its head (NaN as a rule) and no others; a sink of −inf is
/// none. A block id outside the pool, in a table changed since it was planned with, is read as some block of the pool.
struct attention_params {
  const_tensor_view q{};                ///< [num_tokens, num_q_heads, qk_head_dim]
  tensor_view out{};                    ///< [num_tokens, num_q_heads, v_head_dim]
  float* lse = nullptr;                 ///< optional, [num_tokens, num_q_heads], natural log
  kv_cache_view kv{};                   ///< this layer
  device_step_view batch{};             ///< device arrays; lengths as planned
  std::optional<float> scale{};         ///< finite; default: 1/√qk_head_dim
  float soft_cap = 0;                   ///< 0 = none; else finite and > 0
  const float* alibi_slopes = nullptr;  ///< optional, [num_q_heads]
  const float* sinks = nullptr;         ///< optional, [num_q_heads], logits of a value-less key; −inf = none
  attention_bias_view bias{};           ///< optional
};

/// The factor of q·k in a call: `params.scale`, or 1/√qk_head_dim where that is not set.
[[nodiscard]] inline float scale_of(const attention_spec& spec, const attention_params& params) noexcept {
  return params.scale.value_or(1.0f / std::sqrt(static_cast<float>(spec.qk_head_dim)));
}

/// A partial attention result: an output normalised by its own sum, and the LSE of that sum.
struct attention_state_view {
  const_tensor_view out{};     ///< [num_tokens, num_heads, head_dim]
  const float* lse = nullptr;  ///< [num_tokens, num_heads], natural log; −inf = nothing seen
};

/// Shapes of a, b and out are equal; their dtypes may differ. Needed: both lse inputs. Otherwise invalid_argument, as
/// for a null or misaligned pointer, a negative stride, or strides of `out` that let rows overlap.
struct merge_params {
  attention_state_view a{};
  attention_state_view b{};
  tensor_view out{};     ///< may be a.out or b.out, with the same dtype and strides
  float* lse = nullptr;  ///< optional; may be a.lse or b.lse
};

/// Why `backend::attention` would refuse these arguments, as a sentence; empty when it would not. Reads the structs
/// alone, never what their pointers point to: lengths and block ids were checked by `plan_attention`.
///
/// failed_precondition: the plan was never planned, or by a backend of another device.
/// invalid_argument: num_seqs, num_tokens, heads, a head_dim, block_size, a dtype, a code or v_in_k is not as planned;
/// a needed pointer is null or not aligned to its element; a stride is negative, or those of `out` let rows overlap;
/// scale is not finite; soft_cap is negative or not finite; an extent of `bias` is neither the plan's nor 1, or its
/// stride is below 1; `out` or `lse` may share memory with each other, q, the cache or the bias. out_of_range: `kv`
/// holds fewer blocks than the plan was made for, or `bias` fewer keys than its longest sequence. A batch of no tokens
/// does nothing, whatever the data pointers are.
[[nodiscard]] BIFOLIO_API std::optional<error> find_problem(const attention_plan& plan, const attention_params& params);

}  // namespace bifolio::inline v0_2

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention the naive way, in float64 on the exact stored values of dense K and V: the definition of
/// bifolio/attention.hpp written down, one row at a time, with no tiles, no splits and no running maximum. Also the
/// quantities that the error bound needs, a plain scalar float32 kernel to compare errors with, and the merge of two
/// partial results.

#include <cstdint>
#include <optional>
#include <vector>

namespace bifolio::reference {

/// What holds for all sequences of a call.
struct attention_options {
  std::int32_t num_q_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t qk_head_dim = 0;
  std::int32_t v_head_dim = 0;
  bool causal = true;
  std::int32_t window_left = -1;
  std::int32_t window_right = -1;
  float scale = 0;
  float soft_cap = 0;
  const float* alibi_slopes = nullptr;  ///< optional, [num_q_heads]
  const float* sinks = nullptr;         ///< optional, [num_q_heads]
};

/// One sequence. float32 holds every stored f16 and bf16 value exactly.
struct dense_sequence {
  std::int64_t query_len = 0;
  std::int64_t seq_len = 0;
  const float* q = nullptr;     ///< [query_len, num_q_heads, qk_head_dim]
  const float* k = nullptr;     ///< [seq_len, num_kv_heads, qk_head_dim]
  const float* v = nullptr;     ///< [seq_len, num_kv_heads, v_head_dim]
  const float* bias = nullptr;  ///< optional, [query_len, num_q_heads, seq_len]; what a row does not see is not read
  /// Position of the first query token, counted from the first key; nothing: the last token is at the last key.
  std::optional<std::int64_t> query_position{};

  [[nodiscard]] std::int64_t first_query_position() const { return query_position.value_or(seq_len - query_len); }
};

/// Row r = (token, head) of token · num_q_heads + head; elements r · v_head_dim + dim.
struct attention_reference {
  std::vector<double> out;          ///< [rows, v_head_dim]
  std::vector<double> magnitude;    ///< [rows, v_head_dim], M = Σ p_j |v_j|
  std::vector<double> lowest;       ///< [rows, v_head_dim], smallest value an average of what is visible can take
  std::vector<double> highest;      ///< [rows, v_head_dim]
  std::vector<double> lse;          ///< [rows]
  std::vector<double> logit_slack;  ///< [rows], E / u: the largest error of a float32 logit, in units of roundoff
  /// [rows], |scale| · max |q_d| · largest Σ |k_d|: what the roundoff of queries relative to their largest element is
  /// multiplied with to be that of a logit
  std::vector<double> query_slack;
  /// [rows], |scale| · Σ |q_d| · largest (max k_d − min k_d): the same of the roundoff of K's elements relative to a
  /// token's range
  std::vector<double> range_slack;
  std::vector<std::int64_t> num_keys;  ///< [rows], keys visible whose logit is not −inf
};

[[nodiscard]] attention_reference attend(const attention_options& options, const dense_sequence& seq);

/// The same in plain scalar float32: dot, exp, sum, one rounding of the output (which the caller does). [rows,
/// v_head_dim] and [rows].
struct scalar_attention {
  std::vector<float> out;
  std::vector<float> lse;
};
[[nodiscard]] scalar_attention attend_in_float32(const attention_options& options, const dense_sequence& seq);

/// Is key `j` visible to the query at position `p`?
[[nodiscard]] bool is_visible(const attention_options& options, std::int64_t p, std::int64_t j,
                              std::int64_t seq_len) noexcept;

/// One row of two partial results joined: out = (w_a·a + w_b·b) / (w_a + w_b), w = exp(lse − max). A state with LSE
/// −inf weighs nothing; two of them give 0 and −inf.
struct merged_row {
  std::vector<double> out;
  double lse = 0;
};
[[nodiscard]] merged_row merge(const double* a, double lse_a, const double* b, double lse_b, std::int32_t head_dim);

}  // namespace bifolio::reference

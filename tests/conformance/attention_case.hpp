// SPDX-License-Identifier: Apache-2.0
#pragma once

/// One attention call as data: what to compute (`attention_case`), the numbers in it (`attention_contents`), where
/// everything lies (`attention_placement`), and the call itself on a backend (`attention_call`), which uploads, runs,
/// reads back, and finds what was written that should not be. Contents depend on (seed, sequence, position, head, dim)
/// alone: the same token has the same stored bits in every cut, order and layout.

#include <bifolio/backend.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reference/attention_accuracy.hpp"
#include "reference/attention_oracle.hpp"
#include "support/backends.hpp"
#include "support/device_bytes.hpp"
#include "support/paged_cache.hpp"

namespace bifolio::test {

/// A sequence of a batch, or a part of one: `query_len` tokens are computed, `seq_len` keys are in its table row.
struct batch_seq {
  std::int32_t query_len = 0;
  std::int32_t seq_len = 0;
  std::int32_t content = -1;  ///< which sequence's contents; negative = its place in the batch
  /// Position of the row's first key in the sequence.
  std::int32_t first_position = 0;
  /// Position of the first token that is computed; nothing: the last one is at the row's last key.
  std::optional<std::int32_t> query_position{};

  /// The same, counted from the row's first key.
  [[nodiscard]] std::int32_t query_offset() const {
    return query_position ? *query_position - first_position : seq_len - query_len;
  }
};

enum class value_kind : std::uint8_t {
  normal,        ///< about N(0, 1)
  equal_logits,  ///< all keys alike: every visible token weighs the same
  dominant_key,  ///< one key's logit is about 60 above all others
  huge_logits,   ///< logits near +80 and −80
  denormal,      ///< q, K and V below the normal range of their dtypes
  max_finite,    ///< K and V as large as their dtypes allow without float32 sums overflowing
  zero_points,   ///< K and V of ranges without 0, with it at an end, and far wider than most of their numbers
};
[[nodiscard]] std::string_view to_string(value_kind kind) noexcept;

/// Which extents of the bias are 1, and what it holds.
enum class bias_kind : std::uint8_t {
  none,
  full,       ///< a row for each token and head
  one_head,   ///< for each token
  one_token,  ///< for each head
  one_row,    ///< one for all
  masked,     ///< for each token and head, −inf for a third of the keys and for whole rows
  lowest,     ///< for each token and head, the lowest finite number for every third key
};
[[nodiscard]] std::string_view to_string(bias_kind kind) noexcept;

struct attention_case {
  std::string what{};
  std::int32_t num_kv_heads = 2;
  std::int32_t group_size = 2;
  std::int32_t head_dim = 64;   ///< of q and K
  std::int32_t v_head_dim = 0;  ///< of V and out; 0 = head_dim
  bool v_in_k = false;          ///< V is the first dims of K
  std::int32_t block_size = 16;
  dtype q_type = dtype::f32;
  dtype kv_type = dtype::f32;
  dtype out_type = dtype::f32;
  /// Codes of K and V instead of kv_type, which is then f32: contents hold the values that are read back.
  std::optional<kv_code> k_code{};
  std::optional<kv_code> v_code{};
  bool unit_scales = false;  ///< static scales are 1
  arrangement layout = arrangement::hnd;
  std::vector<batch_seq> seqs{};
  bool causal = true;
  std::int32_t window_left = -1;
  std::int32_t window_right = -1;
  float scale = 0;  ///< 0 = 1/√head_dim
  float soft_cap = 0;
  bool alibi = false;
  float alibi_factor = 1;  ///< of all slopes; those of the ALiBi paper stay below 1
  bool sinks = false;
  bias_kind bias = bias_kind::none;
  dtype bias_type = dtype::f32;
  bool lse = true;
  bool deterministic = false;  ///< asked of the plan; on the CPU nothing depends on it
  bool aligned = false;        ///< gaps of q and out keep every row aligned to 16 bytes, as tensor-core kernels ask
  value_kind values = value_kind::normal;
  /// Also held to the gates that expect the errors of many rows to cancel; a single row may be unlucky.
  bool statistical = true;
  std::uint64_t seed = 1;

  [[nodiscard]] std::int32_t num_q_heads() const noexcept { return num_kv_heads * group_size; }
  [[nodiscard]] std::int32_t out_dim() const noexcept { return v_head_dim > 0 ? v_head_dim : head_dim; }
  [[nodiscard]] std::int64_t num_tokens() const noexcept;
  [[nodiscard]] float used_scale() const noexcept;
  /// Whether the batch says where its queries are.
  [[nodiscard]] bool has_query_positions() const noexcept;
};

/// The case in words, with its own seed.
[[nodiscard]] std::string settings_of(const attention_case& the_case);
/// The same case with codes; numbers that only float32 holds become ordinary ones.
[[nodiscard]] attention_case with_codes(attention_case the_case, const kv_code& k, const kv_code& v);

/// Everything needed to see a failing case of the suite again: `settings_of` and the seed of the run.
[[nodiscard]] std::string describe(const attention_case& the_case);

/// The numbers of a case, rounded to their stored dtypes. Tests may overwrite elements before a call is made from them.
struct attention_contents {
  explicit attention_contents(const attention_case& the_case);

  struct sequence {
    std::vector<float> q;                     ///< [query_len, num_q_heads, head_dim]
    std::vector<float> k;                     ///< [seq_len, num_kv_heads, head_dim]
    std::vector<float> v;                     ///< [seq_len, num_kv_heads, v_head_dim]
    std::vector<float> bias;                  ///< [query_len, num_q_heads, seq_len], or empty
    std::vector<float> k_given{}, v_given{};  ///< K and V before they are stored, with codes
  };
  std::vector<sequence> seqs;
  std::vector<float> alibi_slopes;  ///< [num_q_heads], or empty
  std::vector<float> sinks;         ///< [num_q_heads], or empty
};

/// Where things lie; nothing of it may show in a result.
struct attention_placement {
  cache_placement cache;
  std::int64_t q_token_gap = 3;  ///< elements between the tokens of q
  std::int64_t q_head_gap = 1;   ///< elements between its heads
  std::int64_t out_token_gap = 2;
  std::int64_t out_head_gap = 5;
  std::int64_t bias_token_gap = 4;
  std::int64_t bias_head_gap = 3;
  std::int32_t bias_key_gap = 7;  ///< keys past the longest sequence
};

/// Dense where `turn` is even, with gaps where it is odd: both are common, and gaps make every row's alignment
/// different.
[[nodiscard]] attention_placement placement_in_turn(const attention_case& the_case, std::size_t turn);

/// Results, dense: [num_tokens, num_q_heads, v_head_dim] widened to float32, which keeps every bit, and
/// [num_tokens, num_q_heads].
struct attention_output {
  std::vector<float> out;
  std::vector<float> lse;
};

/// The rows of sequence `s` of a result.
[[nodiscard]] attention_output rows_of(const attention_case& the_case, const attention_output& output, std::size_t s);
/// Adds rows at the end.
void append(attention_output& to, const attention_output& from);

/// Whether a plan was refused because the device, or the build, has no kernel of the implementation that was asked for:
/// what is allowed where one is forced by name.
[[nodiscard]] bool is_for_lack_of_a_kernel(const error& refused);

class attention_call {
 public:
  attention_call(const tested_backend& tested, const attention_case& the_case, const attention_contents& contents,
                 const attention_placement& placement = {});
  attention_call(const attention_call&) = delete;
  attention_call& operator=(const attention_call&) = delete;

  // For tests that bend the arguments between construction and `plan` or `run`.
  attention_spec spec;
  host_step_view host_batch;
  std::int64_t num_blocks = 0;
  attention_plan planned;
  attention_params params;

  void plan() { tested_.get().plan_attention(planned, spec, host_batch, num_blocks); }
  [[nodiscard]] errc run();

  /// The results of a finished call, and in `problem` what was not written, or written and should not be: elements left
  /// as they were, gaps and surroundings of the outputs, inputs, cache.
  [[nodiscard]] attention_output read(std::string& problem);
  /// Nothing at all was written since construction or `reset_outputs`.
  [[nodiscard]] bool untouched() const;
  /// Poisons the outputs again.
  void reset_outputs();

 private:
  [[nodiscard]] bool inputs_unchanged() const;
  void place_bias(const attention_case& the_case, const attention_contents& contents,
                  const attention_placement& placement);

  const tested_backend& tested_;
  dtype out_type_;
  bool has_lse_;
  std::vector<std::int32_t> starts_, lens_, query_positions_;
  paged_cache cache_;
  device_bytes q_, out_, lse_, starts_on_device_, lens_on_device_, positions_on_device_, tables_on_device_, slopes_,
      sinks_, bias_;
};

/// Runs a planned call and reads it; throws std::runtime_error with what went wrong, a refusal or a stray write.
[[nodiscard]] attention_output run_planned(const tested_backend& tested, attention_call& call);
/// The same from a case; plans as well, and the exception names the case.
[[nodiscard]] attention_output run_attention(const tested_backend& tested, const attention_case& the_case,
                                             const attention_contents& contents,
                                             const attention_placement& placement = {});

/// Expected results of a case, computed once and held against every backend.
class attention_expectation {
 public:
  attention_expectation(const attention_case& the_case, const attention_contents& contents);
  /// From now on these are the expected results, those of another implementation; without `other.lse` the LSE stays the
  /// oracle's, as the bounds do. The other implementation's own rounding is for the caller to add.
  void expect(const attention_output& other);
  /// The sequences [first, last) of a whole result, judged together. `other_nmse`: that of the results that `expect`
  /// was given.
  [[nodiscard]] reference::accuracy_judge judge(const attention_output& got, const arithmetic& numbers,
                                                std::size_t first, std::size_t last, double other_nmse = 0) const;
  /// What is wrong with `got`; empty when all gates hold.
  [[nodiscard]] std::string problem_of(const attention_output& got, const arithmetic& numbers,
                                       double other_nmse = 0) const;

 private:
  const attention_case& case_;
  const attention_contents& contents_;
  reference::attention_options options_;
  std::vector<reference::attention_reference> expected_;
  std::vector<reference::scalar_attention> scalar_;
};

/// How exact a backend is on a case.
[[nodiscard]] arithmetic numbers_for(const tested_backend& tested, const attention_case& the_case);

/// Oracle against these backends. Returns all complaints as text.
[[nodiscard]] std::string check_attention(const attention_case& the_case,
                                          const std::vector<const tested_backend*>& backends, std::size_t turn = 0);
/// Against every family of backends; the executors and the placements take turns with `turn`.
[[nodiscard]] std::string check_attention(const attention_case& the_case, std::size_t turn = 0);

/// Where two outputs differ in any bit, as text; empty when nowhere.
[[nodiscard]] std::string bit_difference(const attention_output& a, const attention_output& b);

}  // namespace bifolio::test

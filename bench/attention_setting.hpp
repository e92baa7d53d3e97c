// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the attention benchmarks of all devices share: how to measure, one row's setting, contents, counted work, the
/// row.

#include <bifolio/attention.hpp>
#include <bifolio/kv_layout.hpp>
#include <cstdint>
#include <string>
#include <vector>

#include "report.hpp"

namespace bifolio::bench {

/// How to measure; the same for all rows of a run.
struct measuring_options {
  std::string device = "cpu";
  std::int32_t threads = 0;
  std::string executor = "threads";
  std::vector<std::string> isas;
  std::int32_t busy = 0;  ///< processes that only compute, beside the measurement
  bool spaced = false;
  bool apart = false;
  std::int32_t repeats = 7;
  double seconds = 1.0;
  std::uint64_t seed = 1;
};

struct sequence_shape {
  std::int32_t query_len = 1;  ///< new tokens
  std::int32_t context = 0;    ///< tokens visible, new ones included
};

/// One row: one attention call.
struct setting {
  dtype q_type = dtype::bf16;
  kv_code kv{dtype::bf16};  ///< of K
  kv_code v{dtype::bf16};   ///< of V
  std::vector<sequence_shape> seqs;
  std::string lengths = "equal";  ///< "equal", or what --seqs said
  std::int32_t q_heads = 32;
  std::int32_t kv_heads = 8;
  std::int32_t head_dim = 128;
  std::int32_t latent_dim = 0;  ///< V is the first dims of K, as many; 0 = V of its own, as large as K
  std::int32_t block_size = 16;
  layout_kind layout = layout_kind::hnd;
  std::int32_t window = -1;
  float soft_cap = 0;
  bool alibi = false;
  bool non_causal = false;
  bool deterministic = false;

  [[nodiscard]] std::int64_t num_tokens() const noexcept;
  [[nodiscard]] std::int32_t longest_context() const noexcept;
};

/// Host arrays of a step of these sequences; block ids are numbers from 0 in any order of the caller's.
struct step_lengths {
  explicit step_lengths(const setting& s);
  std::vector<std::int32_t> starts;    ///< [num_seqs + 1]
  std::vector<std::int32_t> contexts;  ///< [num_seqs]
  std::int64_t table_stride = 0;       ///< blocks of the longest sequence
  std::int64_t num_blocks = 0;         ///< of all sequences
};

/// Block tables [num_seqs, table_stride] of one set: `ids` are its num_blocks block ids.
[[nodiscard]] std::vector<std::int32_t> tables_of(const setting& s, const step_lengths& lengths,
                                                  const std::int32_t* ids);

/// Bytes of a pool: elements of unscaled codes; of others any finite ones, whose scales are finite too.
void fill_pool(void* data, const kv_code& code, std::int64_t num_bytes, std::uint64_t seed);
/// A static scale for any number of heads.
inline constexpr float bench_scale = 0.01f;

/// Finite values of about N(0, 1)/2 in any dtype.
void fill_values(void* data, dtype type, std::int64_t count, std::uint64_t seed);

struct visible_work {
  std::int64_t keys = 0;   ///< positions that the call reads
  std::int64_t pairs = 0;  ///< (query token, visible position)
};
[[nodiscard]] visible_work work_of(const setting& s);

[[nodiscard]] attention_spec spec_of(const setting& s);
/// Slopes of the ALiBi paper, [q_heads]; empty without --alibi.
[[nodiscard]] std::vector<float> slopes_of(const setting& s);

/// What was measured, in seconds and GB/s.
struct attention_result {
  std::string device;
  std::string isa;
  std::int32_t threads = 0;
  summary time;
  double spaced_seconds = 0;  ///< of a call after a kernel that fills the GPU, see --spaced; 0 = not measured
  /// Of a batch with both: two calls, for the sequences of several new tokens and for those of one; 0 = not measured.
  double apart_seconds = 0;
  double probe_gb_s = 0;
  double gather_gb_s = 0;
  double plan_seconds = 0;  ///< host time of planning a step; 0 = not measured
  double call_seconds = 0;  ///< host time of one layer's call on a device; 0 = not measured
};
[[nodiscard]] row attention_row(const setting& s, const attention_result& result);

/// Measures all settings on the CPU.
void run_cpu_attention(const measuring_options& options, const std::vector<setting>& settings, report& out);

/// Measures all settings on a CUDA device. Throws `error`: unsupported without one.
void run_cuda_attention(const measuring_options& options, const std::vector<setting>& settings, report& out);

}  // namespace bifolio::bench

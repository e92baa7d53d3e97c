// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/assignment.hpp"

#include <algorithm>

#include "cuda/attention/decode/plan.hpp"
#include "cuda/attention/prefill/plan.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

// Microseconds, and bytes in one.
constexpr double decode_launch_us = 5.0;
constexpr double decode_tile_us = 1.4;      // of 64 keys of head_dim 128, on half an SM
constexpr double f32_decode_tile_us = 5.6;  // the same in float32
constexpr double memory_bytes_per_us = 4.3e6;
/// What a KV head of a decoding sequence takes an SM beside prompts, more than `estimate_prefill` says: one call of
/// 4096 new tokens and 200 decodes on 700 keys takes 412 us on an H200, the prompt alone 244.
constexpr double decode_beside_prompts_us = 2.5;
/// One launch for all must be faster than two by this factor, because estimates are no measurements.
constexpr double worth_one_launch = 0.93;

class estimator {
 public:
  explicit estimator(const plan_input& step) noexcept : step_(step) {}

  [[nodiscard]] std::int64_t rows(std::int32_t query_len) const noexcept {
    return std::int64_t{query_len} * (step_.spec.num_q_heads / step_.spec.num_kv_heads);
  }
  /// What decode takes for a sequence among others that keep the device busy.
  [[nodiscard]] double decode_us(std::int32_t query_len, std::int32_t seq_len) const noexcept {
    const std::int64_t row_tiles = (rows(query_len) + decode_tile_rows - 1) / decode_tile_rows;
    const double tiles = static_cast<double>(row_tiles * step_.spec.num_kv_heads) *
                         (visible_keys(query_len, seq_len) / decode_tile_tokens + 2);
    const attention_spec& spec = step_.spec;
    // 16-bit types wait for memory, which padding does not reach; float32 computes its padding too.
    const bool is_f32 = spec.q_type == dtype::f32;
    const double us_per_dim = (is_f32 ? f32_decode_tile_us : decode_tile_us) / 128;
    const std::int32_t dims = is_f32 ? decode_padded_dim(dtype::f32, spec.qk_head_dim) : spec.qk_head_dim;
    return tiles / (2.0 * step_.device.num_sms) * us_per_dim * dims;
  }
  /// What it takes to read its keys and values once.
  [[nodiscard]] double memory_us(std::int32_t query_len, std::int32_t seq_len) const noexcept {
    const auto bytes = static_cast<double>(size_of(step_.spec.k_code.type) + size_of(step_.spec.v_code.type));
    return visible_keys(query_len, seq_len) * step_.spec.num_kv_heads * step_.spec.qk_head_dim * bytes /
           memory_bytes_per_us;
  }

 private:
  [[nodiscard]] double visible_keys(std::int32_t query_len, std::int32_t seq_len) const noexcept {
    const attention_spec& spec = step_.spec;
    if (spec.window_left < 0) return seq_len;
    return std::min<double>(seq_len, static_cast<double>(spec.window_left) + query_len);
  }

  const plan_input& step_;
};

}  // namespace

void choose_prefill_seqs(const plan_input& step, std::span<const std::int32_t> query_lens,
                         std::vector<std::int32_t>& seqs) {
  const estimator estimate(step);
  seqs.clear();
  const auto has_many_rows = [&](std::int32_t n) { return estimate.rows(n) > decode_tile_rows; };
  const auto num_many = std::count_if(query_lens.begin(), query_lens.end(), has_many_rows);
  if (num_many == 0) return;

  // What does not depend on a sequence's length is shared by all that have many rows.
  const double fixed_share = 1.0 / static_cast<double>(num_many);
  double prefill_us = 0;
  double fixed_us = 0;
  std::size_t num_others = 0;
  for (std::int32_t seq = 0; seq < step.num_seqs; ++seq) {
    const std::int32_t query_len = query_lens[static_cast<std::size_t>(seq)];
    if (query_len == 0) continue;
    if (has_many_rows(query_len)) {
      const prefill_estimate prefill = estimate_prefill(step, query_len, step.seq_lens[seq]);
      const double fixed = prefill.alone_us - prefill.share_us;
      const double decode_us = estimate.decode_us(query_len, step.seq_lens[seq]);
      if (prefill.share_us + fixed * fixed_share < decode_us + decode_launch_us * fixed_share) {
        seqs.push_back(seq);
        prefill_us += prefill.share_us;
        fixed_us = std::max(fixed_us, fixed);
        continue;
      }
    }
    ++num_others;
  }
  if (seqs.empty() || num_others == 0) return;

  // Two launches one after the other, or all in one.
  double decode_us = 0;
  double memory_us = 0;
  double together_us = prefill_us;
  double longest_us = 0;
  std::size_t next = 0;
  for (std::int32_t seq = 0; seq < step.num_seqs; ++seq) {
    const std::int32_t query_len = query_lens[static_cast<std::size_t>(seq)];
    if (next < seqs.size() && seqs[next] == seq) {
      ++next;
      continue;
    }
    if (query_len == 0) continue;
    const prefill_estimate prefill = estimate_prefill(step, query_len, step.seq_lens[seq]);
    decode_us += estimate.decode_us(query_len, step.seq_lens[seq]);
    memory_us += estimate.memory_us(query_len, step.seq_lens[seq]);
    together_us += prefill.share_us + decode_beside_prompts_us * step.spec.num_kv_heads / step.device.num_sms;
    longest_us = std::max(longest_us, prefill.share_us * step.device.num_sms / step.spec.num_kv_heads);
  }
  const double apart = prefill_us + fixed_us + std::max(decode_us, memory_us) + decode_launch_us;
  const double together = std::max({together_us, memory_us, longest_us}) + fixed_us;
  if (together >= apart * worth_one_launch) return;
  seqs.clear();
  for (std::int32_t seq = 0; seq < step.num_seqs; ++seq) {
    if (query_lens[static_cast<std::size_t>(seq)] > 0) seqs.push_back(seq);
  }
}

}  // namespace bifolio::inline v0_2::cuda

// SPDX-License-Identifier: Apache-2.0
#include "attention_setting.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

namespace bifolio::bench {

// Speed matters more than quality.
void fill_values(void* data, dtype type, std::int64_t count, std::uint64_t seed) {
  std::vector<std::uint32_t> pattern(1 << 14);
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, 0.5f);
  const std::size_t element = size_of(type);
  auto* bytes = reinterpret_cast<std::byte*>(pattern.data());
  const std::size_t in_pattern = pattern.size() * sizeof(std::uint32_t) / element;
  // Of codes every fourth is such that four, as a float32, are a scale of about 2^-6: scales lie among them.
  const bool is_code = !is_tensor_dtype(type);
  const float size = type == dtype::i8 || type == dtype::u8 ? 80.0f : 1.0f;
  visit_dtype(type, [&](auto traits) {
    for (std::size_t i = 0; i < in_pattern; ++i) {
      const auto value = from_float<typename decltype(traits)::storage>(normal(random) * size);
      std::memcpy(bytes + i * element, &value, element);
      if (is_code && i % sizeof(float) == sizeof(float) - 1) bytes[i] = std::byte{0x3c};
    }
  });
  // Copies of an odd length, so that no two blocks are alike.
  const std::size_t run = pattern.size() * sizeof(std::uint32_t) - 37 * (is_code ? sizeof(float) : element);
  auto* to = static_cast<std::byte*>(data);
  std::size_t left = static_cast<std::size_t>(count) * element;
  while (left > 0) {
    const std::size_t now = std::min(left, run);
    std::memcpy(to, bytes, now);
    to += now;
    left -= now;
  }
}

void fill_pool(void* data, const kv_code& code, std::int64_t num_bytes, std::uint64_t seed) {
  fill_values(data, code.type, num_bytes / static_cast<std::int64_t>(size_of(code.type)), seed);
}

std::int64_t setting::num_tokens() const noexcept {
  std::int64_t tokens = 0;
  for (const sequence_shape& seq : seqs) tokens += seq.query_len;
  return tokens;
}

std::int32_t setting::longest_context() const noexcept {
  std::int32_t longest = 0;
  for (const sequence_shape& seq : seqs) longest = std::max(longest, seq.context);
  return longest;
}

step_lengths::step_lengths(const setting& s) {
  starts.push_back(0);
  for (const sequence_shape& seq : s.seqs) {
    starts.push_back(starts.back() + seq.query_len);
    contexts.push_back(seq.context);
    num_blocks += blocks_for(seq.context, s.block_size);
  }
  table_stride = blocks_for(s.longest_context(), s.block_size);
}

std::vector<std::int32_t> tables_of(const setting& s, const step_lengths& lengths, const std::int32_t* ids) {
  std::vector<std::int32_t> tables(s.seqs.size() * static_cast<std::size_t>(lengths.table_stride));
  auto to = tables.begin();
  for (const sequence_shape& seq : s.seqs) {
    const std::int64_t count = blocks_for(seq.context, s.block_size);
    std::copy_n(ids, count, to);
    ids += count;
    to += lengths.table_stride;
  }
  return tables;
}

visible_work work_of(const setting& s) {
  visible_work work;
  for (const sequence_shape& seq : s.seqs) {
    const std::int64_t context = seq.context;
    std::int64_t first = context;
    for (std::int64_t t = 0; t < seq.query_len; ++t) {
      const std::int64_t position = context - seq.query_len + t;
      const std::int64_t begin = s.window < 0 ? 0 : std::max<std::int64_t>(0, position - s.window);
      const std::int64_t end = s.non_causal ? context : position + 1;
      first = std::min(first, begin);
      work.pairs += end - begin;
    }
    work.keys += context - first;
  }
  return work;
}

attention_spec spec_of(const setting& s) {
  attention_spec spec;
  spec.num_q_heads = s.q_heads;
  spec.num_kv_heads = s.kv_heads;
  spec.qk_head_dim = spec.v_head_dim = s.head_dim;
  spec.v_in_k = s.latent_dim > 0;
  if (spec.v_in_k) spec.v_head_dim = s.latent_dim;
  spec.block_size = s.block_size;
  spec.q_type = s.q_type;
  spec.k_code = s.kv;
  spec.v_code = s.v;
  spec.out_type = s.q_type;
  spec.causal = !s.non_causal;
  spec.window_left = s.window;
  spec.deterministic = s.deterministic;
  return spec;
}

std::vector<float> slopes_of(const setting& s) {
  std::vector<float> slopes;
  for (std::int32_t h = 0; s.alibi && h < s.q_heads; ++h) {
    slopes.push_back(std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(s.q_heads)));
  }
  return slopes;
}

namespace {

// What a row asks for besides a causal mask, e.g. "window 1023, soft_cap 30".
std::string options_text(const setting& s) {
  std::string text;
  const auto add = [&](const std::string& option) { text += (text.empty() ? "" : ", ") + option; };
  if (s.latent_dim > 0) add("V in K " + std::to_string(s.latent_dim));
  if (s.non_causal) add("non-causal");
  if (s.window >= 0) add("window " + std::to_string(s.window));
  if (s.soft_cap > 0) add("soft_cap " + std::to_string(static_cast<int>(s.soft_cap)));
  if (s.alibi) add("alibi");
  if (s.deterministic) add("deterministic");
  return text;
}

}  // namespace

row attention_row(const setting& s, const attention_result& result) {
  const visible_work work = work_of(s);
  // Elements and the scales that belong to tokens.
  const auto vector_bytes = [&](const kv_code& code) {
    return code.is_record() ? static_cast<double>(kv_record::bytes)
                            : s.head_dim * static_cast<double>(size_of(code.type)) +
                                  code.tail_floats() * static_cast<double>(sizeof(float));
  };
  const double bytes =
      static_cast<double>(work.keys) * s.kv_heads * (vector_bytes(s.kv) + (s.latent_dim > 0 ? 0.0 : vector_bytes(s.v)));
  const int v_dims = s.latent_dim > 0 ? s.latent_dim : s.head_dim;
  const double flops = 2.0 * (s.head_dim + v_dims) * s.q_heads * static_cast<double>(work.pairs);
  const double kv_gb_s = bytes / result.time.median * 1e-9;
  std::int32_t query_len = 0;
  for (const sequence_shape& seq : s.seqs) query_len = std::max(query_len, seq.query_len);
  return {{"device", result.device},
          {"isa", result.isa},
          {"dtype", std::string(to_string(s.q_type))},
          {"kv_dtype", std::string(short_name(s.kv)) + (s.v == s.kv ? "" : "/" + std::string(short_name(s.v)))},
          {"batch", static_cast<std::int64_t>(s.seqs.size())},
          {"query_len", std::int64_t{query_len}},
          {"context", std::int64_t{s.longest_context()}},
          {"lengths", s.lengths},
          {"q_heads", std::int64_t{s.q_heads}},
          {"kv_heads", std::int64_t{s.kv_heads}},
          {"head_dim", std::int64_t{s.head_dim}},
          {"block_size", std::int64_t{s.block_size}},
          {"layout", std::string(to_string(s.layout))},
          {"options", options_text(s)},
          {"threads", std::int64_t{result.threads}},
          {"time_us", result.time.median * 1e6},
          {"p10_us", result.time.p10 * 1e6},
          {"p90_us", result.time.p90 * 1e6},
          {"spaced_us", result.spaced_seconds * 1e6},
          {"apart_us", result.apart_seconds * 1e6},
          {"kv_gb_s", kv_gb_s},
          {"gflop_s", flops / result.time.median * 1e-9},
          {"probe_gb_s", result.probe_gb_s},
          {"share_of_probe", kv_gb_s / result.probe_gb_s},
          {"gather_gb_s", result.gather_gb_s},
          {"plan_us", result.plan_seconds * 1e6},
          {"call_us", result.call_seconds * 1e6}};
}

}  // namespace bifolio::bench

// SPDX-License-Identifier: Apache-2.0
#include "attention_setting.hpp"

#include <algorithm>
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
  for (std::size_t i = 0; i < in_pattern; ++i) {
    const float value = normal(random);
    const auto half = from_float<float16>(value);
    const auto brain = from_float<bfloat16>(value);
    const void* source = type == dtype::f32   ? static_cast<const void*>(&value)
                         : type == dtype::f16 ? static_cast<const void*>(&half.bits)
                                              : static_cast<const void*>(&brain.bits);
    std::memcpy(bytes + i * element, source, element);
  }
  // Copies of an odd length, so that no two blocks are alike.
  const std::size_t run = pattern.size() * sizeof(std::uint32_t) - 37 * element;
  auto* to = static_cast<std::byte*>(data);
  std::size_t left = static_cast<std::size_t>(count) * element;
  while (left > 0) {
    const std::size_t now = std::min(left, run);
    std::memcpy(to, bytes, now);
    to += now;
    left -= now;
  }
}

visible_work work_of(const setting& s, const attention_options& options) {
  visible_work work;
  const std::int64_t context = s.context;
  std::int64_t first = context;
  for (std::int64_t t = 0; t < s.query_len; ++t) {
    const std::int64_t position = context - s.query_len + t;
    const std::int64_t begin = options.window < 0 ? 0 : std::max<std::int64_t>(0, position - options.window);
    const std::int64_t end = options.non_causal ? context : position + 1;
    first = std::min(first, begin);
    work.pairs += end - begin;
  }
  work.keys = context - first;
  work.keys *= s.batch;
  work.pairs *= s.batch;
  return work;
}

attention_spec spec_of(const setting& s, const attention_options& options) {
  attention_spec spec;
  spec.num_q_heads = options.q_heads;
  spec.num_kv_heads = s.kv_heads;
  spec.qk_head_dim = spec.v_head_dim = options.head_dim;
  spec.block_size = s.block_size;
  spec.q_type = s.q_type;
  spec.k_code.type = spec.v_code.type = s.kv_type;
  spec.out_type = s.q_type;
  spec.causal = !options.non_causal;
  spec.window_left = options.window;
  spec.deterministic = options.deterministic;
  return spec;
}

row attention_row(const setting& s, const attention_options& options, const attention_result& result) {
  const visible_work work = work_of(s, options);
  const double bytes =
      static_cast<double>(work.keys) * s.kv_heads * options.head_dim * 2 * static_cast<double>(size_of(s.kv_type));
  const double flops = 4.0 * options.head_dim * options.q_heads * static_cast<double>(work.pairs);
  const double kv_gb_s = bytes / result.time.median * 1e-9;
  return {{"device", result.device},
          {"isa", result.isa},
          {"dtype", std::string(to_string(s.q_type))},
          {"kv_dtype", std::string(to_string(s.kv_type))},
          {"batch", std::int64_t{s.batch}},
          {"query_len", std::int64_t{s.query_len}},
          {"context", std::int64_t{s.context}},
          {"q_heads", std::int64_t{options.q_heads}},
          {"kv_heads", std::int64_t{s.kv_heads}},
          {"head_dim", std::int64_t{options.head_dim}},
          {"block_size", std::int64_t{s.block_size}},
          {"layout", std::string(to_string(s.layout))},
          {"threads", std::int64_t{result.threads}},
          {"time_us", result.time.median * 1e6},
          {"p10_us", result.time.p10 * 1e6},
          {"p90_us", result.time.p90 * 1e6},
          {"kv_gb_s", kv_gb_s},
          {"gflop_s", flops / result.time.median * 1e-9},
          {"probe_gb_s", result.probe_gb_s},
          {"share_of_probe", kv_gb_s / result.probe_gb_s},
          {"gather_gb_s", result.gather_gb_s},
          {"plan_us", result.plan_seconds * 1e6},
          {"call_us", result.call_seconds * 1e6}};
}

}  // namespace bifolio::bench

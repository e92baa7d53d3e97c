// SPDX-License-Identifier: Apache-2.0
#include "reference/attention_oracle.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace bifolio::reference {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// Float32 error of one logit in units of roundoff: the dot product and its scaling by the usual (d + 2)·Σ|q·k| bound, a
// tanh that is good to a few units of the cap, the multiply and add of ALiBi, and the add of the bias.
double slack_of_logit(const attention_options& options, double products, double before_alibi, double alibi,
                      double bias) {
  double slack = std::abs(static_cast<double>(options.scale)) * (options.qk_head_dim + 2) * products;
  if (options.soft_cap > 0) slack += 8.0 * static_cast<double>(options.soft_cap);
  if (options.alibi_slopes != nullptr) slack += 2 * std::abs(alibi) + std::abs(before_alibi);
  if (bias != 0) slack += std::abs(before_alibi + alibi) + std::abs(bias);
  return slack;
}

// Of key j in row `row` of the sequence; 0 without a bias.
float bias_of(const dense_sequence& seq, std::size_t row, std::int64_t j) {
  return seq.bias == nullptr ? 0.0f : seq.bias[static_cast<std::int64_t>(row) * seq.seq_len + j];
}

}  // namespace

bool is_visible(const attention_options& options, std::int64_t p, std::int64_t j, std::int64_t seq_len) noexcept {
  if (j < 0 || j >= seq_len) return false;
  if (options.causal && j > p) return false;
  if (options.window_left >= 0 && j < p - options.window_left) return false;
  if (options.window_right >= 0 && j > p + options.window_right) return false;
  return true;
}

attention_reference attend(const attention_options& options, const dense_sequence& seq) {
  const std::int64_t d = options.qk_head_dim;
  const std::int64_t v_d = options.v_head_dim;
  const std::int64_t group = options.num_q_heads / options.num_kv_heads;
  const auto rows = static_cast<std::size_t>(seq.query_len * options.num_q_heads);
  const std::size_t elements = rows * static_cast<std::size_t>(v_d);
  attention_reference result;
  result.out.assign(elements, 0.0);
  result.magnitude.assign(elements, 0.0);
  result.lowest.assign(elements, 0.0);
  result.highest.assign(elements, 0.0);
  result.lse.assign(rows, -infinity);
  result.logit_slack.assign(rows, 0.0);
  result.query_slack.assign(rows, 0.0);
  result.range_slack.assign(rows, 0.0);
  result.num_keys.assign(rows, 0);

  std::vector<std::int64_t> keys;
  std::vector<double> logits;
  std::vector<double> slacks;
  std::vector<double> key_sums;
  std::vector<double> ranges;
  for (std::int64_t t = 0; t < seq.query_len; ++t) {
    const std::int64_t p = seq.first_query_position() + t;
    for (std::int64_t h = 0; h < options.num_q_heads; ++h) {
      const auto row = static_cast<std::size_t>(t * options.num_q_heads + h);
      const float* q = seq.q + static_cast<std::int64_t>(row) * d;
      keys.clear();
      logits.clear();
      slacks.clear();
      key_sums.clear();
      ranges.clear();
      double largest_q = 0;
      double query_sum = 0;
      for (std::int64_t i = 0; i < d; ++i) {
        largest_q = std::max(largest_q, std::abs(static_cast<double>(q[i])));
        query_sum += std::abs(static_cast<double>(q[i]));
      }
      for (std::int64_t j = 0; j < seq.seq_len; ++j) {
        if (!is_visible(options, p, j, seq.seq_len)) continue;
        const float* k = seq.k + (j * options.num_kv_heads + h / group) * d;
        double dot = 0;
        double products = 0;
        double key_sum = 0;
        for (std::int64_t i = 0; i < d; ++i) {
          const double product = static_cast<double>(q[i]) * static_cast<double>(k[i]);
          dot += product;
          products += std::abs(product);
          key_sum += std::abs(static_cast<double>(k[i]));
        }
        double logit = static_cast<double>(options.scale) * dot;
        if (options.soft_cap > 0) {
          const auto cap = static_cast<double>(options.soft_cap);
          logit = cap * std::tanh(logit / cap);
        }
        const double alibi = options.alibi_slopes == nullptr
                                 ? 0.0
                                 : static_cast<double>(options.alibi_slopes[h]) * static_cast<double>(j - p);
        const auto bias = static_cast<double>(bias_of(seq, row, j));
        if (logit + alibi + bias == -infinity) continue;  // weighs nothing
        slacks.push_back(slack_of_logit(options, products, logit, alibi, bias));
        key_sums.push_back(std::abs(static_cast<double>(options.scale)) * largest_q * key_sum);
        const auto [least, most] = std::minmax_element(k, k + d);
        ranges.push_back(std::abs(static_cast<double>(options.scale)) * query_sum *
                         (static_cast<double>(*most) - static_cast<double>(*least)));
        keys.push_back(j);
        logits.push_back(logit + alibi + bias);
      }
      result.num_keys[row] = static_cast<std::int64_t>(keys.size());

      double maximum = -infinity;
      for (const double logit : logits) maximum = std::max(maximum, logit);
      const double sink = options.sinks == nullptr ? -infinity : static_cast<double>(options.sinks[h]);
      maximum = std::max(maximum, sink);
      if (maximum == -infinity) continue;  // nothing to see: output 0, LSE −inf
      double& slack = result.logit_slack[row];
      for (std::size_t n = 0; n < keys.size(); ++n) {
        // Keys that a bias puts so low that float32 has no weight for them, whatever their own error, do not count.
        if (seq.bias != nullptr && logits[n] + 0x1p-20 * slacks[n] < maximum - 110) continue;
        slack = std::max(slack, slacks[n]);
        result.query_slack[row] = std::max(result.query_slack[row], key_sums[n]);
        result.range_slack[row] = std::max(result.range_slack[row], ranges[n]);
      }

      double sum = std::exp(sink - maximum);
      for (double& logit : logits) {
        logit = std::exp(logit - maximum);  // from here on the unnormalised probability
        sum += logit;
      }
      result.lse[row] = maximum + std::log(sum);
      double* out = result.out.data() + row * static_cast<std::size_t>(v_d);
      double* magnitude = result.magnitude.data() + row * static_cast<std::size_t>(v_d);
      double* lowest = result.lowest.data() + row * static_cast<std::size_t>(v_d);
      double* highest = result.highest.data() + row * static_cast<std::size_t>(v_d);
      for (std::size_t n = 0; n < keys.size(); ++n) {
        const float* v = seq.v + (keys[n] * options.num_kv_heads + h / group) * v_d;
        const double probability = logits[n] / sum;
        for (std::int64_t i = 0; i < v_d; ++i) {
          const auto value = static_cast<double>(v[i]);
          out[i] += probability * value;
          magnitude[i] += probability * std::abs(value);
          // A sink pulls the average towards 0; without one the first key opens the range.
          lowest[i] = n == 0 && options.sinks == nullptr ? value : std::min(lowest[i], value);
          highest[i] = n == 0 && options.sinks == nullptr ? value : std::max(highest[i], value);
        }
      }
    }
  }
  return result;
}

scalar_attention attend_in_float32(const attention_options& options, const dense_sequence& seq) {
  const std::int64_t d = options.qk_head_dim;
  const std::int64_t v_d = options.v_head_dim;
  const std::int64_t group = options.num_q_heads / options.num_kv_heads;
  const auto rows = static_cast<std::size_t>(seq.query_len * options.num_q_heads);
  constexpr float none = -std::numeric_limits<float>::infinity();
  scalar_attention result;
  result.out.assign(rows * static_cast<std::size_t>(v_d), 0.0f);
  result.lse.assign(rows, none);

  std::vector<std::int64_t> keys;
  std::vector<float> logits;
  for (std::int64_t t = 0; t < seq.query_len; ++t) {
    const std::int64_t p = seq.first_query_position() + t;
    for (std::int64_t h = 0; h < options.num_q_heads; ++h) {
      const auto row = static_cast<std::size_t>(t * options.num_q_heads + h);
      const float* q = seq.q + static_cast<std::int64_t>(row) * d;
      const float sink = options.sinks == nullptr ? none : options.sinks[h];
      float maximum = sink;
      keys.clear();
      logits.clear();
      for (std::int64_t j = 0; j < seq.seq_len; ++j) {
        if (!is_visible(options, p, j, seq.seq_len)) continue;
        const float* k = seq.k + (j * options.num_kv_heads + h / group) * d;
        float dot = 0;
        for (std::int64_t i = 0; i < d; ++i) dot += q[i] * k[i];
        float logit = options.scale * dot;
        if (options.soft_cap > 0) logit = options.soft_cap * std::tanh(logit / options.soft_cap);
        if (options.alibi_slopes != nullptr) logit += options.alibi_slopes[h] * static_cast<float>(j - p);
        if (seq.bias != nullptr) logit += bias_of(seq, row, j);
        keys.push_back(j);
        logits.push_back(logit);
        maximum = std::max(maximum, logit);
      }
      if (maximum == none) continue;
      float sum = std::exp(sink - maximum);
      float* out = result.out.data() + row * static_cast<std::size_t>(v_d);
      for (std::size_t n = 0; n < keys.size(); ++n) {
        const float* v = seq.v + (keys[n] * options.num_kv_heads + h / group) * v_d;
        const float weight = std::exp(logits[n] - maximum);
        sum += weight;
        for (std::int64_t i = 0; i < v_d; ++i) out[i] += weight * v[i];
      }
      for (std::int64_t i = 0; i < v_d; ++i) out[i] /= sum;
      result.lse[row] = maximum + std::log(sum);
    }
  }
  return result;
}

merged_row merge(const double* a, double lse_a, const double* b, double lse_b, std::int32_t head_dim) {
  merged_row result;
  result.out.assign(static_cast<std::size_t>(head_dim), 0.0);
  result.lse = -infinity;
  const double maximum = std::max(lse_a, lse_b);
  if (maximum == -infinity) return result;
  const double weight_a = std::exp(lse_a - maximum);
  const double weight_b = std::exp(lse_b - maximum);
  for (std::size_t i = 0; i < result.out.size(); ++i) {
    // Selected, not multiplied: what a state of weight 0 holds may be anything.
    const double from_a = weight_a == 0 ? 0 : weight_a * a[i];
    const double from_b = weight_b == 0 ? 0 : weight_b * b[i];
    result.out[i] = (from_a + from_b) / (weight_a + weight_b);
  }
  result.lse = maximum + std::log(weight_a + weight_b);
  return result;
}

}  // namespace bifolio::reference

// SPDX-License-Identifier: Apache-2.0
#include "model_config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "input_error.hpp"

namespace generate {
namespace {

// Far above any model of this architecture, and small enough that sizes computed from them cannot overflow.
constexpr std::int32_t max_width = 1 << 20;
constexpr std::int32_t max_vocab = 1 << 24;
constexpr std::int32_t max_length = 1 << 26;

void require_range(std::string_view file, std::string_view what, std::int64_t value, std::int64_t most) {
  if (value < 1 || value > most) {
    throw input_error(fmt::format("{}: {} is {}, allowed are 1 to {}", file, what, value, most));
  }
}

void require_number(std::string_view file, std::string_view what, float value, bool may_be_zero) {
  if (!std::isfinite(value) || value < 0 || (value == 0 && !may_be_zero)) {
    throw input_error(fmt::format("{}: {} is {}, allowed are finite numbers {} 0", file, what, value,
                                  may_be_zero ? "from" : "above"));
  }
}

void validate(const layer_kind& kind, std::string_view file) {
  const rope_config& rope = kind.rope;
  if (kind.window != 0) require_range(file, "the sliding window", kind.window, max_length);
  require_number(file, "the rotary base", rope.theta, false);
  if (rope.scaling == rope_scaling::none) return;
  require_number(file, "the factor of the rotary scaling", rope.factor, false);
  if (rope.scaling == rope_scaling::yarn) {
    require_number(file, "beta_fast of the rotary scaling", rope.beta_fast, false);
    require_number(file, "beta_slow of the rotary scaling", rope.beta_slow, false);
    require_number(file, "the attention factor of the rotary scaling", rope.attention_factor, false);
    require_range(file, "the number of positions before the rotary scaling", rope.original_positions, max_length);
  }
  if (rope.scaling != rope_scaling::llama3) return;
  require_number(file, "the low frequency factor of the rotary scaling", rope.low_factor, false);
  require_number(file, "the high frequency factor of the rotary scaling", rope.high_factor, false);
  if (rope.high_factor <= rope.low_factor) {
    throw input_error(
        fmt::format("{}: the high frequency factor of the rotary scaling is {}, allowed are numbers above "
                    "the low one, {}",
                    file, rope.high_factor, rope.low_factor));
  }
  require_range(file, "the number of positions before the rotary scaling", rope.original_positions, max_length);
}

/// Llama 3.1's stretching of one frequency, as transformers computes it (modeling_rope_utils.py,
/// _compute_llama3_parameters).
float stretched(float frequency, const rope_config& rope) {
  const auto original = static_cast<float>(rope.original_positions);
  const float wavelength = 2.0f * std::numbers::pi_v<float> / frequency;
  if (wavelength > original / rope.low_factor) return frequency / rope.factor;
  if (wavelength < original / rope.high_factor) return frequency;
  const float kept = (original / wavelength - rope.low_factor) / (rope.high_factor - rope.low_factor);
  return (1.0f - kept) * frequency / rope.factor + kept * frequency;
}

/// Where on the pairs YaRN's ramp begins and ends, as transformers computes it (modeling_rope_utils.py,
/// _compute_yarn_parameters).
std::pair<float, float> yarn_ramp(const rope_config& rope, std::int32_t dims) {
  const auto pair_that_turns = [&](float times) {
    const double turns =
        static_cast<double>(rope.original_positions) / (static_cast<double>(times) * 2.0 * std::numbers::pi);
    return static_cast<float>(dims * std::log(turns) / (2.0 * std::log(static_cast<double>(rope.theta))));
  };
  float low = pair_that_turns(rope.beta_fast), high = pair_that_turns(rope.beta_slow);
  if (rope.truncates) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0f), high = std::min(high, static_cast<float>(dims - 1));
  return {low, low == high ? high + 0.001f : high};
}

void validate(const recurrence_config& r, std::string_view file) {
  require_range(file, "the number of key heads of recurrent layers", r.num_k_heads, max_width);
  require_range(file, "the number of value heads of recurrent layers", r.num_v_heads, max_width);
  require_range(file, "the key dimension of recurrent layers", r.k_head_dim, max_width);
  require_range(file, "the value dimension of recurrent layers", r.v_head_dim, max_width);
  require_range(file, "the kernel size of recurrent layers", r.kernel_size, 1024);
  require_range(file, "value heads times value dimension of recurrent layers",
                std::int64_t{r.num_v_heads} * r.v_head_dim, max_width);
  require_range(file, "key heads times key dimension of recurrent layers", std::int64_t{r.num_k_heads} * r.k_head_dim,
                max_width);
  if (r.num_v_heads % r.num_k_heads != 0) {
    throw input_error(fmt::format("{}: {} value heads of recurrent layers cannot share {} key heads evenly", file,
                                  r.num_v_heads, r.num_k_heads));
  }
  require_range(file, "the size of a recurrent layer's state", r.conv_state_size() + r.memory_size(), 1 << 28);
}

}  // namespace

void validate(const model_config& c, std::string_view file) {
  require_range(file, "the model dimension", c.dim, max_width);
  require_range(file, "the hidden dimension", c.hidden_dim, max_width);
  require_range(file, "the number of layers", c.num_layers, 4096);
  require_range(file, "the number of query heads", c.num_q_heads, max_width);
  require_range(file, "the number of key/value heads", c.num_kv_heads, max_width);
  require_range(file, "the head dimension", c.head_dim, max_width);
  require_range(file, "the vocabulary size", c.vocab_size, max_vocab);
  require_range(file, "the maximum number of positions", c.max_positions, max_length);
  if (c.num_q_heads % c.num_kv_heads != 0) {
    throw input_error(fmt::format("{}: {} query heads cannot be shared evenly by {} key/value heads", file,
                                  c.num_q_heads, c.num_kv_heads));
  }
  require_range(file, "query heads times head dimension", std::int64_t{c.num_q_heads} * c.head_dim, max_width);
  if (c.head_dim % 2 != 0) {
    throw input_error(
        fmt::format("{}: the head dimension is {}, but rotary positions need an even one", file, c.head_dim));
  }
  if (!(c.norm_epsilon >= 0) || !std::isfinite(c.norm_epsilon)) {
    throw input_error(
        fmt::format("{}: the norm's epsilon is {}, allowed are finite numbers from 0 on", file, c.norm_epsilon));
  }
  if (c.rotary_dim < 0 || c.rotary_dim > c.head_dim || c.rotary_dim % 2 != 0) {
    throw input_error(fmt::format("{}: {} dims of a head are rotated, allowed are even numbers up to {}", file,
                                  c.rotary_dim, c.head_dim));
  }
  for (const layer_kind& kind : c.kinds) {
    validate(kind, file);
    if (kind.is_recurrent) validate(c.recurrence, file);
  }
  if (std::ranges::all_of(c.kinds, &layer_kind::is_recurrent)) {
    throw input_error(fmt::format("{}: all layers are recurrent; at least one must have attention", file));
  }
  if (c.experts.count != 0) {
    require_range(file, "the number of experts", c.experts.count, 1 << 16);
    require_range(file, "the number of experts of a token", c.experts.num_active, c.experts.count);
    require_number(file, "the gain of the experts' gate", c.experts.gate_gain, false);
    require_number(file, "the limit of the experts' gate", c.experts.limit, false);
  }
  require_number(file, "the factor of the embedding", c.embedding_scale, false);
  require_number(file, "the square of attention's divisor", c.attention_divisor, true);
  require_number(file, "the soft cap of attention", c.attention_soft_cap, true);
  require_number(file, "the soft cap of the logits", c.logits_soft_cap, true);
  std::vector<std::int32_t> special_ids = c.eos_ids;
  if (c.bos_id != -1) special_ids.push_back(c.bos_id);
  for (const std::int32_t id : special_ids) {
    if (id < 0 || id >= c.vocab_size) {
      throw input_error(fmt::format("{}: the special token {} is not in the vocabulary of {}", file, id, c.vocab_size));
    }
  }
}

std::vector<float> rotary_frequencies(const rope_config& rope, std::int32_t head_dim) {
  std::vector<float> frequencies(static_cast<std::size_t>(head_dim / 2));
  const bool has_ramp = rope.scaling == rope_scaling::yarn;
  const auto [low, high] = has_ramp ? yarn_ramp(rope, head_dim) : std::pair(0.0f, 1.0f);
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_dim);
    const float frequency = 1.0f / std::pow(rope.theta, exponent);
    switch (rope.scaling) {
      case rope_scaling::none:
        frequencies[i] = frequency;
        break;
      case rope_scaling::linear:
        frequencies[i] = frequency / rope.factor;
        break;
      case rope_scaling::llama3:
        frequencies[i] = stretched(frequency, rope);
        break;
      case rope_scaling::yarn: {
        const float divided = std::clamp((static_cast<float>(i) - low) / (high - low), 0.0f, 1.0f);
        frequencies[i] = frequency / rope.factor * divided + frequency * (1.0f - divided);
        break;
      }
    }
  }
  return frequencies;
}

}  // namespace generate

// SPDX-License-Identifier: Apache-2.0
#include "model_config.hpp"

#include <fmt/format.h>

#include <cmath>

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
  if (!(c.rope_theta > 0) || !std::isfinite(c.rope_theta)) {
    throw input_error(fmt::format("{}: the rotary base is {}, allowed are finite numbers above 0", file, c.rope_theta));
  }
  std::vector<std::int32_t> special_ids = c.eos_ids;
  special_ids.push_back(c.bos_id);
  for (const std::int32_t id : special_ids) {
    if (id < 0 || id >= c.vocab_size) {
      throw input_error(fmt::format("{}: the special token {} is not in the vocabulary of {}", file, id, c.vocab_size));
    }
  }
}

std::vector<float> rotary_frequencies(const model_config& config) {
  std::vector<float> frequencies(static_cast<std::size_t>(config.head_dim / 2));
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.head_dim);
    frequencies[i] = 1.0f / std::pow(config.rope_theta, exponent);
  }
  return frequencies;
}

}  // namespace generate

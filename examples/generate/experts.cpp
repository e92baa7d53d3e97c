// SPDX-License-Identifier: Apache-2.0
#include "experts.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

namespace generate {

/// Of equal logits the lower number is better.
void experts::choose(const experts_config& config, std::int64_t num_tokens) {
  choices_.resize(static_cast<std::size_t>(config.count));
  for (std::vector<choice>& chosen : choices_) chosen.clear();
  order_.resize(static_cast<std::size_t>(config.count));
  for (std::int64_t t = 0; t < num_tokens; ++t) {
    const float* const logits = logits_.data() + t * config.count;
    std::iota(order_.begin(), order_.end(), 0);
    const auto last = order_.begin() + config.num_active;
    std::partial_sort(order_.begin(), last, order_.end(), [&](std::int32_t a, std::int32_t b) {
      return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
    });
    const float largest = logits[order_[0]];
    float sum = 0;
    for (auto e = order_.begin(); e != last; ++e) sum += std::exp(logits[*e] - largest);
    for (auto e = order_.begin(); e != last; ++e) {
      choices_[static_cast<std::size_t>(*e)].push_back({t, std::exp(logits[*e] - largest) / sum});
    }
  }
}

void experts::run(const experts_config& config, const experts_weights& weights, const float* x, std::int64_t num_tokens,
                  float* out) {
  const std::int64_t dim = weights.router.num_inputs();
  logits_.resize(static_cast<std::size_t>(num_tokens * config.count));
  weights.router.apply(*workers_, x, num_tokens, logits_.data());
  for (std::size_t i = 0; i < logits_.size(); ++i) {
    logits_[i] += weights.router_bias[i % static_cast<std::size_t>(config.count)];
  }
  choose(config, num_tokens);
  std::fill(out, out + num_tokens * dim, 0.0f);
  for (std::size_t e = 0; e < choices_.size(); ++e) {
    const std::vector<choice>& chosen = choices_[e];
    if (chosen.empty()) continue;
    const expert_weights& expert = weights.experts[e];
    const std::int64_t count = std::ssize(chosen), hidden_dim = expert.down.num_inputs();
    rows_.resize(static_cast<std::size_t>(count * dim));
    for (std::int64_t i = 0; i < count; ++i) {
      const float* const row = x + chosen[static_cast<std::size_t>(i)].token * dim;
      std::copy(row, row + dim, rows_.data() + i * dim);
    }
    gate_up_.resize(static_cast<std::size_t>(count * 2 * hidden_dim));
    expert.gate_up.apply(*workers_, rows_.data(), count, gate_up_.data());
    hidden_.resize(static_cast<std::size_t>(count * hidden_dim));
    for (std::int64_t i = 0; i < count * hidden_dim; ++i) {
      const auto pair = static_cast<std::size_t>(2 * (i % hidden_dim));
      const float gate = std::min(gate_up_[static_cast<std::size_t>(2 * i)] + expert.gate_up_bias[pair], config.limit);
      const float up = std::clamp(gate_up_[static_cast<std::size_t>(2 * i + 1)] + expert.gate_up_bias[pair + 1],
                                  -config.limit, config.limit);
      hidden_[static_cast<std::size_t>(i)] = (up + 1.0f) * (gate / (1.0f + std::exp(-config.gate_gain * gate)));
    }
    down_.resize(static_cast<std::size_t>(count * dim));
    expert.down.apply(*workers_, hidden_.data(), count, down_.data());
    for (std::int64_t i = 0; i < count; ++i) {
      const choice& to = chosen[static_cast<std::size_t>(i)];
      for (std::int64_t d = 0; d < dim; ++d) {
        out[to.token * dim + d] +=
            to.weight * (down_[static_cast<std::size_t>(i * dim + d)] + expert.down_bias[static_cast<std::size_t>(d)]);
      }
    }
  }
}

}  // namespace generate

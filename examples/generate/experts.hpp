// SPDX-License-Identifier: Apache-2.0
#pragma once

/// An MLP that is a mixture of experts, as gpt-oss has it: each token takes the num_active experts that a router likes
/// best, weighs them by the softmax of the router's logits over these, and adds
///
///   down · ((up + 1) · gate · σ(α · gate)) + bias, gate ≤ limit, −limit ≤ up ≤ limit
///
/// of each, in the order of their numbers, so that a token's bits do not depend on its company.

#include <bifolio/executor.hpp>
#include <cstdint>
#include <vector>

#include "linear.hpp"
#include "model_config.hpp"

namespace generate {

struct expert_weights {
  linear gate_up;                   ///< 2 · hidden_dim outputs: gate, up, gate, up, …
  std::vector<float> gate_up_bias;  ///< [2 · hidden_dim]
  linear down;                      ///< dim outputs of hidden_dim inputs
  std::vector<float> down_bias;     ///< [dim]
};

struct experts_weights {
  linear router;                   ///< an output for each expert
  std::vector<float> router_bias;  ///< [num_experts]
  std::vector<expert_weights> experts;
};

/// Scratch of a layer, kept between calls.
class experts {
 public:
  explicit experts(bifolio::executor& workers) : workers_(&workers) {}

  /// The MLP's result for each row of x, [num_tokens, dim].
  void run(const experts_config& config, const experts_weights& weights, const float* x, std::int64_t num_tokens,
           float* out);

 private:
  struct choice {
    std::int64_t token = 0;
    float weight = 0;
  };

  void choose(const experts_config& config, std::int64_t num_tokens);

  bifolio::executor* workers_;
  std::vector<float> logits_;                 // [num_tokens, num_experts]
  std::vector<std::vector<choice>> choices_;  // by expert
  std::vector<std::int32_t> order_;
  std::vector<float> rows_, gate_up_, hidden_, down_;
};

}  // namespace generate

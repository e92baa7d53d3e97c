// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A recurrent layer instead of attention: the gated delta rule of Qwen3-Next and Qwen3.5 (Yang et al., Gated Delta
/// Networks, arXiv 2412.06464). What a sequence keeps is of constant size: the last inputs of a short convolution, and
/// a memory S [k_head_dim, v_head_dim] for each value head that forgets, is corrected, and is read with every token:
///
///   q, k, v = silu(convolution over the last tokens); q, k of length 1, q / √k_head_dim
///   S ← e^g · S;   S ← S + k ⊗ (β · (v − Sᵀk));   o = Sᵀq
///   g = −e^a_log · softplus(a + dt_bias), β = σ(b);   out = RMSNorm(o) · silu(z)
///
/// Tokens are computed one after another, so that a token's bits do not depend on where steps end.

#include <bifolio/executor.hpp>
#include <cstdint>
#include <vector>

#include "linear.hpp"
#include "model_config.hpp"
#include "model_runner.hpp"

namespace generate {

struct delta_net_weights {
  linear in;                      ///< conv_dim + v_dim + 2 · num_v_heads outputs: q, k, v, then z, b, a
  std::vector<float> conv;        ///< [conv_dim, kernel_size], the token itself last
  std::vector<float> decay_log;   ///< a_log, [num_v_heads]
  std::vector<float> decay_bias;  ///< dt_bias, [num_v_heads]
  std::vector<float> norm;        ///< [v_head_dim]
  linear out;                     ///< dim outputs of v_dim inputs
};

/// Scratch of a layer, kept between calls.
class delta_net {
 public:
  explicit delta_net(bifolio::executor& workers) : workers_(&workers) {}

  /// The layer's result for each row of x, [num_tokens, dim]. Goes on from the states that are named and leaves those
  /// that are.
  void run(const recurrence_config& config, float norm_epsilon, const delta_net_weights& weights, const float* x,
           std::int64_t num_tokens, const recurrent_states& states, float* out);

 private:
  bifolio::executor* workers_;
  std::vector<float> projected_;  // [num_tokens, conv_dim + v_dim + 2 · num_v_heads]
  std::vector<float> mixed_;      // [num_tokens, conv_dim]: q, k and v after the convolution
  std::vector<float> read_;       // [num_tokens, v_dim]
};

}  // namespace generate

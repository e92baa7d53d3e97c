// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The forward pass of a decoder of the Llama family on the CPU. What an architecture adds to Llama (biases, more
/// norms, windows, soft caps) is in the checkpoint and its configuration, not in classes.

#include <bifolio/dtype.hpp>
#include <bifolio/executor.hpp>
#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint.hpp"
#include "delta_net.hpp"
#include "experts.hpp"
#include "model_runner.hpp"

namespace generate {

/// The work is spread over `workers`; their number changes no bit.
class llama final : public model_runner {
 public:
  /// `model` and `workers` are borrowed.
  llama(const checkpoint& model, bifolio::executor& workers, bifolio::dtype query_type = bifolio::dtype::f32)
      : model_(&model), workers_(&workers), query_type_(query_type), recurrence_(workers), experts_(workers) {}

  [[nodiscard]] const model_config& config() const noexcept override { return model_->config; }
  [[nodiscard]] bifolio::dtype query_type() const noexcept override { return query_type_; }

  std::span<const float> forward(std::span<const bifolio::token_id> tokens, std::span<const std::int32_t> positions,
                                 std::span<const std::int32_t> logits_rows, attention_layer& attention) override;

  [[nodiscard]] double attention_seconds() const noexcept override { return attention_seconds_; }

 private:
  /// q, k and v of a layer, next to one another in qkv_, through `attention` into attended_.
  void attend(std::int32_t layer, std::int64_t num_tokens, attention_layer& attention);
  /// attended_ times σ of the gates that came with the queries.
  void gate_attention(std::int64_t num_tokens) noexcept;
  /// What attention or a recurrence, and the MLP, make of normed_, into added_.
  void mix_tokens(std::int32_t layer, std::int64_t num_tokens, attention_layer& attention);
  void run_mlp(const layer_weights& layer, std::int64_t num_tokens);
  void prepare_rotations(std::span<const std::int32_t> positions);
  /// `out` may be `x`.
  void normalise(const float* x, const std::vector<float>& weight, std::int64_t num_tokens, float* out) const noexcept;
  /// hidden_ = activation(gate) · up.
  void gate(std::int64_t num_tokens) noexcept;

  const checkpoint* model_;
  bifolio::executor* workers_;
  bifolio::dtype query_type_;
  double attention_seconds_ = 0;
  delta_net recurrence_;
  experts experts_;
  // Scratch, kept between calls.
  std::vector<float> x_;         // [num_tokens, dim], the residual stream
  std::vector<float> normed_;    // [num_tokens, dim]
  std::vector<float> qkv_;       // [num_tokens, qkv_dim]
  std::vector<float> attended_;  // [num_tokens, q_dim]
  // As attention takes queries and gives results, unless that is float32: bits of [num_tokens, q_dim].
  std::vector<std::uint16_t> narrow_q_, narrow_attended_;
  std::vector<float> added_;                 // [num_tokens, dim]
  std::vector<float> gate_up_;               // [num_tokens, 2 · hidden_dim]
  std::vector<float> hidden_;                // [num_tokens, hidden_dim]
  std::vector<float> rotations_;             // [num_kinds, num_tokens, rotated dims]: cosines, then sines
  std::vector<std::int32_t> rotation_rows_;  // [num_tokens]: the row of each token, its own
  std::vector<float> logits_;                // [num_rows, vocab_size]
};

}  // namespace generate

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The forward pass of a Llama-architecture model over a batch of tokens of any sequences. It knows nothing of caches:
/// what attention means is behind `attention_layer`.

#include <bifolio/executor.hpp>
#include <bifolio/tensor_view.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint.hpp"

namespace generate {

/// Takes a layer's new keys and values and gives attention's result; the one thing the model asks of a KV cache.
class attention_layer {
 public:
  virtual ~attention_layer() = default;
  /// q and out [num_tokens, num_q_heads, head_dim], k and v [num_tokens, num_kv_heads, head_dim], float32, in the order
  /// of the batch. Called once for each layer, in order. Throws when it cannot.
  virtual void run(std::int32_t layer, const bifolio::const_tensor_view& q, const bifolio::const_tensor_view& k,
                   const bifolio::const_tensor_view& v, const bifolio::tensor_view& out) = 0;
};

/// Arithmetic is float32. Every token's result is independent of the other tokens in the batch, bit for bit, provided
/// that attention's is. One thread calls it at a time; the work is spread over `lanes`.
class llama {
 public:
  /// Both are borrowed.
  llama(const checkpoint& model, bifolio::executor& lanes) : model_(&model), lanes_(&lanes) {}

  [[nodiscard]] const model_config& config() const noexcept { return model_->config; }

  /// Feeds tokens[i] at positions[i] and returns the logits after the tokens of `logits_rows` (indices into tokens),
  /// [logits_rows.size(), vocab_size], valid until the next call.
  std::span<const float> forward(std::span<const bifolio::token_id> tokens, std::span<const std::int32_t> positions,
                                 std::span<const std::int32_t> logits_rows, attention_layer& attention);

  /// Seconds spent in `attention_layer::run` since construction.
  [[nodiscard]] double attention_seconds() const noexcept { return attention_seconds_; }

 private:
  void prepare_rotations(std::span<const std::int32_t> positions);
  void rotate(float* head, std::int64_t token) const noexcept;
  void normalise(const float* x, const std::vector<float>& weight, std::int64_t num_tokens, float* out) const noexcept;

  const checkpoint* model_;
  bifolio::executor* lanes_;
  double attention_seconds_ = 0;
  // Scratch, kept between calls.
  std::vector<float> x_;          // [num_tokens, dim], the residual stream
  std::vector<float> normed_;     // [num_tokens, dim]
  std::vector<float> qkv_;        // [num_tokens, q_dim + 2 · kv_dim]
  std::vector<float> attended_;   // [num_tokens, q_dim]
  std::vector<float> added_;      // [num_tokens, dim]
  std::vector<float> gate_up_;    // [num_tokens, 2 · hidden_dim]
  std::vector<float> hidden_;     // [num_tokens, hidden_dim]
  std::vector<float> rotations_;  // [num_tokens, head_dim / 2, 2]: cosine and sine
  std::vector<float> logits_;     // [num_rows, vocab_size]
};

}  // namespace generate

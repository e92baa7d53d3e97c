// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The numbers that describe a decoder of the Llama family, whatever file they came from. What differs between layers
/// (window, rotary positions) is in a few kinds of layers.

#include <bifolio/rotate_append.hpp>
#include <cmath>
#include <cstdint>
#include <string_view>
#include <vector>

namespace generate {

/// Of the gate in an MLP.
enum class activation : std::uint8_t {
  silu,       ///< x / (1 + e^−x)
  gelu_tanh,  ///< x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))
};

/// How rotary frequencies are stretched for texts longer than those of the first training.
enum class rope_scaling : std::uint8_t {
  none,
  linear,  ///< all divided by `factor`
  llama3,  ///< low ones divided, high ones kept, those between blended: Llama 3.1
  yarn,    ///< the same by another ramp, and cosines and sines are multiplied by attention_factor (arXiv 2309.00071)
};

struct rope_config {
  float theta = 10000.0f;
  rope_scaling scaling = rope_scaling::none;
  float factor = 1.0f;
  // Of `llama3`: wavelengths above original_positions / low_factor are stretched, those below original_positions /
  // high_factor are kept.
  float low_factor = 1.0f;
  float high_factor = 4.0f;
  std::int32_t original_positions = 0;
  // Of `yarn`: pairs that turn more than beta_fast times in original_positions are kept, those that turn less than
  // beta_slow times are divided.
  float beta_fast = 32.0f;
  float beta_slow = 1.0f;
  bool truncates = true;  ///< the ends of the ramp are whole pairs
  float attention_factor = 1.0f;
  friend bool operator==(const rope_config&, const rope_config&) = default;
};

/// What layers of one kind have in common. A step plans its attention once per kind.
struct layer_kind {
  std::int32_t window = 0;  ///< the positions that a token attends to, its own included; 0: all
  rope_config rope;
  bool is_recurrent = false;  ///< no attention: the gated delta rule, which has a state instead of keys and values
  friend bool operator==(const layer_kind&, const layer_kind&) = default;
};

/// Of recurrent layers (delta_net.hpp).
struct recurrence_config {
  std::int32_t num_k_heads = 0;
  std::int32_t num_v_heads = 0;  ///< a multiple of num_k_heads
  std::int32_t k_head_dim = 0;
  std::int32_t v_head_dim = 0;
  std::int32_t kernel_size = 0;  ///< tokens that the convolution before it sees, the token itself included

  [[nodiscard]] std::int32_t k_dim() const noexcept { return num_k_heads * k_head_dim; }
  [[nodiscard]] std::int32_t v_dim() const noexcept { return num_v_heads * v_head_dim; }
  [[nodiscard]] std::int32_t conv_dim() const noexcept { return 2 * k_dim() + v_dim(); }  ///< q, k and v
  /// Numbers of a state: inputs of the convolution, [kernel_size − 1, conv_dim], …
  [[nodiscard]] std::int64_t conv_state_size() const noexcept { return (std::int64_t{kernel_size} - 1) * conv_dim(); }
  /// … and what was remembered, [num_v_heads, k_head_dim, v_head_dim].
  [[nodiscard]] std::int64_t memory_size() const noexcept {
    return std::int64_t{num_v_heads} * k_head_dim * v_head_dim;
  }
};

/// Of MLPs that are mixtures of experts (experts.hpp).
struct experts_config {
  std::int32_t count = 0;  ///< 0: the MLPs are dense
  std::int32_t num_active = 0;
  float gate_gain = 1.702f;  ///< α of gate · σ(α · gate)
  float limit = 7.0f;        ///< gate ≤ limit, −limit ≤ up ≤ limit
};

struct model_config {
  std::int32_t dim = 0;
  std::int32_t hidden_dim = 0;
  std::int32_t num_layers = 0;
  std::int32_t num_q_heads = 0;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t vocab_size = 0;
  std::int32_t max_positions = 0;
  std::int32_t bos_id = 1;  ///< starts every sequence; −1: the model has none
  /// Each ends a sequence when the model produces it; llama2.c models end with BOS. May be empty.
  std::vector<std::int32_t> eos_ids{1};
  float norm_epsilon = 1e-5f;
  activation gate = activation::silu;
  float embedding_scale = 1.0f;     ///< the embedding is multiplied by it
  float attention_divisor = 0.0f;   ///< scores are divided by its square root; 0: head_dim
  float attention_soft_cap = 0.0f;  ///< of the scores; 0: none
  float logits_soft_cap = 0.0f;     ///< of the vocabulary's logits; 0: none
  bifolio::rope_pairing rope =
      bifolio::rope_pairing::gptj;  ///< neox: Hugging Face, whose rows of q and k are permuted to suit
  bool tied_classifier = true;      ///< the output classifier is the embedding table
  std::int32_t rotary_dim = 0;      ///< of a head's first dims, even; 0: head_dim
  bool gates_attention = false;     ///< attention's result is multiplied by σ of a gate that comes with the queries
  recurrence_config recurrence;     ///< of the layers that are recurrent
  experts_config experts;

  std::vector<layer_kind> kinds = std::vector<layer_kind>(1);
  std::vector<std::int32_t> kind_of_layer;  ///< [num_layers], indices into `kinds`; empty: all layers are of the first

  [[nodiscard]] std::int32_t q_dim() const noexcept { return num_q_heads * head_dim; }
  [[nodiscard]] std::int32_t kv_dim() const noexcept { return num_kv_heads * head_dim; }
  /// Outputs of the fused projection: queries, each head's gate after it where there are gates, keys, values.
  [[nodiscard]] std::int32_t qkv_dim() const noexcept { return (gates_attention ? 2 : 1) * q_dim() + 2 * kv_dim(); }
  [[nodiscard]] std::int32_t rotated_dims() const noexcept { return rotary_dim > 0 ? rotary_dim : head_dim; }
  [[nodiscard]] std::size_t kind_of(std::int32_t layer) const noexcept {
    return kind_of_layer.empty() ? 0 : static_cast<std::size_t>(kind_of_layer[static_cast<std::size_t>(layer)]);
  }
  [[nodiscard]] float attention_scale() const noexcept {
    return 1.0f / std::sqrt(attention_divisor > 0 ? attention_divisor : static_cast<float>(head_dim));
  }
};

/// Throws `input_error`, naming `file`, the number and what it may be, when the numbers do not make a model. After this
/// every product of two of them fits into 63 bits and q_dim and kv_dim into 31.
void validate(const model_config& config, std::string_view file);

/// RoPE's angles at position 1 in layers of a kind: base^(−2i / head_dim) for the pairs i of a head, scaled; in float32
/// like the programs that trained these models.
[[nodiscard]] std::vector<float> rotary_frequencies(const rope_config& rope, std::int32_t head_dim);

}  // namespace generate

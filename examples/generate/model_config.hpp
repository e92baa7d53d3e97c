// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The numbers that describe a Llama-architecture model, whatever file they came from.

#include <cstdint>
#include <string_view>
#include <vector>

namespace generate {

/// Which two elements of a head RoPE rotates together.
enum class rope_pairs : std::uint8_t {
  neighbours,  ///< (2i, 2i + 1): llama2.c and the original weights
  halves,      ///< (i, i + head_dim / 2): Hugging Face, whose files hold q and k rows permuted to suit
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
  std::int32_t bos_id = 1;  ///< starts every sequence
  /// Each ends a sequence when the model produces it; llama2.c models end with BOS.
  std::vector<std::int32_t> eos_ids{1};
  float norm_epsilon = 1e-5f;
  float rope_theta = 10000.0f;
  rope_pairs rope = rope_pairs::neighbours;
  bool tied_classifier = true;  ///< the output classifier is the embedding table

  [[nodiscard]] std::int32_t q_dim() const noexcept { return num_q_heads * head_dim; }
  [[nodiscard]] std::int32_t kv_dim() const noexcept { return num_kv_heads * head_dim; }
};

/// Throws `input_error`, naming `file`, the number and what it may be, when the numbers do not make a model. After this
/// every product of two of them fits into 63 bits and q_dim and kv_dim into 31.
void validate(const model_config& config, std::string_view file);

/// RoPE's angles at position 1: base^(−2i / head_dim) for the pairs i of a head, in float32 like the programs that
/// trained these models.
[[nodiscard]] std::vector<float> rotary_frequencies(const model_config& config);

}  // namespace generate

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// A model in memory, and the two kinds of files it can come from. Whatever a file claims is checked against its real
/// size, in 64 bits, before memory is taken for it.

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <vector>

#include "delta_net.hpp"
#include "experts.hpp"
#include "linear.hpp"
#include "model_config.hpp"

namespace generate {

/// Vectors that a model does not have are empty.
struct layer_weights {
  std::vector<float> attention_norm;       ///< [dim]
  linear qkv;                              ///< qkv_dim outputs of dim inputs: q, then k, then v
  std::vector<float> qkv_bias;             ///< [qkv_dim]
  std::vector<float> q_norm, k_norm;       ///< [head_dim]: RMSNorm of every head, before the rotation
  linear attention_out;                    ///< dim outputs of q_dim inputs
  std::vector<float> attention_out_bias;   ///< [dim]
  std::vector<float> sinks;                ///< [num_q_heads]
  delta_net_weights recurrence;            ///< of a recurrent layer, instead of all of attention's
  std::vector<float> attention_post_norm;  ///< [dim]: of attention's result, before it is added to the residual stream
  std::vector<float> mlp_norm;             ///< [dim]
  linear gate_up;                          ///< 2 · hidden_dim outputs of dim inputs: gate, then up
  linear down;                             ///< dim outputs of hidden_dim inputs
  experts_weights experts;                 ///< instead of gate_up and down
  std::vector<float> mlp_post_norm;        ///< [dim]: of the MLP's result, before it is added
};

struct checkpoint {
  model_config config;
  linear embedding;  ///< vocab_size outputs of dim inputs; also the classifier when that is tied
  std::vector<layer_weights> layers;
  std::vector<float> final_norm;  ///< [dim]
  linear classifier;              ///< like the embedding; empty when tied
};

/// llama2.c's "legacy" (version 0) .bin: seven int32 and then float32 arrays without names.
/// Throws `input_error` when the file is not exactly such a file.
[[nodiscard]] checkpoint load_llama2c(const std::filesystem::path& file);

/// A Hugging Face checkpoint of one of the architectures that hugging_face_config.cpp lists: a directory with
/// config.json and model.safetensors (or the shards that model.safetensors.index.json names), or the .safetensors file
/// in such a directory. bf16 weights stay bf16 in memory. Throws `input_error`.
[[nodiscard]] checkpoint load_hugging_face(const std::filesystem::path& path);

/// Is this path one for `load_llama2c`? By its ending, ".bin".
[[nodiscard]] bool is_llama2c(const std::filesystem::path& path);

/// Fills rows first_output … + num_rows − 1 of `matrix` from read(first_row, num_rows, floats), some megabytes at once.
template <class Read>
void load_rows(linear& matrix, std::int32_t first_output, std::int32_t num_rows, const Read& read) {
  const std::int32_t at_once = std::max(1, (1 << 20) / matrix.num_inputs());
  std::vector<float> rows(static_cast<std::size_t>(std::min(at_once, num_rows)) *
                          static_cast<std::size_t>(matrix.num_inputs()));
  for (std::int32_t row = 0; row < num_rows; row += at_once) {
    const std::int32_t count = std::min(at_once, num_rows - row);
    read(row, count, rows.data());
    matrix.set_rows(first_output + row, rows.data(), count);
  }
}

}  // namespace generate

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Tiny models with random weights, in the file formats that examples/generate reads. They mean nothing; they are there
/// to be loaded, cut, and run for exact comparisons.

#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace bifolio::test {

/// A llama2.c checkpoint as bytes: dim 16, hidden 32, 2 layers, heads 4/2, vocabulary 300, 32 positions.
[[nodiscard]] std::string tiny_llama2c(std::uint64_t seed, bool own_classifier = false);

/// A tokenizer file as bytes: three special tokens, 256 bytes, single letters and some pairs.
[[nodiscard]] std::string tiny_tokenizer(std::int32_t vocab_size);

/// Writes a Hugging Face checkpoint (bf16, byte vocabulary, dim 16, hidden 32, 2 layers, heads 4/2, 64 positions) into
/// the folder `name` of the scratch directory and returns it. `change` may spoil the header of its safetensors file.
std::filesystem::path tiny_hugging_face(const std::string& name, std::uint64_t seed,
                                        const std::function<void(nlohmann::json&)>& change = {});

/// Numbers of a model with random weights whose attention a GPU's tensor-core kernels compute: head_dim 64, 128, 256.
struct model_shape {
  std::int32_t dim = 256;
  std::int32_t hidden_dim = 384;
  std::int32_t num_layers = 3;
  std::int32_t num_q_heads = 8;
  std::int32_t num_kv_heads = 2;
  std::int32_t head_dim = 64;
  std::int32_t max_positions = 1024;
  bool own_classifier = true;
};

/// Writes such a model (Hugging Face, bf16, byte vocabulary). Weights are scaled so that activations stay near 1, the
/// logits of attention near 2 and those of the vocabulary near 1.5, as in trained models.
std::filesystem::path random_hugging_face(const std::string& name, std::uint64_t seed, const model_shape& shape);

}  // namespace bifolio::test

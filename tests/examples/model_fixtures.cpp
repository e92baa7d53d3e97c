// SPDX-License-Identifier: Apache-2.0
#include "model_fixtures.hpp"

#include <bifolio/dtype.hpp>
#include <cstring>
#include <fstream>
#include <random>
#include <vector>

#include "reference_files.hpp"

namespace bifolio::test {
namespace {

template <class T>
void put(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

float small(std::mt19937_64& random) {
  return (static_cast<float>(random() % 20001) - 10000.0f) / 10000.0f;  // in [−1, 1]
}

}  // namespace

std::string tiny_llama2c(std::uint64_t seed, bool own_classifier) {
  constexpr std::int32_t dim = 16, hidden = 32, layers = 2, heads = 4, kv_heads = 2, vocab = 300, positions = 32;
  constexpr std::int32_t head_dim = dim / heads, kv_dim = kv_heads * head_dim;
  std::string bytes;
  for (const std::int32_t n : {dim, hidden, layers, heads, kv_heads, own_classifier ? -vocab : vocab, positions}) {
    put(bytes, n);
  }
  constexpr std::int32_t weights = vocab * dim +
                                   layers * (2 * dim + 2 * dim * dim + 2 * kv_dim * dim + 3 * dim * hidden) + dim +
                                   positions * head_dim;
  std::mt19937_64 random(seed);
  for (std::int32_t i = 0; i < weights + (own_classifier ? vocab * dim : 0); ++i) put(bytes, small(random));
  return bytes;
}

std::string tiny_tokenizer(std::int32_t vocab_size) {
  std::string bytes;
  put(bytes, std::int32_t{6});
  const auto add = [&](const std::string& piece, float score) {
    put(bytes, score);
    put(bytes, static_cast<std::int32_t>(piece.size()));
    bytes += piece;
  };
  for (const char* special : {"<unk>", "\n<s>\n", "\n</s>\n"}) add(special, 0);
  for (int byte = 0; byte < 256; ++byte) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", byte);
    add(name, 0);
  }
  const std::string letters = " abcdefghijklmnopqrstuvwxyz";
  for (std::int32_t id = 259; id < vocab_size; ++id) {
    const auto i = static_cast<std::size_t>(id - 259);
    add(i < letters.size() ? letters.substr(i, 1) : letters.substr(i % letters.size(), 2), -static_cast<float>(i));
  }
  return bytes;
}

std::filesystem::path tiny_hugging_face(const std::string& name, std::uint64_t seed,
                                        const std::function<void(nlohmann::json&)>& change) {
  using nlohmann::json;
  const std::filesystem::path directory = scratch_directory() / name;
  std::filesystem::create_directories(directory);
  std::ofstream(directory / "config.json") << json{{"model_type", "llama"},       {"hidden_size", 16},
                                                   {"intermediate_size", 32},     {"num_hidden_layers", 2},
                                                   {"num_attention_heads", 4},    {"num_key_value_heads", 2},
                                                   {"vocab_size", 256},           {"max_position_embeddings", 64},
                                                   {"rms_norm_eps", 1e-5},        {"rope_theta", 10000.0},
                                                   {"tie_word_embeddings", true}, {"hidden_act", "silu"},
                                                   {"bos_token_id", 0},           {"eos_token_id", 0}}
                                                  .dump();
  json header = {{"__metadata__", {{"format", "pt"}}}};
  std::string data;
  std::mt19937_64 random(seed);
  const auto add = [&](const std::string& tensor, std::vector<std::int64_t> shape) {
    const std::size_t begin = data.size();
    std::int64_t count = 1;
    for (const std::int64_t size : shape) count *= size;
    for (std::int64_t i = 0; i < count; ++i) put(data, from_float<bfloat16>(small(random)));
    header[tensor] = {{"dtype", "BF16"}, {"shape", shape}, {"data_offsets", {begin, data.size()}}};
  };
  add("model.embed_tokens.weight", {256, 16});
  for (const char* layer : {"model.layers.0.", "model.layers.1."}) {
    const std::string prefix = layer;
    add(prefix + "input_layernorm.weight", {16});
    add(prefix + "self_attn.q_proj.weight", {16, 16});
    add(prefix + "self_attn.k_proj.weight", {8, 16});
    add(prefix + "self_attn.v_proj.weight", {8, 16});
    add(prefix + "self_attn.o_proj.weight", {16, 16});
    add(prefix + "post_attention_layernorm.weight", {16});
    add(prefix + "mlp.gate_proj.weight", {32, 16});
    add(prefix + "mlp.up_proj.weight", {32, 16});
    add(prefix + "mlp.down_proj.weight", {16, 32});
  }
  add("model.norm.weight", {16});
  if (change) change(header);
  const std::string text = header.dump();
  std::string bytes;
  put(bytes, static_cast<std::uint64_t>(text.size()));
  std::ofstream(directory / "model.safetensors", std::ios::binary) << bytes << text << data;
  return directory;
}

}  // namespace bifolio::test

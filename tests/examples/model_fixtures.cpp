// SPDX-License-Identifier: Apache-2.0
#include "model_fixtures.hpp"

#include <bifolio/dtype.hpp>
#include <cmath>
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

/// Weights are uniform in middle ± width.
struct spread {
  float middle = 0;
  float width = 1;
};

/// `spread_of` says how a tensor's weights are spread, by its name and its number of inputs.
std::filesystem::path write_hugging_face(const std::string& name, std::uint64_t seed, const model_shape& shape,
                                         const std::function<spread(const std::string&, std::int64_t)>& spread_of,
                                         const std::function<void(nlohmann::json&)>& change) {
  using nlohmann::json;
  const std::filesystem::path directory = scratch_directory() / name;
  std::filesystem::create_directories(directory);
  json config{{"model_type", "llama"},
              {"hidden_size", shape.dim},
              {"intermediate_size", shape.hidden_dim},
              {"num_hidden_layers", shape.num_layers},
              {"num_attention_heads", shape.num_q_heads},
              {"num_key_value_heads", shape.num_kv_heads},
              {"vocab_size", 256},
              {"max_position_embeddings", shape.max_positions},
              {"rms_norm_eps", 1e-5},
              {"rope_theta", 10000.0},
              {"tie_word_embeddings", !shape.own_classifier},
              {"hidden_act", "silu"},
              {"bos_token_id", 0},
              {"eos_token_id", 0}};
  if (shape.num_q_heads * shape.head_dim != shape.dim) config["head_dim"] = shape.head_dim;
  std::ofstream(directory / "config.json") << config.dump();

  json header = {{"__metadata__", {{"format", "pt"}}}};
  std::string data;
  std::mt19937_64 random(seed);
  const auto add = [&](const std::string& tensor, const std::vector<std::int64_t>& sizes) {
    const std::size_t begin = data.size();
    std::int64_t count = 1;
    for (const std::int64_t size : sizes) count *= size;
    const spread how = spread_of(tensor, sizes.back());
    for (std::int64_t i = 0; i < count; ++i) {
      put(data, from_float<bfloat16>(how.middle + how.width * small(random)));
    }
    header[tensor] = {{"dtype", "BF16"}, {"shape", sizes}, {"data_offsets", {begin, data.size()}}};
  };
  const std::int64_t dim = shape.dim;
  const std::int64_t q_dim = std::int64_t{shape.num_q_heads} * shape.head_dim;
  const std::int64_t kv_dim = std::int64_t{shape.num_kv_heads} * shape.head_dim;
  add("model.embed_tokens.weight", {256, dim});
  for (std::int32_t layer = 0; layer < shape.num_layers; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    add(prefix + "input_layernorm.weight", {dim});
    add(prefix + "self_attn.q_proj.weight", {q_dim, dim});
    add(prefix + "self_attn.k_proj.weight", {kv_dim, dim});
    add(prefix + "self_attn.v_proj.weight", {kv_dim, dim});
    add(prefix + "self_attn.o_proj.weight", {dim, q_dim});
    add(prefix + "post_attention_layernorm.weight", {dim});
    add(prefix + "mlp.gate_proj.weight", {shape.hidden_dim, dim});
    add(prefix + "mlp.up_proj.weight", {shape.hidden_dim, dim});
    add(prefix + "mlp.down_proj.weight", {dim, shape.hidden_dim});
  }
  add("model.norm.weight", {dim});
  if (shape.own_classifier) add("lm_head.weight", {256, dim});
  if (change) change(header);
  const std::string text = header.dump();
  std::string bytes;
  put(bytes, static_cast<std::uint64_t>(text.size()));
  std::ofstream(directory / "model.safetensors", std::ios::binary) << bytes << text << data;
  return directory;
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
  const model_shape shape{.dim = 16,
                          .hidden_dim = 32,
                          .num_layers = 2,
                          .num_q_heads = 4,
                          .num_kv_heads = 2,
                          .head_dim = 4,
                          .max_positions = 64,
                          .own_classifier = false};
  return write_hugging_face(
      name, seed, shape, [](const std::string&, std::int64_t) { return spread{}; }, change);
}

std::filesystem::path random_hugging_face(const std::string& name, std::uint64_t seed, const model_shape& shape) {
  const auto spread_of = [&](const std::string& tensor, std::int64_t num_inputs) {
    const auto ends_with = [&](const std::string& end) {
      return tensor.size() >= end.size() && tensor.compare(tensor.size() - end.size(), end.size(), end) == 0;
    };
    // The sum over num_inputs of these and of numbers near 1 is near 1.
    const float even = std::sqrt(3.0f / static_cast<float>(num_inputs));
    if (ends_with("norm.weight")) return spread{1, 0.2f};
    if (ends_with("embed_tokens.weight")) return spread{0, std::sqrt(3.0f)};
    if (ends_with("q_proj.weight")) return spread{0, 2 * even};
    return spread{0, ends_with("lm_head.weight") ? 1.5f * even : even};
  };
  return write_hugging_face(name, seed, shape, spread_of, {});
}

}  // namespace bifolio::test

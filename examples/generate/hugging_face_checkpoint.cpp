// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "checkpoint.hpp"
#include "input_error.hpp"
#include "safetensors.hpp"
#include "tools/common/json.hpp"

namespace generate {
namespace {

using nlohmann::json;

json read_json(const std::filesystem::path& path) {
  binary_file file(path);
  const std::string text = file.read_text(64 << 20);
  json object;
  try {
    object = tools::parse_json(text);
  } catch (const tools::json_error& problem) {
    throw input_error(fmt::format("{}: {}", file.name(), problem.what()));
  }
  if (!object.is_object()) throw input_error(fmt::format("{}: not a JSON object", file.name()));
  return object;
}

/// The settings of config.json, each checked for its type where it is read.
class settings {
 public:
  explicit settings(const std::filesystem::path& path) : file_(path.string()), object_(read_json(path)) {}

  [[nodiscard]] const std::string& file() const noexcept { return file_; }
  [[nodiscard]] bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }

  [[nodiscard]] std::int32_t integer(const char* key, std::optional<std::int32_t> otherwise = {}) const {
    if (!has(key) && otherwise) return *otherwise;
    require(key);
    if (!is_int32(object_[key])) refuse(key, object_[key], "a whole number of 32 bits");
    return object_[key].get<std::int32_t>();
  }
  [[nodiscard]] float number(const char* key, float otherwise) const {
    if (!has(key)) return otherwise;
    if (!object_[key].is_number()) refuse(key, object_[key], "a number");
    const double value = object_[key].get<double>();
    if (std::abs(value) > std::numeric_limits<float>::max())
      refuse(key, object_[key], "a number that a float can hold");
    return static_cast<float>(value);
  }
  [[nodiscard]] bool flag(const char* key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (!object_[key].is_boolean()) refuse(key, object_[key], "true or false");
    return object_[key].get<bool>();
  }
  [[nodiscard]] std::string text(const char* key, const char* otherwise) const {
    if (!has(key)) return otherwise;
    if (!object_[key].is_string()) refuse(key, object_[key], "a string");
    return object_[key].get<std::string>();
  }
  /// Special tokens: a number or a list of numbers. What is null is not there.
  [[nodiscard]] std::vector<std::int32_t> tokens(const char* key, std::int32_t otherwise) const {
    if (!has(key) || !object_[key].is_array()) return {integer(key, otherwise)};
    std::vector<std::int32_t> ids;
    for (const json& value : object_[key]) {
      if (value.is_null()) continue;
      if (!is_int32(value)) refuse(key, object_[key], "a whole number of 32 bits or a list of them");
      ids.push_back(value.get<std::int32_t>());
    }
    if (ids.empty()) ids.push_back(otherwise);
    return ids;
  }

  /// The settings inside an object.
  [[nodiscard]] settings nested(const char* key) const {
    if (!object_[key].is_object()) refuse(key, object_[key], "an object");
    return settings(file_, object_[key]);
  }

  /// Throws `input_error` unless a setting that this program has no code for is at its plain value.
  void require_plain(const char* key, const json& plain) const {
    if (has(key) && object_[key] != plain) refuse(key, object_[key], plain.dump() + " (others are not supported)");
  }

 private:
  static bool is_int32(const json& value) {
    constexpr auto most = std::numeric_limits<std::int32_t>::max();
    if (value.is_number_unsigned()) return value.get<std::uint64_t>() <= std::uint64_t{most};
    return value.is_number_integer() && value.get<std::int64_t>() >= std::numeric_limits<std::int32_t>::min();
  }

  settings(std::string file, json object) : file_(std::move(file)), object_(std::move(object)) {}

  void require(const char* key) const {
    if (!has(key)) throw input_error(fmt::format("{}: \"{}\" is missing", file_, key));
  }
  [[noreturn]] void refuse(const char* key, const json& value, const std::string& allowed) const {
    throw input_error(fmt::format("{}: \"{}\" is {}, allowed is {}", file_, key, tools::json_excerpt(value), allowed));
  }

  std::string file_;
  json object_;
};

/// Rotary positions that are not scaled: no type, or "default". Older files call the type "type".
void require_unscaled(const settings& s) {
  if (s.has("rope_parameters")) s.nested("rope_parameters").require_plain("rope_type", "default");
  if (!s.has("rope_scaling")) return;
  const settings scaling = s.nested("rope_scaling");
  const char* type = scaling.has("rope_type") ? "rope_type" : "type";
  if (scaling.text(type, "") != "default") s.require_plain("rope_scaling", nullptr);
}

model_config read_config(const std::filesystem::path& path) {
  const settings s(path);
  s.require_plain("model_type", "llama");
  s.require_plain("hidden_act", "silu");
  s.require_plain("attention_bias", false);
  s.require_plain("mlp_bias", false);
  require_unscaled(s);

  model_config c;
  c.dim = s.integer("hidden_size");
  c.hidden_dim = s.integer("intermediate_size");
  c.num_layers = s.integer("num_hidden_layers");
  c.num_q_heads = s.integer("num_attention_heads");
  c.num_kv_heads = s.integer("num_key_value_heads", c.num_q_heads);
  c.vocab_size = s.integer("vocab_size");
  c.max_positions = s.integer("max_position_embeddings");
  c.norm_epsilon = s.number("rms_norm_eps", 1e-6f);
  // Newer files hold the base in an object of its own.
  c.rope_theta = s.has("rope_parameters") ? s.nested("rope_parameters").number("rope_theta", 10000.0f)
                                          : s.number("rope_theta", 10000.0f);
  c.tied_classifier = s.flag("tie_word_embeddings", false);
  c.bos_id = s.integer("bos_token_id", 1);
  c.eos_ids = s.tokens("eos_token_id", 2);
  c.rope = rope_pairs::halves;
  if (s.has("head_dim")) {
    c.head_dim = s.integer("head_dim");
  } else {
    if (c.num_q_heads > 0 && c.dim % c.num_q_heads != 0) {
      throw input_error(fmt::format("{}: the hidden size {} is not a multiple of its {} attention heads", s.file(),
                                    c.dim, c.num_q_heads));
    }
    c.head_dim = c.num_q_heads > 0 ? c.dim / c.num_q_heads : 1;
  }
  validate(c, s.file());
  return c;
}

/// One safetensors file, or several with an index that says which tensor lies where.
class tensor_files {
 public:
  explicit tensor_files(const std::filesystem::path& path) {
    const std::filesystem::path directory = std::filesystem::is_directory(path) ? path : path.parent_path();
    const std::filesystem::path index = directory / "model.safetensors.index.json";
    if (!std::filesystem::is_directory(path)) {
      open(path);
    } else if (std::filesystem::exists(directory / "model.safetensors") || !std::filesystem::exists(index)) {
      open(directory / "model.safetensors");
    } else {
      open_shards(directory, index);
    }
  }

  void vector(std::vector<float>& values, const std::string& name, std::int32_t count) {
    safetensors& file = file_of(name);
    const auto& tensor = file.find(name, {count});
    values.resize(static_cast<std::size_t>(count));
    file.read(tensor, 0, count, values.data());
  }

  void matrix(linear& matrix, std::int32_t first_output, const std::string& name, std::int32_t num_rows) {
    safetensors& file = file_of(name);
    const std::int64_t num_inputs = matrix.num_inputs();
    const auto& tensor = file.find(name, {num_rows, num_inputs});
    load_rows(matrix, first_output, num_rows, [&](std::int32_t row, std::int32_t count, float* rows) {
      file.read(tensor, row * num_inputs, count * num_inputs, rows);
    });
  }

  /// How a matrix of these parts is kept in memory: bf16 when all are bf16 in the file.
  [[nodiscard]] bifolio::dtype kept_as(std::initializer_list<std::pair<std::string, std::int32_t>> parts,
                                       std::int32_t num_inputs) {
    bool all_bf16 = true;
    for (const auto& [name, num_rows] : parts) {
      all_bf16 = all_bf16 && file_of(name).find(name, {num_rows, num_inputs}).type == bifolio::dtype::bf16;
    }
    return all_bf16 ? bifolio::dtype::bf16 : bifolio::dtype::f32;
  }

  /// A matrix whose outputs are those of several tensors, one after another.
  [[nodiscard]] linear stacked(std::initializer_list<std::pair<std::string, std::int32_t>> parts,
                               std::int32_t num_inputs) {
    std::int32_t num_outputs = 0;
    for (const auto& part : parts) num_outputs += part.second;
    linear result(num_outputs, num_inputs, kept_as(parts, num_inputs));
    std::int32_t first_output = 0;
    for (const auto& [name, num_rows] : parts) {
      matrix(result, first_output, name, num_rows);
      first_output += num_rows;
    }
    return result;
  }

 private:
  static constexpr std::size_t max_name_bytes = 255;

  static bool is_file_name(const json& value) {
    if (!value.is_string()) return false;
    const auto& name = value.get_ref<const std::string&>();
    return name.size() <= max_name_bytes && !std::filesystem::path(name).has_parent_path();
  }

  void open(const std::filesystem::path& path) { files_.push_back(std::make_unique<safetensors>(path)); }

  void open_shards(const std::filesystem::path& directory, const std::filesystem::path& index) {
    const json object = read_json(index);
    const auto map = object.find("weight_map");
    if (map == object.end() || !map->is_object()) {
      throw input_error(fmt::format("{}: \"weight_map\" is missing", index.string()));
    }
    std::set<std::string> names;
    for (const auto& [tensor, file] : map->items()) {
      if (!is_file_name(file)) {
        throw input_error(fmt::format("{}: a shard is named by {}, allowed are plain file names of at most {} bytes",
                                      index.string(), tools::json_excerpt(file), max_name_bytes));
      }
      names.insert(file.get<std::string>());
    }
    for (const std::string& name : names) open(directory / name);
    if (files_.empty()) throw input_error(fmt::format("{}: no shard is named", index.string()));
  }

  safetensors& file_of(const std::string& tensor) {
    for (const auto& file : files_) {
      if (file->contains(tensor)) return *file;
    }
    return *files_.front();  // whose `find` says what is wrong
  }

  std::vector<std::unique_ptr<safetensors>> files_;
};

}  // namespace

checkpoint load_hugging_face(const std::filesystem::path& path) {
  std::error_code problem;
  const bool is_directory = std::filesystem::is_directory(path, problem);
  if (!is_directory && !std::filesystem::exists(path, problem)) {
    throw input_error(fmt::format("{}: there is no such file or directory", path.string()));
  }
  checkpoint model;
  model.config = read_config((is_directory ? path : path.parent_path()) / "config.json");
  const model_config& c = model.config;
  tensor_files files(path);

  model.embedding = files.stacked({{"model.embed_tokens.weight", c.vocab_size}}, c.dim);
  for (std::int32_t l = 0; l < c.num_layers; ++l) {
    const std::string prefix = fmt::format("model.layers.{}.", l);
    const std::string attention = prefix + "self_attn.";
    const std::string mlp = prefix + "mlp.";
    layer_weights& layer = model.layers.emplace_back();
    files.vector(layer.attention_norm, prefix + "input_layernorm.weight", c.dim);
    layer.qkv = files.stacked({{attention + "q_proj.weight", c.q_dim()},
                               {attention + "k_proj.weight", c.kv_dim()},
                               {attention + "v_proj.weight", c.kv_dim()}},
                              c.dim);
    layer.attention_out = files.stacked({{attention + "o_proj.weight", c.dim}}, c.q_dim());
    files.vector(layer.mlp_norm, prefix + "post_attention_layernorm.weight", c.dim);
    layer.gate_up =
        files.stacked({{mlp + "gate_proj.weight", c.hidden_dim}, {mlp + "up_proj.weight", c.hidden_dim}}, c.dim);
    layer.down = files.stacked({{mlp + "down_proj.weight", c.dim}}, c.hidden_dim);
  }
  files.vector(model.final_norm, "model.norm.weight", c.dim);
  if (!c.tied_classifier) model.classifier = files.stacked({{"lm_head.weight", c.vocab_size}}, c.dim);
  return model;
}

}  // namespace generate

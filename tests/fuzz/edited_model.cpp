// SPDX-License-Identifier: Apache-2.0
#include "edited_model.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fuzz_target.hpp"
#include "scratch_files.hpp"

namespace bifolio::fuzz {
namespace {

using nlohmann::json;

struct named_tensor {
  std::string name;
  json dtype, shape;
  std::string bytes;
};

struct model_parts {
  json config;
  std::vector<named_tensor> tensors;
};

constexpr std::array kinds{"llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "gpt_oss", "qwen3_5"};

std::string contents(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

model_parts read_parts(const std::string& kind) {
  const std::filesystem::path folder = std::filesystem::path(BIFOLIO_FUZZ_MODELS) / kind;
  const std::string file = contents(folder / "model.safetensors");
  model_parts parts{json::parse(contents(folder / "config.json")), {}};
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file.data(), sizeof(header_bytes));
  const json header = json::parse(file.substr(sizeof(header_bytes), header_bytes));
  const std::string data = file.substr(sizeof(header_bytes) + header_bytes);
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const auto begin = entry["data_offsets"][0].get<std::size_t>(), end = entry["data_offsets"][1].get<std::size_t>();
    parts.tensors.push_back({name, entry["dtype"], entry["shape"], data.substr(begin, end - begin)});
  }
  return parts;
}

const model_parts& parts_of(std::size_t kind) {
  static const auto all = [] {
    std::vector<model_parts> read;
    for (const char* name : kinds) read.push_back(read_parts(name));
    return read;
  }();
  return all[kind];
}

json any_value(choices& from) {
  static const json values[] = {nullptr,
                                true,
                                false,
                                0,
                                1,
                                2,
                                3,
                                4,
                                6,
                                8,
                                16,
                                32,
                                64,
                                -1,
                                INT32_MAX,
                                0.5,
                                1e30,
                                "default",
                                "linear",
                                "llama3",
                                "yarn",
                                "silu",
                                "gelu_pytorch_tanh",
                                "full_attention",
                                "sliding_attention",
                                "linear_attention",
                                json::array(),
                                json::array({1, 2}),
                                json::array({"sliding_attention", "full_attention"}),
                                json::object(),
                                json{{"rope_type", "linear"}, {"factor", 2}},
                                json{{"rope_type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", 16}}};
  return values[from.byte() % std::size(values)];
}

void edit_config(choices& from, json& config) {
  if (config.empty()) return;
  static constexpr const char* absent[] = {"attention_bias",
                                           "rope_scaling",
                                           "sliding_window",
                                           "use_sliding_window",
                                           "max_window_layers",
                                           "sliding_window_pattern",
                                           "partial_rotary_factor",
                                           "full_attention_interval",
                                           "query_pre_attn_scalar",
                                           "attn_logit_softcapping",
                                           "final_logit_softcapping",
                                           "layer_types",
                                           "mlp_bias",
                                           "quantization_config",
                                           "rope_parameters",
                                           "num_experts"};
  static constexpr const char* types[] = {"llama",       "mistral", "qwen2",        "qwen3", "gemma2",
                                          "gemma3_text", "gpt_oss", "qwen3_5_text", "other"};
  switch (from.below(5)) {
    case 0:
      config["model_type"] = types[from.byte() % std::size(types)];
      return;
    case 1:
      config[absent[from.byte() % std::size(absent)]] = any_value(from);
      return;
    case 2:
      config.erase(std::next(config.begin(), from.byte() % static_cast<std::ptrdiff_t>(config.size())));
      return;
    default:
      break;
  }
  json& value = *std::next(config.begin(), from.byte() % static_cast<std::ptrdiff_t>(config.size()));
  if (value.is_structured() && !value.empty() && from.flag()) {
    *std::next(value.begin(), from.byte() % static_cast<std::ptrdiff_t>(value.size())) = any_value(from);
  } else if (value.is_number_integer() && from.flag()) {
    value = value.get<std::int64_t>() * (1 + from.below(3)) + from.below(3) - 1;
  } else {
    value = any_value(from);
  }
}

void edit_tensor(choices& from, std::vector<named_tensor>& tensors) {
  if (tensors.empty()) return;
  const std::size_t index = from.byte() % tensors.size();
  named_tensor& one = tensors[index];
  static constexpr const char* dtypes[] = {"F32", "F16", "BF16", "I8", "F64"};
  switch (from.below(8)) {
    case 0:
      tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(index));
      return;
    case 1:
      std::swap(one.name, tensors[from.byte() % tensors.size()].name);
      return;
    case 2:
      one.dtype = dtypes[from.byte() % std::size(dtypes)];
      if (one.dtype == "F32") one.bytes += one.bytes;  // which had 16 bits each
      return;
    case 3:
      if (one.shape.is_array() && !one.shape.empty()) one.shape[from.byte() % one.shape.size()] = any_value(from);
      return;
    case 4: {  // one row less or more, in the data too
      const bool has_rows = one.shape.is_array() && !one.shape.empty() && one.shape[0].is_number_integer();
      const auto rows = has_rows ? one.shape[0].get<std::int64_t>() : 0;
      if (rows < 2 || rows > 4096) return;
      const std::int64_t changed = from.flag() ? rows + 1 : rows - 1;
      one.bytes.resize(one.bytes.size() / static_cast<std::size_t>(rows) * static_cast<std::size_t>(changed));
      one.shape[0] = changed;
      return;
    }
    case 5:
      one.bytes.resize(one.bytes.size() - std::min<std::size_t>(from.byte(), one.bytes.size()));
      return;
    case 6:
      one.shape = any_value(from);
      return;
    default: {  // a value: NaN, infinite, whatever
      const std::uint32_t value = from.word();
      if (one.bytes.size() < 4) return;
      std::memcpy(&one.bytes[value % (one.bytes.size() - 3) & ~std::size_t{1}], &value, sizeof(value));
      return;
    }
  }
}

std::string file_of(std::span<const named_tensor> tensors, choices& from) {
  const std::uint8_t shift = from.below(32);  // mostly 0: where the data is, is said wrongly for one tensor
  json header = {{"__metadata__", {{"format", "pt"}}}};
  std::string data;
  for (const named_tensor& one : tensors) {
    const std::size_t begin = data.size(), wrong = shift > 28 && begin > 0 ? shift - 28u : 0u;
    data += one.bytes;
    header[one.name] = {
        {"dtype", one.dtype}, {"shape", one.shape}, {"data_offsets", {begin - wrong, data.size() - wrong}}};
  }
  const std::string text = header.dump();
  std::string file;
  for (unsigned at = 0; at < 64; at += 8) file += static_cast<char>(std::uint64_t{text.size()} >> at);
  return file + text + data;
}

}  // namespace

void write_edited_model(choices& from) {
  clear_scratch_folder();
  model_parts parts = parts_of(from.below(kinds.size()));
  const bool is_sharded = from.below(4) == 0;
  const std::uint8_t num_edits = from.below(6);
  for (std::uint8_t i = 0; i < num_edits; ++i) {
    if (from.flag()) {
      edit_config(from, parts.config);
    } else {
      edit_tensor(from, parts.tensors);
    }
  }
  write_scratch("config.json", parts.config.dump());
  const std::span<const named_tensor> tensors(parts.tensors);
  if (!is_sharded) {
    write_scratch("model.safetensors", file_of(tensors, from));
    return;
  }
  static constexpr const char* shards[] = {"1.safetensors", "2.safetensors"};
  const std::size_t cut = from.byte() % (tensors.size() + 1);
  json map = json::object();
  for (std::size_t i = 0; i < tensors.size(); ++i) map[tensors[i].name] = shards[i < cut ? 0 : 1];
  if (from.below(4) == 0) map["one more"] = any_value(from);
  write_scratch("model.safetensors.index.json", json{{"weight_map", map}}.dump());
  write_scratch(shards[0], file_of(tensors.first(cut), from));
  write_scratch(shards[1], file_of(tensors.subspan(cut), from));
}

}  // namespace bifolio::fuzz

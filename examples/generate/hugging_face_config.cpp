// SPDX-License-Identifier: Apache-2.0
#include "hugging_face_config.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <system_error>

#include "input_error.hpp"
#include "json_settings.hpp"

namespace generate {
namespace {

/// Which layers have a sliding window where "layer_types" does not say so.
enum class window_rule : std::uint8_t {
  none,
  all_layers,   ///< every one, if "sliding_window" is set
  late_layers,  ///< from "max_window_layers" on, if "use_sliding_window" is true
  pattern,      ///< all but every "sliding_window_pattern"-th
};

/// What transformers takes for granted of an architecture: a row is the whole of it.
struct architecture {
  const char* model_type = "";
  tensor_options tensors = {};
  bool optional_bias = false;  ///< "attention_bias" adds biases to q, k, v and attention's output
  bool has_bias = false;       ///< which it does when it is absent
  window_rule windows = window_rule::none;
  std::int32_t pattern = 0;                   ///< of `window_rule::pattern`
  std::optional<std::int32_t> head_dim = {};  ///< none: hidden_size / num_attention_heads
  activation gate = activation::silu;
  bool is_gemma = false;  ///< scaled embedding, a divisor of attention, soft caps
  bool has_experts = false;
  bool has_recurrence = false;
  float rotary_part = 1.0f;  ///< "partial_rotary_factor", which only architectures with another value than 1 have
  bool tied_classifier = false;
  float norm_epsilon = 1e-6f;
  float rope_theta = 1e4f;
  std::int32_t bos_id = -1;  ///< −1: none
  std::vector<std::int32_t> eos_ids = {};
};

const std::array<architecture, 8>& architectures() {
  static const std::array<architecture, 8> table{{
      {.model_type = "llama", .optional_bias = true, .bos_id = 1, .eos_ids = {2}},
      {.model_type = "mistral", .windows = window_rule::all_layers, .bos_id = 1, .eos_ids = {2}},
      {.model_type = "qwen2", .tensors = {.qkv_bias = true}, .windows = window_rule::late_layers},
      {.model_type = "qwen3",
       .tensors = {.qk_norm = true},
       .optional_bias = true,
       .windows = window_rule::late_layers,
       .head_dim = 128},
      {.model_type = "gemma2",
       .tensors = {.post_norms = true, .norms_less_1 = true},
       .optional_bias = true,
       .windows = window_rule::pattern,
       .pattern = 2,
       .head_dim = 256,
       .gate = activation::gelu_tanh,
       .is_gemma = true,
       .tied_classifier = true,
       .bos_id = 2,
       .eos_ids = {1}},
      {.model_type = "gemma3_text",
       .tensors = {.qk_norm = true, .post_norms = true, .norms_less_1 = true},
       .optional_bias = true,
       .windows = window_rule::pattern,
       .pattern = 6,
       .head_dim = 256,
       .gate = activation::gelu_tanh,
       .is_gemma = true,
       .tied_classifier = true,
       .rope_theta = 1e6f,
       .bos_id = 2,
       .eos_ids = {1}},
      {.model_type = "gpt_oss",
       .tensors = {.sinks = true},
       .optional_bias = true,
       .has_bias = true,
       .windows = window_rule::pattern,
       .pattern = 2,
       .head_dim = 64,
       .has_experts = true,
       .norm_epsilon = 1e-5f,
       .rope_theta = 150000.0f},
      {.model_type = "qwen3_5_text",
       .tensors = {.qk_norm = true, .norms_less_1 = true},
       .optional_bias = true,
       .head_dim = 256,
       .has_recurrence = true,
       .rotary_part = 0.25f},
  }};
  return table;
}

const architecture& find_architecture(const json_settings& s) {
  const std::string type = s.text("model_type", "llama");
  std::string known;
  for (const architecture& row : architectures()) {
    if (type == row.model_type) return row;
    known += fmt::format("{}\"{}\"", known.empty() ? "" : ", ", row.model_type);
  }
  s.refuse("model_type", "one of " + known + " (others are not supported)");
}

activation read_activation(const json_settings& s, const architecture& kind) {
  const char* key = kind.is_gemma ? "hidden_activation" : "hidden_act";
  if (!s.has(key)) return kind.gate;
  const std::string name = s.text(key);
  if (name == "silu") return activation::silu;
  if (name == "gelu_pytorch_tanh") return activation::gelu_tanh;
  s.refuse(key, "\"silu\" or \"gelu_pytorch_tanh\" (others are not supported)");
}

/// The settings of one scaling of rotary positions. Older files call the type "type".
void read_scaling(const json_settings& s, rope_config& rope) {
  const char* key = s.has("rope_type") ? "rope_type" : "type";
  const std::string type = s.text(key, s.has("factor") ? std::optional<std::string>() : "default");
  if (type == "default") return;
  if (type == "linear") {
    rope.scaling = rope_scaling::linear;
    rope.factor = s.number("factor");
  } else if (type == "llama3") {
    rope.scaling = rope_scaling::llama3;
    rope.factor = s.number("factor");
    rope.low_factor = s.number("low_freq_factor");
    rope.high_factor = s.number("high_freq_factor");
    rope.original_positions = s.integer("original_max_position_embeddings");
  } else if (type == "yarn") {
    rope.scaling = rope_scaling::yarn;
    rope.factor = s.number("factor");
    rope.beta_fast = s.number("beta_fast", 32.0f);
    rope.beta_slow = s.number("beta_slow", 1.0f);
    rope.truncates = s.flag("truncate", true);
    rope.original_positions = s.integer("original_max_position_embeddings");
    s.require_plain("mscale", nullptr);
    s.require_plain("mscale_all_dim", nullptr);
    const float factor = rope.factor > 1.0f ? 0.1f * std::log(rope.factor) + 1.0f : 1.0f;
    rope.attention_factor = s.number("attention_factor", factor);
  } else {
    s.refuse(key, "\"default\", \"linear\", \"llama3\" or \"yarn\" (others are not supported)");
  }
}

/// An object with the base and the scaling, as newer files have it.
rope_config read_rope(const json_settings& s, float theta, bool rotates_part = false) {
  if (!rotates_part) s.require_plain("partial_rotary_factor", 1.0);
  rope_config rope;
  rope.theta = s.number("rope_theta", theta);
  read_scaling(s, rope);
  return rope;
}

/// Of layers without a window and of those with one. Newer files have "rope_parameters", with an object for each type
/// of layers where the two differ.
std::array<rope_config, 2> read_ropes(const json_settings& s, const architecture& kind) {
  const bool rotates_part = kind.rotary_part != 1.0f;
  if (!rotates_part) s.require_plain("partial_rotary_factor", 1.0);
  const bool has_local_base = kind.windows == window_rule::pattern && kind.tensors.qk_norm;
  constexpr float local_base = 1e4f;
  if (s.has("rope_parameters")) {
    const json_settings p = s.nested("rope_parameters");
    if (!p.is_object("full_attention") && !p.is_object("sliding_attention")) {
      const rope_config rope = read_rope(p, s.number("rope_theta", kind.rope_theta), rotates_part);
      return {rope, rope};
    }
    return {read_rope(p.nested("full_attention"), kind.rope_theta),
            read_rope(p.nested("sliding_attention"), has_local_base ? local_base : kind.rope_theta)};
  }
  rope_config full;
  full.theta = s.number("rope_theta", kind.rope_theta);
  if (s.has("rope_scaling")) read_scaling(s.nested("rope_scaling"), full);
  if (!has_local_base) return {full, full};
  rope_config local;
  local.theta = s.number("rope_local_base_freq", local_base);
  return {full, local};
}

/// Which layers are recurrent: those that "layer_types" calls "linear_attention", or all but every
/// "full_attention_interval"-th.
std::vector<bool> read_recurrent(const json_settings& s, const architecture& kind, std::int32_t num_layers) {
  std::vector<bool> recurrent(static_cast<std::size_t>(num_layers));
  if (!kind.has_recurrence) return recurrent;
  if (s.has("layer_types")) {
    const nlohmann::json& types = s.list("layer_types");
    for (std::size_t i = 0; i < std::min(types.size(), recurrent.size()); ++i) {
      recurrent[i] = types[i] == "linear_attention";
    }
    return recurrent;
  }
  const std::int32_t interval = s.integer("full_attention_interval", 4);
  if (interval < 1) s.refuse("full_attention_interval", "a whole number from 1 on");
  for (std::int32_t i = 0; i < num_layers; ++i) recurrent[static_cast<std::size_t>(i)] = (i + 1) % interval != 0;
  return recurrent;
}

/// Which layers have a window.
std::vector<bool> read_windowed(const json_settings& s, const architecture& kind, std::int32_t num_layers) {
  std::vector<bool> windowed(static_cast<std::size_t>(num_layers));
  if (s.has("layer_types")) {
    const nlohmann::json& types = s.list("layer_types");
    if (types.size() != windowed.size()) {
      s.refuse("layer_types", fmt::format("a list of {} types, one for each layer", num_layers));
    }
    for (std::size_t i = 0; i < types.size(); ++i) {
      const std::string type = types[i].is_string() ? types[i].get<std::string>() : std::string();
      const char* other = kind.has_recurrence ? "linear_attention" : "sliding_attention";
      if (type != "full_attention" && type != other) {
        s.refuse("layer_types",
                 fmt::format("a list of \"full_attention\" and \"{}\" (others are not supported)", other));
      }
      windowed[i] = type == "sliding_attention";
    }
    return windowed;
  }
  switch (kind.windows) {
    case window_rule::none:
      break;
    case window_rule::all_layers:
      windowed.assign(windowed.size(), true);
      break;
    case window_rule::late_layers:
      for (std::int32_t i = std::max(s.integer("max_window_layers", 28), 0); i < num_layers; ++i) {
        windowed[static_cast<std::size_t>(i)] = true;
      }
      break;
    case window_rule::pattern: {
      const std::int32_t pattern = s.integer("sliding_window_pattern", kind.pattern);
      if (pattern < 1) s.refuse("sliding_window_pattern", "a whole number from 1 on");
      for (std::int32_t i = 0; i < num_layers; ++i) windowed[static_cast<std::size_t>(i)] = (i + 1) % pattern != 0;
      break;
    }
  }
  return windowed;
}

/// The window of the layers that have one; 0 when none has.
std::int32_t read_window(const json_settings& s, const architecture& kind) {
  switch (kind.windows) {
    case window_rule::none:
      return 0;
    case window_rule::all_layers:
      break;
    case window_rule::late_layers:
      if (!s.flag("use_sliding_window", false)) return 0;
      break;
    case window_rule::pattern:
      if (!s.object().contains("sliding_window")) return kind.has_experts ? 128 : 4096;
      break;
  }
  if (!s.has("sliding_window")) return 0;
  const std::int32_t window = s.integer("sliding_window");
  if (window < 1) s.refuse("sliding_window", "null or a whole number from 1 on");
  return window;
}

void read_kinds(const json_settings& s, const architecture& kind, model_config& c) {
  const std::array<rope_config, 2> ropes = read_ropes(s, kind);
  const std::int32_t window = read_window(s, kind);
  const std::vector<bool> windowed = read_windowed(s, kind, c.num_layers);
  const std::vector<bool> recurrent = read_recurrent(s, kind, c.num_layers);
  c.kinds.clear();
  for (std::size_t i = 0; i < windowed.size(); ++i) {
    const bool has_window = windowed[i];
    layer_kind wanted{has_window ? window : 0, ropes[has_window ? 1 : 0], false};
    if (recurrent[i]) wanted = {0, {}, true};
    const auto found = std::ranges::find(c.kinds, wanted);
    c.kind_of_layer.push_back(static_cast<std::int32_t>(found - c.kinds.begin()));
    if (found == c.kinds.end()) c.kinds.push_back(wanted);
  }
}

void read_experts(const json_settings& s, experts_config& e) {
  e.count = s.integer(s.has("num_experts") ? "num_experts" : "num_local_experts", 128);
  if (e.count < 1) s.refuse("num_local_experts", "a whole number from 1 on");
  e.num_active = s.integer("num_experts_per_tok", 4);
  e.gate_gain = s.number("swiglu_alpha", 1.702f);
  e.limit = s.number("swiglu_limit", 7.0f);
}

/// Gates of attention come with the recurrent layers.
void read_recurrence(const json_settings& s, const architecture& kind, model_config& c) {
  c.gates_attention = true;
  c.recurrence = {.num_k_heads = s.integer("linear_num_key_heads", 16),
                  .num_v_heads = s.integer("linear_num_value_heads", 32),
                  .k_head_dim = s.integer("linear_key_head_dim", 128),
                  .v_head_dim = s.integer("linear_value_head_dim", 128),
                  .kernel_size = s.integer("linear_conv_kernel_dim", 4)};
  float part = s.number("partial_rotary_factor", kind.rotary_part);
  if (s.has("rope_parameters")) part = s.nested("rope_parameters").number("partial_rotary_factor", part);
  if (!(part > 0 && part <= 1)) s.refuse("partial_rotary_factor", "a number above 0 up to 1");
  c.rotary_dim = static_cast<std::int32_t>(static_cast<float>(c.head_dim) * part);
  if (c.rotary_dim < 2) s.refuse("partial_rotary_factor", "a part of a head of at least two dims");
}

void read_gemma(const json_settings& s, const architecture& kind, model_config& c) {
  const bool has_soft_caps = kind.model_type == std::string("gemma2");
  const auto soft_cap = [&](const char* key, float otherwise) {
    return s.is_null(key) ? 0.0f : s.number(key, has_soft_caps ? otherwise : 0.0f);
  };
  s.require_plain("use_bidirectional_attention", false);
  c.embedding_scale = std::sqrt(static_cast<float>(c.dim));
  c.attention_divisor = s.number("query_pre_attn_scalar", 256.0f);
  if (!(c.attention_divisor > 0)) s.refuse("query_pre_attn_scalar", "a number above 0");
  c.attention_soft_cap = soft_cap("attn_logit_softcapping", 50.0f);
  c.logits_soft_cap = soft_cap("final_logit_softcapping", 30.0f);
}

std::int32_t read_head_dim(const json_settings& s, const architecture& kind, const model_config& c) {
  if (s.has("head_dim")) return s.integer("head_dim");
  if (kind.head_dim) return *kind.head_dim;
  if (c.num_q_heads <= 0) return 1;  // `validate` refuses it
  if (c.dim % c.num_q_heads != 0) {
    throw input_error(fmt::format("{}: the hidden size {} is not a multiple of its {} attention heads", s.file(), c.dim,
                                  c.num_q_heads));
  }
  return c.dim / c.num_q_heads;
}

/// transformers ends a text by generation_config.json, and by config.json where that names no id.
std::vector<std::int32_t> read_eos_ids(const std::filesystem::path& path, const json_settings& s,
                                       const architecture& kind) {
  const std::filesystem::path own = path.parent_path() / "generation_config.json";
  std::error_code problem;
  if (std::filesystem::exists(own, problem)) {
    const json_settings generation(own);
    if (generation.has("eos_token_id")) return generation.tokens("eos_token_id", {});
  }
  return s.tokens("eos_token_id", kind.eos_ids);
}

}  // namespace

hugging_face_config read_hugging_face_config(const std::filesystem::path& path) {
  const json_settings s(path);
  const architecture& kind = find_architecture(s);
  s.require_plain("mlp_bias", false);
  s.require_plain("quantization_config", nullptr);

  hugging_face_config result;
  result.tensors = kind.tensors;
  if (kind.optional_bias && s.flag("attention_bias", kind.has_bias)) {
    result.tensors.qkv_bias = result.tensors.attention_out_bias = true;
  }
  model_config& c = result.model;
  c.dim = s.integer("hidden_size");
  c.hidden_dim = s.integer("intermediate_size");
  c.num_layers = s.integer("num_hidden_layers");
  c.num_q_heads = s.integer("num_attention_heads");
  c.num_kv_heads = s.integer("num_key_value_heads", c.num_q_heads);
  c.vocab_size = s.integer("vocab_size");
  c.max_positions = s.integer("max_position_embeddings");
  c.norm_epsilon = s.number("rms_norm_eps", kind.norm_epsilon);
  c.gate = read_activation(s, kind);
  c.tied_classifier = s.flag("tie_word_embeddings", kind.tied_classifier);
  c.bos_id = s.is_null("bos_token_id") ? -1 : s.integer("bos_token_id", kind.bos_id);
  c.eos_ids = read_eos_ids(path, s, kind);
  c.rope = bifolio::rope_pairing::neox;
  c.head_dim = read_head_dim(s, kind, c);
  if (kind.is_gemma) read_gemma(s, kind, c);
  if (kind.has_experts) read_experts(s, c.experts);
  if (kind.has_recurrence) read_recurrence(s, kind, c);
  validate(c, s.file());  // before num_layers is believed
  read_kinds(s, kind, c);
  validate(c, s.file());
  return result;
}

}  // namespace generate

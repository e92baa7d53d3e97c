// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <system_error>

#include "checkpoint.hpp"
#include "hugging_face_config.hpp"
#include "input_error.hpp"
#include "tensor_files.hpp"

namespace generate {
namespace {

/// The tensors of layer after layer by their names, which all architectures share.
class layer_reader {
 public:
  layer_reader(tensor_files& files, const model_config& config, const tensor_options& options)
      : files_(files), config_(config), options_(options) {}

  [[nodiscard]] std::vector<float> norm(const std::string& name, std::int32_t count) {
    std::vector<float> weights = files_.vector({{name + ".weight", count}});
    if (options_.norms_less_1) {
      for (float& weight : weights) weight += 1.0f;
    }
    return weights;
  }

  [[nodiscard]] layer_weights read(std::int32_t index) {
    const model_config& c = config_;
    const std::string prefix = fmt::format("model.layers.{}.", index);
    const std::string mlp = prefix + "mlp.";
    layer_weights layer;
    layer.attention_norm = norm(prefix + "input_layernorm", c.dim);
    if (c.kinds[c.kind_of(index)].is_recurrent) {
      layer.recurrence = read_recurrence(prefix + "linear_attn.");
    } else {
      read_attention(prefix + "self_attn.", layer);
    }
    if (options_.post_norms) {
      layer.attention_post_norm = norm(prefix + "post_attention_layernorm", c.dim);
      layer.mlp_norm = norm(prefix + "pre_feedforward_layernorm", c.dim);
      layer.mlp_post_norm = norm(prefix + "post_feedforward_layernorm", c.dim);
    } else {
      layer.mlp_norm = norm(prefix + "post_attention_layernorm", c.dim);
    }
    if (c.experts.count > 0) {
      layer.experts = read_experts(mlp);
      return layer;
    }
    layer.gate_up =
        files_.matrix({{mlp + "gate_proj.weight", c.hidden_dim}, {mlp + "up_proj.weight", c.hidden_dim}}, c.dim);
    layer.down = files_.matrix({{mlp + "down_proj.weight", c.dim}}, c.hidden_dim);
    return layer;
  }

 private:
  void read_attention(const std::string& attention, layer_weights& layer) {
    const model_config& c = config_;
    const std::int32_t q_rows = c.qkv_dim() - 2 * c.kv_dim();
    layer.qkv = files_.matrix({{attention + "q_proj.weight", q_rows},
                               {attention + "k_proj.weight", c.kv_dim()},
                               {attention + "v_proj.weight", c.kv_dim()}},
                              c.dim);
    if (options_.qkv_bias) {
      layer.qkv_bias = files_.vector({{attention + "q_proj.bias", q_rows},
                                      {attention + "k_proj.bias", c.kv_dim()},
                                      {attention + "v_proj.bias", c.kv_dim()}});
    }
    if (options_.qk_norm) {
      layer.q_norm = norm(attention + "q_norm", c.head_dim);
      layer.k_norm = norm(attention + "k_norm", c.head_dim);
    }
    if (options_.sinks) layer.sinks = files_.vector({{attention + "sinks", c.num_q_heads}});
    layer.attention_out = files_.matrix({{attention + "o_proj.weight", c.dim}}, c.q_dim());
    if (options_.attention_out_bias) layer.attention_out_bias = files_.vector({{attention + "o_proj.bias", c.dim}});
  }

  [[nodiscard]] delta_net_weights read_recurrence(const std::string& name) {
    const recurrence_config& r = config_.recurrence;
    delta_net_weights weights;
    weights.in = files_.matrix({{name + "in_proj_qkv.weight", r.conv_dim()},
                                {name + "in_proj_z.weight", r.v_dim()},
                                {name + "in_proj_b.weight", r.num_v_heads},
                                {name + "in_proj_a.weight", r.num_v_heads}},
                               config_.dim);
    weights.conv = files_.tensor(name + "conv1d.weight", {r.conv_dim(), 1, r.kernel_size});
    weights.decay_log = files_.vector({{name + "A_log", r.num_v_heads}});
    weights.decay_bias = files_.vector({{name + "dt_bias", r.num_v_heads}});
    weights.norm = files_.vector({{name + "norm.weight", r.v_head_dim}});  // stored as it is, whatever other norms are
    weights.out = files_.matrix({{name + "out_proj.weight", config_.dim}}, r.v_dim());
    return weights;
  }

  [[nodiscard]] experts_weights read_experts(const std::string& mlp) {
    const model_config& c = config_;
    const std::int64_t count = c.experts.count;
    const std::string name = mlp + "experts.";
    experts_weights weights;
    weights.router = files_.matrix({{mlp + "router.weight", c.experts.count}}, c.dim);
    weights.router_bias = files_.vector({{mlp + "router.bias", c.experts.count}});
    const std::vector<float> gate_up_bias = files_.tensor(name + "gate_up_proj_bias", {count, 2 * c.hidden_dim});
    const std::vector<float> down_bias = files_.tensor(name + "down_proj_bias", {count, c.dim});
    const auto part = [](const std::vector<float>& all, std::int64_t index, std::int64_t size) {
      return std::vector<float>(all.begin() + index * size, all.begin() + (index + 1) * size);
    };
    for (std::int64_t e = 0; e < count; ++e) {
      weights.experts.push_back({files_.transposed(name + "gate_up_proj", e, count, 2 * c.hidden_dim, c.dim),
                                 part(gate_up_bias, e, 2 * std::int64_t{c.hidden_dim}),
                                 files_.transposed(name + "down_proj", e, count, c.dim, c.hidden_dim),
                                 part(down_bias, e, c.dim)});
    }
    return weights;
  }

  tensor_files& files_;
  const model_config& config_;
  const tensor_options& options_;
};

}  // namespace

checkpoint load_hugging_face(const std::filesystem::path& path) {
  std::error_code problem;
  const bool is_directory = std::filesystem::is_directory(path, problem);
  if (!is_directory && !std::filesystem::exists(path, problem)) {
    throw input_error(fmt::format("{}: there is no such file or directory", path.string()));
  }
  const hugging_face_config config =
      read_hugging_face_config((is_directory ? path : path.parent_path()) / "config.json");
  checkpoint model;
  model.config = config.model;
  const model_config& c = model.config;
  tensor_files files(path);
  layer_reader reader(files, c, config.tensors);

  model.embedding = files.matrix({{"model.embed_tokens.weight", c.vocab_size}}, c.dim);
  for (std::int32_t i = 0; i < c.num_layers; ++i) model.layers.push_back(reader.read(i));
  model.final_norm = reader.norm("model.norm", c.dim);
  if (!c.tied_classifier) model.classifier = files.matrix({{"lm_head.weight", c.vocab_size}}, c.dim);
  return model;
}

}  // namespace generate

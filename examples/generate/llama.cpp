// SPDX-License-Identifier: Apache-2.0
#include "llama.hpp"

#include <chrono>
#include <cmath>
#include <numeric>
#include <type_traits>

#include "parallel.hpp"

namespace generate {
namespace {

using bifolio::token_id;

constexpr std::int64_t token_grain = 16;  // tokens that make a worker worth waking in element-wise work

float* grow(std::vector<float>& values, std::int64_t count) {
  if (values.size() < static_cast<std::size_t>(count)) values.resize(static_cast<std::size_t>(count));
  return values.data();
}

void add(float* x, const float* added, std::int64_t count) noexcept {
  for (std::int64_t i = 0; i < count; ++i) x[i] += added[i];
}

/// Adds `bias` to each of some rows of its size, if there is one.
void add_bias(float* rows, const std::vector<float>& bias, std::int64_t num_rows) noexcept {
  for (std::int64_t r = 0; r < num_rows && !bias.empty(); ++r)
    add(rows + r * std::ssize(bias), bias.data(), std::ssize(bias));
}

/// RMSNorm: x · weight / √(mean(x²) + ε). `out` may be `x`.
void normalise_row(const float* x, const std::vector<float>& weight, float epsilon, float* out) noexcept {
  const std::int64_t count = std::ssize(weight);
  float squares = 0;
  for (std::int64_t i = 0; i < count; ++i) squares += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(count) + epsilon);
  for (std::int64_t i = 0; i < count; ++i) out[i] = weight[static_cast<std::size_t>(i)] * (scale * x[i]);
}

float gelu_tanh(float x) noexcept {
  constexpr float root = 0.797884560802865f;  // √(2/π)
  return 0.5f * x * (1.0f + std::tanh(root * (x + 0.044715f * x * x * x)));
}

void widen(const std::uint16_t* bits, std::int64_t count, bifolio::dtype type, float* x) noexcept {
  visit_tensor_dtype(type, [&](auto traits) {
    using storage = typename decltype(traits)::storage;
    if constexpr (sizeof(storage) == sizeof(*bits)) {
      for (std::int64_t i = 0; i < count; ++i) x[i] = to_float(storage{bits[i]});
    } else {
      static_assert(std::is_same_v<storage, float>);  // is never narrowed
    }
  });
}

}  // namespace

/// Cosines and sines of position · frequency, a row for each token, for every kind of layers.
void llama::prepare_rotations(std::span<const std::int32_t> positions) {
  const model_config& c = model_->config;
  const std::int32_t dims = c.rotated_dims();
  float* cosines = grow(rotations_, std::ssize(c.kinds) * static_cast<std::int64_t>(positions.size()) * dims);
  const std::int32_t half = dims / 2;
  for (const layer_kind& kind : c.kinds) {
    const std::vector<float> frequencies = rotary_frequencies(kind.rope, dims);
    for (const std::int32_t position : positions) {
      for (std::int32_t i = 0; i < half; ++i) {
        const float angle = static_cast<float>(position) * frequencies[static_cast<std::size_t>(i)];
        cosines[i] = std::cos(angle) * kind.rope.attention_factor;
        cosines[i + half] = std::sin(angle) * kind.rope.attention_factor;
      }
      cosines += dims;
    }
  }
  rotation_rows_.resize(positions.size());
  std::iota(rotation_rows_.begin(), rotation_rows_.end(), 0);
}

void llama::normalise(const float* x, const std::vector<float>& weight, std::int64_t num_tokens,
                      float* out) const noexcept {
  const std::int64_t dim = model_->config.dim;
  const float epsilon = model_->config.norm_epsilon;
  parallel_ranges(*workers_, num_tokens, token_grain, [&](std::int64_t begin, std::int64_t end) noexcept {
    for (std::int64_t t = begin; t < end; ++t) normalise_row(x + t * dim, weight, epsilon, out + t * dim);
  });
}

void llama::gate(std::int64_t num_tokens) noexcept {
  const std::int64_t hidden_dim = model_->config.hidden_dim;
  const activation kind = model_->config.gate;
  parallel_ranges(*workers_, num_tokens, token_grain, [&](std::int64_t begin, std::int64_t end) noexcept {
    for (std::int64_t t = begin; t < end; ++t) {
      const float* gate = gate_up_.data() + t * 2 * hidden_dim;
      const float* up = gate + hidden_dim;
      float* const result = hidden_.data() + t * hidden_dim;
      switch (kind) {
        case activation::silu:
          for (std::int64_t i = 0; i < hidden_dim; ++i) result[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
          break;
        case activation::gelu_tanh:
          for (std::int64_t i = 0; i < hidden_dim; ++i) result[i] = gelu_tanh(gate[i]) * up[i];
          break;
      }
    }
  });
}

void llama::attend(std::int32_t layer, std::int64_t num_tokens, attention_layer& attention) {
  const model_config& c = model_->config;
  const std::int64_t q_dim = c.q_dim();
  const std::int64_t kv_dim = c.kv_dim();
  const std::int64_t qkv_dim = c.qkv_dim();
  // Views into the fused projection: bifolio takes rows at any stride, so q, k and v are never copied apart.
  const auto part = [&](std::int64_t offset, std::int32_t num_heads, std::int64_t head_stride) {
    return bifolio::tensor_view{qkv_.data() + offset, bifolio::dtype::f32, num_tokens, num_heads, c.head_dim, qkv_dim,
                                head_stride};
  };
  const std::int64_t first_k = qkv_dim - 2 * kv_dim;
  const bool narrows = query_type_ != bifolio::dtype::f32;
  layer_rows rows;
  rows.q_out = part(0, c.num_q_heads, c.gates_attention ? 2 * c.head_dim : c.head_dim);
  rows.q = as_const(rows.q_out);
  rows.k = as_const(part(first_k, c.num_kv_heads, c.head_dim));
  rows.v = as_const(part(first_k + kv_dim, c.num_kv_heads, c.head_dim));
  if (narrows) {
    narrow_q_.resize(static_cast<std::size_t>(num_tokens * q_dim));
    narrow_attended_.resize(narrow_q_.size());
    rows.q_out = bifolio::dense_view<void>(narrow_q_.data(), query_type_, num_tokens, c.num_q_heads, c.head_dim);
  }
  void* const out = narrows ? static_cast<void*>(narrow_attended_.data()) : attended_.data();
  rows.out = bifolio::dense_view<void>(out, query_type_, num_tokens, c.num_q_heads, c.head_dim);
  rows.rotary.pairing = c.rope;
  rows.rotary.rotary_dim = c.rotated_dims();
  rows.rotary.cos_sin = rotations_.data() + static_cast<std::int64_t>(c.kind_of(layer)) * num_tokens * c.rotated_dims();
  rows.rotary.num_positions = num_tokens;
  rows.rotary.positions = rotation_rows_.data();
  const layer_weights& weights = model_->layers[static_cast<std::size_t>(layer)];
  rows.norm.q_weight = weights.q_norm.empty() ? nullptr : weights.q_norm.data();
  rows.norm.k_weight = weights.k_norm.empty() ? nullptr : weights.k_norm.data();
  rows.norm.epsilon = c.norm_epsilon;
  rows.sinks = weights.sinks.empty() ? nullptr : weights.sinks.data();
  const auto start = std::chrono::steady_clock::now();
  attention.run(layer, rows);
  attention_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (!narrows) return;
  parallel_ranges(*workers_, num_tokens, token_grain, [&](std::int64_t begin, std::int64_t end) noexcept {
    widen(narrow_attended_.data() + begin * q_dim, (end - begin) * q_dim, query_type_,
          attended_.data() + begin * q_dim);
  });
}

void llama::gate_attention(std::int64_t num_tokens) noexcept {
  const model_config& c = model_->config;
  parallel_ranges(*workers_, num_tokens, token_grain, [&](std::int64_t begin, std::int64_t end) noexcept {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int32_t h = 0; h < c.num_q_heads; ++h) {
        const float* const gate = qkv_.data() + t * c.qkv_dim() + (2 * std::int64_t{h} + 1) * c.head_dim;
        float* const result = attended_.data() + t * c.q_dim() + std::int64_t{h} * c.head_dim;
        for (std::int32_t i = 0; i < c.head_dim; ++i) result[i] /= 1.0f + std::exp(-gate[i]);
      }
    }
  });
}

void llama::mix_tokens(std::int32_t index, std::int64_t num_tokens, attention_layer& attention) {
  const model_config& c = model_->config;
  const layer_weights& layer = model_->layers[static_cast<std::size_t>(index)];
  if (c.kinds[c.kind_of(index)].is_recurrent) {
    recurrence_.run(c.recurrence, c.norm_epsilon, layer.recurrence, normed_.data(), num_tokens, attention.states(index),
                    added_.data());
    return;
  }
  layer.qkv.apply(*workers_, normed_.data(), num_tokens, qkv_.data());
  add_bias(qkv_.data(), layer.qkv_bias, num_tokens);
  attend(index, num_tokens, attention);
  if (c.gates_attention) gate_attention(num_tokens);
  layer.attention_out.apply(*workers_, attended_.data(), num_tokens, added_.data());
  add_bias(added_.data(), layer.attention_out_bias, num_tokens);
}

void llama::run_mlp(const layer_weights& layer, std::int64_t num_tokens) {
  const model_config& c = model_->config;
  if (c.experts.count > 0) {
    experts_.run(c.experts, layer.experts, normed_.data(), num_tokens, added_.data());
    return;
  }
  layer.gate_up.apply(*workers_, normed_.data(), num_tokens, gate_up_.data());
  gate(num_tokens);
  layer.down.apply(*workers_, hidden_.data(), num_tokens, added_.data());
}

std::span<const float> llama::forward(std::span<const token_id> tokens, std::span<const std::int32_t> positions,
                                      std::span<const std::int32_t> logits_rows, attention_layer& attention) {
  const model_config& c = model_->config;
  const auto n = static_cast<std::int64_t>(tokens.size());
  const std::int64_t dim = c.dim;
  const std::int64_t hidden_dim = c.hidden_dim;
  float* x = grow(x_, n * dim);
  float* normed = grow(normed_, n * dim);
  float* added = grow(added_, n * dim);
  (void)grow(qkv_, n * c.qkv_dim());
  (void)grow(attended_, n * c.q_dim());
  (void)grow(gate_up_, n * 2 * hidden_dim);
  (void)grow(hidden_, n * hidden_dim);

  for (std::int64_t t = 0; t < n; ++t)
    model_->embedding.copy_row(to_index(tokens[static_cast<std::size_t>(t)]), x + t * dim);
  if (c.embedding_scale != 1.0f) {
    for (std::int64_t i = 0; i < n * dim; ++i) x[i] *= c.embedding_scale;
  }
  prepare_rotations(positions);

  for (std::int32_t l = 0; l < c.num_layers; ++l) {
    const layer_weights& layer = model_->layers[static_cast<std::size_t>(l)];

    normalise(x, layer.attention_norm, n, normed);
    mix_tokens(l, n, attention);
    if (!layer.attention_post_norm.empty()) normalise(added, layer.attention_post_norm, n, added);
    add(x, added, n * dim);

    normalise(x, layer.mlp_norm, n, normed);
    run_mlp(layer, n);
    if (!layer.mlp_post_norm.empty()) normalise(added, layer.mlp_post_norm, n, added);
    add(x, added, n * dim);
  }

  // Only the rows that somebody samples from pay for the vocabulary.
  const auto num_rows = static_cast<std::int64_t>(logits_rows.size());
  for (std::int64_t r = 0; r < num_rows; ++r) {
    const float* row = x + std::int64_t{logits_rows[static_cast<std::size_t>(r)]} * dim;
    std::copy(row, row + dim, added + r * dim);
  }
  normalise(added, model_->final_norm, num_rows, normed);
  float* logits = grow(logits_, num_rows * c.vocab_size);
  const linear& classifier = c.tied_classifier ? model_->embedding : model_->classifier;
  classifier.apply(*workers_, normed, num_rows, logits);
  if (c.logits_soft_cap > 0) {
    for (std::int64_t i = 0; i < num_rows * c.vocab_size; ++i) {
      logits[i] = c.logits_soft_cap * std::tanh(logits[i] / c.logits_soft_cap);
    }
  }
  return {logits, static_cast<std::size_t>(num_rows * c.vocab_size)};
}

}  // namespace generate

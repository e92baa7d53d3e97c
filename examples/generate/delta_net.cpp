// SPDX-License-Identifier: Apache-2.0
#include "delta_net.hpp"

#include <algorithm>
#include <bifolio/types.hpp>
#include <cmath>
#include <cstddef>

#include "parallel.hpp"

namespace generate {
namespace {

float sigmoid(float x) noexcept { return 1.0f / (1.0f + std::exp(-x)); }
float silu(float x) noexcept { return x * sigmoid(x); }
float softplus(float x) noexcept { return x > 20.0f ? x : std::log1p(std::exp(x)); }

/// 1 / the length of a vector.
float scale_of(const float* x, std::int32_t count) noexcept {
  float squares = 0;
  for (std::int32_t i = 0; i < count; ++i) squares += x[i] * x[i];
  return 1.0f / std::sqrt(squares + 1e-6f);
}

/// One sequence's rows and states.
struct sequence_rows {
  std::int64_t begin = 0, end = 0;  // of its tokens
  const float* from = nullptr;      // null: zeros
  float* to = nullptr;
};

sequence_rows rows_of(const recurrent_states& states, std::int64_t sequence) noexcept {
  const std::int32_t* const ids = states.rows + sequence * states.rows_stride;
  const auto at = [&](std::int32_t id) {
    return reinterpret_cast<float*>(states.data + std::int64_t{id} * states.state_bytes);
  };
  const bool is_first = bifolio::block_id{ids[0]} == bifolio::invalid_block;
  return {states.query_start_loc[sequence], states.query_start_loc[sequence + 1], is_first ? nullptr : at(ids[0]),
          at(ids[1])};
}

/// The convolution of one sequence, and the inputs that the next step needs of it.
void convolve(const recurrence_config& c, const std::vector<float>& kernel, const float* projected,
              std::int64_t projected_dim, const sequence_rows& rows, float* mixed) noexcept {
  const std::int64_t dim = c.conv_dim(), before = c.kernel_size - 1;
  // Input number t − before … of the sequence's step: from the state, zeros before the first token.
  const auto input = [&](std::int64_t t) -> const float* {
    if (t >= 0) return projected + (rows.begin + t) * projected_dim;
    return rows.from == nullptr ? nullptr : rows.from + (t + before) * dim;
  };
  const std::int64_t count = rows.end - rows.begin;
  for (std::int64_t t = 0; t < count; ++t) {
    float* const result = mixed + (rows.begin + t) * dim;
    std::fill(result, result + dim, 0.0f);
    for (std::int64_t j = 0; j <= before; ++j) {
      const float* const x = input(t - before + j);
      for (std::int64_t i = 0; x != nullptr && i < dim; ++i) {
        result[i] += kernel[static_cast<std::size_t>(i * c.kernel_size + j)] * x[i];
      }
    }
    for (std::int64_t i = 0; i < dim; ++i) result[i] = silu(result[i]);
  }
  for (std::int64_t j = 0; j < before; ++j) {
    const float* const x = input(count - before + j);
    float* const kept = rows.to + j * dim;
    if (x == nullptr) {
      std::fill(kept, kept + dim, 0.0f);
    } else {
      std::copy(x, x + dim, kept);
    }
  }
}

/// What one head of one sequence reads of its memory, token by token, and the memory after them.
void recur(const recurrence_config& c, const delta_net_weights& weights, float epsilon, std::int32_t head,
           const float* projected, std::int64_t projected_dim, const float* mixed, const sequence_rows& rows,
           float* read) noexcept {
  const std::int32_t k_head = head / (c.num_v_heads / c.num_k_heads);
  const std::int64_t memory_size = std::int64_t{c.k_head_dim} * c.v_head_dim;
  const std::int64_t place = c.conv_state_size() + head * memory_size;
  float* const memory = rows.to + place;
  if (rows.from == nullptr) {
    std::fill(memory, memory + memory_size, 0.0f);
  } else {
    std::copy(rows.from + place, rows.from + place + memory_size, memory);
  }
  const float q_divisor = std::sqrt(static_cast<float>(c.k_head_dim));
  for (std::int64_t t = rows.begin; t < rows.end; ++t) {
    const float* const q = mixed + t * c.conv_dim() + k_head * c.k_head_dim;
    const float* const k = q + c.k_dim();
    const float* const v = mixed + t * c.conv_dim() + 2 * c.k_dim() + head * c.v_head_dim;
    const float* const z = projected + t * projected_dim + c.conv_dim() + head * c.v_head_dim;
    const float* const gates = projected + t * projected_dim + c.conv_dim() + c.v_dim();
    const auto h = static_cast<std::size_t>(head);
    const float beta = sigmoid(gates[head]);
    const float decay =
        std::exp(-std::exp(weights.decay_log[h]) * softplus(gates[c.num_v_heads + head] + weights.decay_bias[h]));
    const float q_scale = scale_of(q, c.k_head_dim) / q_divisor, k_scale = scale_of(k, c.k_head_dim);
    float* const o = read + t * c.v_dim() + head * c.v_head_dim;
    // o is first what the memory has for k, then the correction, then what q reads.
    std::fill(o, o + c.v_head_dim, 0.0f);
    for (std::int32_t i = 0; i < c.k_head_dim; ++i) {
      float* const row = memory + std::int64_t{i} * c.v_head_dim;
      const float key = k[i] * k_scale;
      for (std::int32_t j = 0; j < c.v_head_dim; ++j) {
        row[j] *= decay;
        o[j] += row[j] * key;
      }
    }
    for (std::int32_t j = 0; j < c.v_head_dim; ++j) o[j] = (v[j] - o[j]) * beta;
    for (std::int32_t i = 0; i < c.k_head_dim; ++i) {
      float* const row = memory + std::int64_t{i} * c.v_head_dim;
      const float key = k[i] * k_scale;
      for (std::int32_t j = 0; j < c.v_head_dim; ++j) row[j] += key * o[j];
    }
    std::fill(o, o + c.v_head_dim, 0.0f);
    for (std::int32_t i = 0; i < c.k_head_dim; ++i) {
      const float* const row = memory + std::int64_t{i} * c.v_head_dim;
      const float query = q[i] * q_scale;
      for (std::int32_t j = 0; j < c.v_head_dim; ++j) o[j] += row[j] * query;
    }
    float squares = 0;
    for (std::int32_t j = 0; j < c.v_head_dim; ++j) squares += o[j] * o[j];
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(c.v_head_dim) + epsilon);
    for (std::int32_t j = 0; j < c.v_head_dim; ++j) {
      o[j] = weights.norm[static_cast<std::size_t>(j)] * (o[j] * scale) * silu(z[j]);
    }
  }
}

}  // namespace

void delta_net::run(const recurrence_config& c, float epsilon, const delta_net_weights& weights, const float* x,
                    std::int64_t num_tokens, const recurrent_states& states, float* out) {
  const std::int64_t projected_dim = weights.in.num_outputs();
  projected_.resize(static_cast<std::size_t>(num_tokens * projected_dim));
  mixed_.resize(static_cast<std::size_t>(num_tokens * c.conv_dim()));
  read_.resize(static_cast<std::size_t>(num_tokens * c.v_dim()));
  weights.in.apply(*workers_, x, num_tokens, projected_.data());
  parallel_ranges(*workers_, states.num_sequences, 1, [&](std::int64_t begin, std::int64_t end) noexcept {
    for (std::int64_t s = begin; s < end; ++s) {
      convolve(c, weights.conv, projected_.data(), projected_dim, rows_of(states, s), mixed_.data());
    }
  });
  const std::int64_t num_heads = c.num_v_heads;
  parallel_ranges(*workers_, states.num_sequences * num_heads, 1, [&](std::int64_t begin, std::int64_t end) noexcept {
    for (std::int64_t i = begin; i < end; ++i) {
      recur(c, weights, epsilon, static_cast<std::int32_t>(i % num_heads), projected_.data(), projected_dim,
            mixed_.data(), rows_of(states, i / num_heads), read_.data());
    }
  });
  weights.out.apply(*workers_, read_.data(), num_tokens, out);
}

}  // namespace generate

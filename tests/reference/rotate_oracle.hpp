// SPDX-License-Identifier: Apache-2.0
#pragma once

/// rotate_append, one head at a time, on host memory: in float64 what it means, and in float32 the arithmetic that
/// rotate_append.hpp promises bit for bit, written down with no thought of speed.

#include <bifolio/rotate_append.hpp>
#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <vector>

#include "reference/cache_oracle.hpp"
#include "reference/code_oracle.hpp"
#include "support/elements.hpp"

namespace bifolio::test {

/// Angles of one token: the table's cosines and sines, a pair each.
struct oracle_angles {
  std::vector<float> cosines;
  std::vector<float> sines;
};

[[nodiscard]] inline oracle_angles angles_of(const rotary_params& rotary, std::int64_t num_tokens, std::int64_t token) {
  oracle_angles angles;
  const std::int32_t pairs = rotary.rotary_dim / 2;
  for (std::int32_t i = 0; i < pairs; ++i) {
    const std::int32_t axis = rotary.axis_of_pair == nullptr ? 0 : rotary.axis_of_pair[i];
    const std::int64_t position = rotary.positions[axis * num_tokens + token];
    angles.cosines.push_back(rotary.cos_sin[position * rotary.rotary_dim + i]);
    angles.sines.push_back(rotary.cos_sin[position * rotary.rotary_dim + pairs + i]);
  }
  return angles;
}

/// The dims of pair i.
struct rotary_pair {
  std::size_t a;
  std::size_t b;
};
[[nodiscard]] inline rotary_pair pair_of(const rotary_params& rotary, std::size_t i) {
  const auto first = static_cast<std::size_t>(rotary.rotary_offset);
  const auto half = static_cast<std::size_t>(rotary.rotary_dim / 2);
  if (rotary.pairing == rope_pairing::gptj) return {first + 2 * i, first + 2 * i + 1};
  return {first + i, first + i + half};
}

/// In float64. `weights`: null without a norm.
[[nodiscard]] inline std::vector<double> oracle_rotate(std::vector<double> x, const rotary_params& rotary,
                                                       const oracle_angles& angles, const float* weights,
                                                       float epsilon) {
  if (weights != nullptr) {
    double sum = 0;
    for (const double value : x) sum += value * value;
    const double factor = 1 / std::sqrt(sum / static_cast<double>(x.size()) + static_cast<double>(epsilon));
    for (std::size_t d = 0; d < x.size(); ++d) x[d] = x[d] * factor * static_cast<double>(weights[d]);
  }
  for (std::size_t i = 0; i < angles.cosines.size(); ++i) {
    const auto [a, b] = pair_of(rotary, i);
    const std::complex<double> turned =
        std::complex<double>(x[a], x[b]) *
        std::complex<double>(static_cast<double>(angles.cosines[i]), static_cast<double>(angles.sines[i]));
    x[a] = turned.real();
    x[b] = turned.imag();
  }
  return x;
}

/// The promised float32 arithmetic. Sources that call it are compiled with -ffp-contract=off.
[[nodiscard]] inline std::vector<float> promised_rotate(std::vector<float> x, const rotary_params& rotary,
                                                        const oracle_angles& angles, const float* weights,
                                                        float epsilon) {
  if (weights != nullptr) {
    std::vector<float> sums(64, 0.0f);
    for (std::size_t d = 0; d < x.size(); ++d) sums[d % 64] += x[d] * x[d];
    while (sums.size() > 1) {
      std::vector<float> fewer;
      for (std::size_t i = 0; i < sums.size(); i += 8) {
        const float* s = sums.data() + i;
        fewer.push_back(((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7])));
      }
      sums = fewer;
    }
    const float factor = 1.0f / std::sqrt(sums[0] / static_cast<float>(x.size()) + epsilon);
    for (std::size_t d = 0; d < x.size(); ++d) x[d] = (x[d] * factor) * weights[d];
  }
  for (std::size_t i = 0; i < angles.cosines.size(); ++i) {
    const auto [at_a, at_b] = pair_of(rotary, i);
    const float a = x[at_a];
    const float b = x[at_b];
    x[at_a] = a * angles.cosines[i] - b * angles.sines[i];
    x[at_b] = b * angles.cosines[i] + a * angles.sines[i];
  }
  for (float& value : x) value = std::isnan(value) ? std::bit_cast<float>(0x7fc00000u) : value;
  return x;
}

/// The values of one head.
[[nodiscard]] inline std::vector<float> head_values(const const_tensor_view& rows, std::int64_t token,
                                                    std::int32_t head) {
  std::vector<float> values;
  for (std::int32_t d = 0; d < rows.head_dim; ++d) {
    values.push_back(load_element(rows.data, rows.type, row_index(rows, token, head, d)));
  }
  return values;
}

/// The whole call by the promised arithmetic: all pointers of `params` are to host memory.
inline void oracle_rotate_append(const rotate_append_params& params) {
  const append_params& stored = params.append;
  const const_tensor_view& k = stored.k;
  std::vector<float> rotated;  // [num_tokens, num_kv_heads, head_dim]
  for (std::int64_t token = 0; token < k.num_tokens; ++token) {
    const oracle_angles angles = angles_of(params.rotary, k.num_tokens, token);
    for (std::int32_t head = 0; head < k.num_heads; ++head) {
      const std::vector<float> values = promised_rotate(head_values(k, token, head), params.rotary, angles,
                                                        params.norm.k_weight, params.norm.epsilon);
      rotated.insert(rotated.end(), values.begin(), values.end());
    }
    for (std::int32_t head = 0; head < params.q.num_heads; ++head) {
      const std::vector<float> values = promised_rotate(head_values(params.q, token, head), params.rotary, angles,
                                                        params.norm.q_weight, params.norm.epsilon);
      for (std::int32_t d = 0; d < k.head_dim; ++d) {
        store_element(params.q_out.data, params.q_out.type, row_index(params.q_out, token, head, d),
                      values[static_cast<std::size_t>(d)]);
      }
    }
  }
  kv_cache_view k_alone = stored.kv;
  k_alone.layout.v_in_k = true;
  const const_tensor_view rows =
      dense_view<const void>(rotated.data(), dtype::f32, k.num_tokens, k.num_heads, k.head_dim);
  oracle_code_transfer<true>(k_alone, rows, const_tensor_view{}, stored.slot_mapping);
  if (stored.kv.layout.v_in_k) return;
  // A layout whose K is V stores V alone.
  kv_cache_view v_alone = stored.kv;
  v_alone.layout.v_in_k = true;
  v_alone.layout.k = stored.kv.layout.v;
  v_alone.k = stored.kv.v;
  v_alone.k_scales = stored.kv.v_scales;
  oracle_code_transfer<true>(v_alone, stored.v, const_tensor_view{}, stored.slot_mapping);
}

}  // namespace bifolio::test

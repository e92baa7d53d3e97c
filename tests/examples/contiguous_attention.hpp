// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention of one sequence over keys and values that follow one another, rotations and norms included, in float64:
/// what the paged cache is checked against, and what lets the model be checked without it.

#include <algorithm>
#include <cmath>
#include <vector>

#include "llama.hpp"
#include "reference/rotate_oracle.hpp"

namespace bifolio::test {

class contiguous_attention final : public generate::attention_layer {
 public:
  void run(std::int32_t layer, const generate::layer_rows& rows) override {
    if (layers_.size() <= static_cast<std::size_t>(layer)) layers_.resize(static_cast<std::size_t>(layer) + 1);
    cache& c = layers_[static_cast<std::size_t>(layer)];
    for (std::int64_t t = 0; t < rows.q.num_tokens; ++t) {
      const oracle_angles angles = angles_of(rows.rotary, rows.q.num_tokens, t);
      const auto rotated = [&](const const_tensor_view& x, std::int32_t h, const float* weights) {
        const std::vector<float> values = head_values(x, t, h);
        return oracle_rotate({values.begin(), values.end()}, rows.rotary, angles, weights, rows.norm.epsilon);
      };
      for (std::int32_t h = 0; h < rows.k.num_heads; ++h) {
        const std::vector<double> k = rotated(rows.k, h, rows.norm.k_weight);
        const std::vector<float> v = head_values(rows.v, t, h);
        c.k.insert(c.k.end(), k.begin(), k.end());
        c.v.insert(c.v.end(), v.begin(), v.end());
      }
      for (std::int32_t h = 0; h < rows.q.num_heads; ++h) {
        attend(c, rotated(rows.q, h, rows.norm.q_weight), rows, t, h);
      }
    }
  }

 private:
  struct cache {
    std::vector<double> k;  // [num_tokens, num_kv_heads, head_dim]
    std::vector<double> v;
  };

  static void attend(const cache& c, const std::vector<double>& q, const generate::layer_rows& rows, std::int64_t t,
                     std::int32_t h) {
    const std::size_t dim = q.size();
    const std::size_t row = dim * static_cast<std::size_t>(rows.k.num_heads);
    const std::size_t first = dim * static_cast<std::size_t>(h / (rows.q.num_heads / rows.k.num_heads));
    const std::size_t num_tokens = c.k.size() / row;
    std::vector<double> weights(num_tokens);
    for (std::size_t j = 0; j < num_tokens; ++j) {
      for (std::size_t i = 0; i < dim; ++i) weights[j] += q[i] * c.k[j * row + first + i];
      weights[j] /= std::sqrt(static_cast<double>(dim));
    }
    const double largest = *std::max_element(weights.begin(), weights.end());
    double sum = 0;
    for (double& w : weights) sum += w = std::exp(w - largest);
    float* result = static_cast<float*>(rows.out.data) + t * rows.out.token_stride + h * rows.out.head_stride;
    for (std::size_t i = 0; i < dim; ++i) {
      double value = 0;
      for (std::size_t j = 0; j < num_tokens; ++j) value += weights[j] * c.v[j * row + first + i];
      result[i] = static_cast<float>(value / sum);
    }
  }

  std::vector<cache> layers_;
};

}  // namespace bifolio::test

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Attention of one sequence over keys and values that follow one another, in float64: what the paged cache is
/// checked against, and what lets the model be checked without it.

#include <algorithm>
#include <cmath>
#include <vector>

#include "llama.hpp"

namespace bifolio::test {

class contiguous_attention final : public generate::attention_layer {
 public:
  void run(std::int32_t layer, const const_tensor_view& q, const const_tensor_view& k, const const_tensor_view& v,
           const tensor_view& out) override {
    if (layers_.size() <= static_cast<std::size_t>(layer)) layers_.resize(static_cast<std::size_t>(layer) + 1);
    cache& c = layers_[static_cast<std::size_t>(layer)];
    for (std::int64_t t = 0; t < q.num_tokens; ++t) {
      append(k, t, c.k);
      append(v, t, c.v);
      for (std::int32_t h = 0; h < q.num_heads; ++h) attend(c, q, k, out, t, h);
    }
  }

 private:
  struct cache {
    std::vector<float> k;  // [num_tokens, num_kv_heads, head_dim]
    std::vector<float> v;
  };

  static const float* head(const const_tensor_view& x, std::int64_t t, std::int32_t h) {
    return static_cast<const float*>(x.data) + t * x.token_stride + h * x.head_stride;
  }

  static void append(const const_tensor_view& x, std::int64_t t, std::vector<float>& to) {
    for (std::int32_t h = 0; h < x.num_heads; ++h) to.insert(to.end(), head(x, t, h), head(x, t, h) + x.head_dim);
  }

  static void attend(const cache& c, const const_tensor_view& q, const const_tensor_view& k, const tensor_view& out,
                     std::int64_t t, std::int32_t h) {
    const auto dim = static_cast<std::size_t>(q.head_dim);
    const std::size_t row = dim * static_cast<std::size_t>(k.num_heads);
    const std::size_t first = dim * static_cast<std::size_t>(h / (q.num_heads / k.num_heads));
    const std::size_t num_tokens = c.k.size() / row;
    std::vector<double> weights(num_tokens);
    for (std::size_t j = 0; j < num_tokens; ++j) {
      for (std::size_t i = 0; i < dim; ++i) {
        weights[j] += static_cast<double>(head(q, t, h)[i]) * static_cast<double>(c.k[j * row + first + i]);
      }
      weights[j] /= std::sqrt(static_cast<double>(dim));
    }
    const double largest = *std::max_element(weights.begin(), weights.end());
    double sum = 0;
    for (double& w : weights) sum += w = std::exp(w - largest);
    float* result = static_cast<float*>(out.data) + t * out.token_stride + h * out.head_stride;
    for (std::size_t i = 0; i < dim; ++i) {
      double value = 0;
      for (std::size_t j = 0; j < num_tokens; ++j) value += weights[j] * static_cast<double>(c.v[j * row + first + i]);
      result[i] = static_cast<float>(value / sum);
    }
  }

  std::vector<cache> layers_;
};

}  // namespace bifolio::test

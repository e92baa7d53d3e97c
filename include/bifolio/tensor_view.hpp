// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Borrowed rows of K, V, queries or outputs: shape [num_tokens, num_heads, head_dim], elements of a head contiguous,
/// tokens and heads at any element stride, so that a slice of a fused QKV projection needs no copy.

#include <bifolio/dtype.hpp>
#include <cstdint>

namespace bifolio {

template <class Void>
struct basic_tensor_view {
  Void* data = nullptr;  ///< [num_tokens, num_heads, head_dim]; may be null when num_tokens is 0
  dtype type = dtype::f32;
  std::int64_t num_tokens = 0;
  std::int32_t num_heads = 0;
  std::int32_t head_dim = 0;
  std::int64_t token_stride = 0;  ///< elements from a token to the next
  std::int64_t head_stride = 0;   ///< elements from a head to the next
};

using tensor_view = basic_tensor_view<void>;
using const_tensor_view = basic_tensor_view<const void>;

/// A dense view: token_stride = num_heads · head_dim, head_stride = head_dim.
template <class Void>
[[nodiscard]] constexpr basic_tensor_view<Void> dense_view(Void* data, dtype type, std::int64_t num_tokens,
                                                           std::int32_t num_heads, std::int32_t head_dim) noexcept {
  return {data, type, num_tokens, num_heads, head_dim, static_cast<std::int64_t>(num_heads) * head_dim, head_dim};
}

[[nodiscard]] constexpr const_tensor_view as_const(const tensor_view& view) noexcept {
  return {view.data, view.type, view.num_tokens, view.num_heads, view.head_dim, view.token_stride, view.head_stride};
}

}  // namespace bifolio

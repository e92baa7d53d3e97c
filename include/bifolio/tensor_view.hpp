// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Borrowed rows of K, V, queries or outputs: shape [num_tokens, num_heads, head_dim], elements of a head contiguous,
/// tokens and heads at any element stride, so that a slice of a fused QKV projection needs no copy.

#include <bifolio/dtype.hpp>
#include <cstdint>
#include <type_traits>
#if __has_include(<stdfloat>)
#include <stdfloat>
#endif

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

  /// What is written may be read.
  template <class To>
  requires(!std::is_const_v<Void> && std::is_same_v<To, basic_tensor_view<const void>>) constexpr operator To()
      const noexcept {  // NOLINT: implicit on purpose
    return {data, type, num_tokens, num_heads, head_dim, token_stride, head_stride};
  }
};

using tensor_view = basic_tensor_view<void>;
using const_tensor_view = basic_tensor_view<const void>;

/// A dense view: token_stride = num_heads · head_dim, head_stride = head_dim.
template <class Void>
[[nodiscard]] constexpr basic_tensor_view<Void> dense_view(Void* data, dtype type, std::int64_t num_tokens,
                                                           std::int32_t num_heads, std::int32_t head_dim) noexcept {
  return {data, type, num_tokens, num_heads, head_dim, static_cast<std::int64_t>(num_heads) * head_dim, head_dim};
}

/// The dtype of a C++ type whose elements lie in memory as one of the table does: the storage types themselves and,
/// where the compiler has them, _Float16, std::float16_t and std::bfloat16_t. Specialise it for others, such as
/// `template <> inline constexpr dtype bifolio::element_type<__half> = dtype::f16;`.
template <class Element>
inline constexpr dtype element_type = dtype_of<Element>;
// GCC 12 has it in C++ on x86 alone, and the macro elsewhere too.
#if defined(__FLT16_MAX__) && !defined(__CUDACC__) && (defined(__x86_64__) || defined(__clang__) || __GNUC__ >= 13)
__extension__ template <>
inline constexpr dtype element_type<_Float16> = dtype::f16;
#endif
#ifdef __STDCPP_BFLOAT16_T__
template <>
inline constexpr dtype element_type<std::bfloat16_t> = dtype::bf16;
#endif

/// The same with the dtype of the pointer: dense_view(rows.data(), 100, 8, 128).
template <class Element>
requires(!std::is_void_v<Element>)
    [[nodiscard]] constexpr auto dense_view(Element* data, std::int64_t num_tokens, std::int32_t num_heads,
                                            std::int32_t head_dim) noexcept {
  using pointee = std::conditional_t<std::is_const_v<Element>, const void, void>;
  return dense_view<pointee>(data, element_type<std::remove_cv_t<Element>>, num_tokens, num_heads, head_dim);
}

[[nodiscard]] constexpr const_tensor_view as_const(const tensor_view& view) noexcept { return view; }

}  // namespace bifolio

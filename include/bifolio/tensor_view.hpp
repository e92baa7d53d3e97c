// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Borrowed rows of K, V, queries or outputs: shape [num_tokens, num_heads, head_dim], elements of a head contiguous,
/// tokens and heads at any element stride, so that a slice of a fused QKV projection needs no copy.

#include <bifolio/dtype.hpp>
#include <cstdint>
#include <span>
#include <type_traits>
#include <version>
#if __has_include(<stdfloat>)
#include <stdfloat>
#endif
#ifdef __cpp_lib_mdspan
#include <mdspan>
#endif

// Those of CUDA, whose headers are not needed here.
struct __half;         // NOLINT(bugprone-reserved-identifier)
struct __nv_bfloat16;  // NOLINT(bugprone-reserved-identifier)

namespace bifolio::inline v0_2 {

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

/// The dtype of a C++ type whose elements lie in memory as one of the table does: the storage types themselves, CUDA's
/// __half and __nv_bfloat16 and, where the compiler has them, _Float16, std::float16_t and std::bfloat16_t. Specialise
/// it for others, such as `template <> inline constexpr dtype bifolio::element_type<my_half> = dtype::f16;`.
template <class Element>
inline constexpr dtype element_type = dtype_of<Element>;
template <>
inline constexpr dtype element_type<__half> = dtype::f16;
template <>
inline constexpr dtype element_type<__nv_bfloat16> = dtype::bf16;
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

/// The same of all whole tokens in the span.
template <class Element>
[[nodiscard]] constexpr auto dense_view(std::span<Element> rows, std::int32_t num_heads,
                                        std::int32_t head_dim) noexcept {
  const std::int64_t token = static_cast<std::int64_t>(num_heads) * head_dim;
  const std::int64_t num_tokens = token > 0 ? static_cast<std::int64_t>(rows.size()) / token : 0;
  return dense_view(rows.data(), num_tokens, num_heads, head_dim);
}

#ifdef __cpp_lib_mdspan
/// [num_tokens, num_heads, head_dim], elements of a head contiguous (which is not checked), other strides as they are.
template <class Element, class Extents, class Layout>
[[nodiscard]] constexpr auto view_of(const std::mdspan<Element, Extents, Layout>& rows) noexcept {
  static_assert(Extents::rank() == 3, "[num_tokens, num_heads, head_dim]");
  auto view = dense_view(rows.data_handle(), static_cast<std::int64_t>(rows.extent(0)),
                         static_cast<std::int32_t>(rows.extent(1)), static_cast<std::int32_t>(rows.extent(2)));
  view.token_stride = static_cast<std::int64_t>(rows.stride(0));
  view.head_stride = static_cast<std::int64_t>(rows.stride(1));
  return view;
}
#endif

[[nodiscard]] constexpr const_tensor_view as_const(const tensor_view& view) noexcept { return view; }

}  // namespace bifolio::inline v0_2

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Rows of attention at input and output: elements of any dtype as floats and back, and merge_states, which combines
/// the results of two calls.

#include "common/attention/states.hpp"
#include "cpu/kernels/attention/kernels.hpp"
#include "cpu/kernels/attention/math.hpp"
#include "cpu/kernels/simd/simd.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {
namespace {

inline constexpr float minus_infinity = attn::minus_infinity<float>();

template <class T>
BIFOLIO_INLINE void widen_row(const void* src, std::int64_t offset, int count, float factor, float* dst) noexcept {
  const T* from = static_cast<const T*>(src) + offset;
  for (int i = 0; i < count; ++i) dst[i] = widen(from[i]) * factor;
}

void widen_any(dtype type, const void* src, std::int64_t offset, int count, float factor, float* dst) noexcept {
  visit_tensor_dtype(
      type, [&](auto traits) { widen_row<typename decltype(traits)::storage>(src, offset, count, factor, dst); });
}

/// Pairs of elements in 32 bits, the earlier one in the low half; a last element without a partner is paired with 0.
/// For instruction sets with dot products.
[[maybe_unused]] BIFOLIO_INLINE void pair_row(const bfloat16* from, int count, float* dst) noexcept {
  for (int i = 0; i < count; i += 2) {
    const std::uint32_t low = from[i].bits;
    const std::uint32_t high = i + 1 < count ? from[i + 1].bits : std::uint32_t{0};
    dst[i / 2] = __builtin_bit_cast(float, low | (high << 16));
  }
}

template <class T>
BIFOLIO_INLINE void narrow_row(const float* src, int count, void* dst, std::int64_t offset) noexcept {
  T* to = static_cast<T*>(dst) + offset;
  for (int i = 0; i < count; ++i) to[i] = narrow<T>(src[i]);
}

void narrow_any(dtype type, const float* src, int count, void* dst, std::int64_t offset) noexcept {
  visit_tensor_dtype(type,
                     [&](auto traits) { narrow_row<typename decltype(traits)::storage>(src, count, dst, offset); });
}

void merge_rows(const merge_params& params, std::int64_t begin, std::int64_t end) noexcept {
  const std::int32_t num_heads = params.out.num_heads;
  const std::int32_t head_dim = params.out.head_dim;
  constexpr int chunk = 64;
  for (std::int64_t row = begin; row < end; ++row) {
    const std::int64_t token = row / num_heads;
    const std::int64_t head = row % num_heads;
    const float a_lse = params.a.lse[row];
    const float b_lse = params.b.lse[row];
    const auto weights = attn::weights_of<scalar_math>(a_lse, b_lse);
    const std::int64_t a_offset = token * params.a.out.token_stride + head * params.a.out.head_stride;
    const std::int64_t b_offset = token * params.b.out.token_stride + head * params.b.out.head_stride;
    const std::int64_t out_offset = token * params.out.token_stride + head * params.out.head_stride;
    for (std::int32_t d = 0; d < head_dim; d += chunk) {
      const int count = head_dim - d < chunk ? head_dim - d : chunk;
      float a[chunk] = {};
      float b[chunk] = {};
      // A state without visible keys weighs nothing and is not read: its row may hold anything.
      if (!(a_lse == minus_infinity)) widen_any(params.a.out.type, params.a.out.data, a_offset + d, count, 1.0f, a);
      if (!(b_lse == minus_infinity)) widen_any(params.b.out.type, params.b.out.data, b_offset + d, count, 1.0f, b);
      for (int i = 0; i < chunk; ++i) a[i] = attn::merge_both<scalar_math>(weights, a[i], b[i]);
      narrow_any(params.out.type, a, count, params.out.data, out_offset + d);
    }
    if (params.lse != nullptr) params.lse[row] = weights.lse;
  }
}

}  // namespace
}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

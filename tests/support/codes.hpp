// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The codes of planes, and layouts for them.

#include <bifolio/kv_layout.hpp>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace bifolio::test {

/// All codes that a plane may have.
[[nodiscard]] inline const std::vector<kv_code>& all_codes() {
  using g = scale_granularity;
  static const std::vector<kv_code> codes = {{dtype::f32},
                                             {dtype::f16},
                                             {dtype::bf16},
                                             {dtype::e4m3},
                                             {dtype::e5m2},
                                             {dtype::e4m3, g::layer},
                                             {dtype::e5m2, g::layer},
                                             {dtype::i8, g::layer},
                                             {dtype::e4m3, g::head},
                                             {dtype::e5m2, g::head},
                                             {dtype::i8, g::head},
                                             {dtype::e4m3, g::token_head},
                                             {dtype::i8, g::token_head},
                                             {dtype::u8, g::token_head}};
  return codes;
}

/// The named layouts, and one made by hand: gaps after tokens, heads and blocks, tails by token.
enum class code_order : std::uint8_t { hnd, nhd, x_split, padded };
inline constexpr code_order all_code_orders[] = {code_order::hnd, code_order::nhd, code_order::x_split,
                                                 code_order::padded};

struct coded_shape {
  kv_code k;
  kv_code v;
  std::int32_t num_kv_heads = 0;
  std::int32_t qk_head_dim = 0;
  std::int32_t v_head_dim = 0;
  std::int32_t block_size = 0;
  bool v_in_k = false;
};

/// V with the code of K, or with another; of the same dims or fewer; as part of K.
inline constexpr std::size_t num_v_kinds = 4;

/// `k` and `v` are numbers of codes.
[[nodiscard]] inline coded_shape coded_shape_of(std::size_t k, std::size_t v, std::size_t v_kind, std::int32_t heads,
                                                std::int32_t dims, std::int32_t block_size) {
  coded_shape shape{all_codes()[k], all_codes()[v], heads, dims, dims, block_size};
  if (v_kind == 1) shape.v = shape.k;
  if (v_kind == 2) shape.v_head_dim = (2 * dims + 2) / 3;
  if (v_kind == 3) {
    shape.v_in_k = true;
    shape.v = shape.k;
    shape.v_head_dim = (dims + 1) / 2;
  }
  return shape;
}

[[nodiscard]] inline kv_layout coded_layout(code_order order, const coded_shape& s) {
  const layout_kind kind = order == code_order::nhd       ? layout_kind::nhd
                           : order == code_order::x_split ? layout_kind::x_split
                                                          : layout_kind::hnd;
  kv_layout layout = make_layout(kind, s.k, s.v, s.num_kv_heads, s.qk_head_dim, s.v_head_dim, s.block_size, s.v_in_k);
  if (order != code_order::padded) return layout;
  layout.kind = layout_kind::strided;
  for (kv_plane* plane : {&layout.k, &layout.v}) {
    kv_strides& strides = plane->strides;
    const std::int64_t step = plane->code.is_record() ? 4 : 1;  // records are aligned to their scales
    strides.token = plane->row_elements() + (plane->code.is_record() ? 4 : 3);
    strides.head = s.block_size * strides.token + step;
    strides.block = s.num_kv_heads * strides.head + 4;
    const std::int64_t entry = plane->code.tail_floats() * std::int64_t{4};
    if (entry == 0) continue;
    plane->tail.offset = (strides.block + 3) / 4 * 4 + 8;
    plane->tail.head = entry + 4;
    plane->tail.token = s.num_kv_heads * plane->tail.head + 4;
    strides.block = plane->tail.offset + s.block_size * plane->tail.token + 12;
  }
  if (s.v_in_k) {
    layout.v.strides = layout.k.strides;
    layout.v.tail = layout.k.tail;
  }
  return layout;
}

/// A scale with which numbers about N(0, 1) use the range of a code, a little different for each head.
[[nodiscard]] inline std::vector<float> ordinary_scales(const kv_code& code, std::int32_t num_kv_heads) {
  if (!code.has_static_scales()) return {};
  const float base = code.type == dtype::e4m3 ? 0.01f : code.type == dtype::e5m2 ? 8e-5f : 0.035f;
  const std::int32_t count = code.granularity == scale_granularity::head ? num_kv_heads : 1;
  std::vector<float> scales;
  for (std::int32_t i = 0; i < count; ++i) scales.push_back(base * (1.0f + 0.25f * static_cast<float>(i % 4)));
  return scales;
}

}  // namespace bifolio::test

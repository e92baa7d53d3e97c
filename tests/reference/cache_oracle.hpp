// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The cache calls done one element at a time, in the order of the lists, through `kv_strides::offset` and the
/// conversions of dtype.hpp alone (which dtype_test.cpp holds against an oracle of their own). Works on host bytes; the
/// caller keeps them in the same arrangement as the cache under test, so that everything that must not change is
/// compared as well.

#include <bifolio/dtype.hpp>
#include <bifolio/kv_layout.hpp>
#include <bifolio/step.hpp>
#include <bifolio/tensor_view.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "support/elements.hpp"

namespace bifolio::test {

/// Element `src_index` of `src` to element `dst_index` of `dst`: bits where the types are equal, else to nearest even,
/// saturated.
inline void oracle_move_element(void* dst, dtype dst_type, std::int64_t dst_index, const void* src, dtype src_type,
                                std::int64_t src_index) noexcept {
  auto* to = static_cast<std::byte*>(dst) + dst_index * static_cast<std::int64_t>(size_of(dst_type));
  const auto* from = static_cast<const std::byte*>(src) + src_index * static_cast<std::int64_t>(size_of(src_type));
  if (dst_type == src_type) {
    std::memcpy(to, from, size_of(dst_type));
    return;
  }
  store_element(to, dst_type, 0, load_element(from, src_type, 0));
}

/// Calls `body(head, dim)` for every element of one token in one plane.
template <class Body>
void for_each_element(const kv_layout& layout, const kv_plane& plane, const Body& body) {
  for (std::int32_t head = 0; head < layout.num_kv_heads; ++head) {
    for (std::int32_t dim = 0; dim < plane.head_dim; ++dim) body(head, dim);
  }
}

/// Calls `body(plane, is_k)` for the planes that are stored.
template <class Body>
void for_each_plane(const kv_layout& layout, const Body& body) {
  body(layout.k, true);
  if (!layout.v_in_k) body(layout.v, false);
}

template <class Void>
[[nodiscard]] std::int64_t row_index(const basic_tensor_view<Void>& rows, std::int64_t token, std::int32_t head,
                                     std::int32_t dim) {
  return token * rows.token_stride + head * rows.head_stride + dim;
}

/// Rows to slots, or back. `Rows` is const_tensor_view or tensor_view.
template <bool ToCache, class Rows>
void oracle_transfer(const kv_cache_view& kv, const Rows& k, const Rows& v, const std::int64_t* slots) {
  const kv_layout& layout = kv.layout;
  for (std::int64_t i = 0; i < k.num_tokens; ++i) {
    if (slots[i] < 0) continue;
    const block_id block{static_cast<std::int32_t>(slots[i] / layout.block_size)};
    const auto token = static_cast<std::int32_t>(slots[i] % layout.block_size);
    for_each_plane(layout, [&](const kv_plane& plane, bool is_k) {
      void* const cache = is_k ? kv.k : kv.v;
      const Rows& rows = is_k ? k : v;
      for_each_element(layout, plane, [&](std::int32_t h, std::int32_t d) {
        const std::int64_t stored = plane.strides.offset(block, h, token, d);
        if constexpr (ToCache) {
          oracle_move_element(cache, plane.code.type, stored, rows.data, rows.type, row_index(rows, i, h, d));
        } else {
          oracle_move_element(rows.data, rows.type, row_index(rows, i, h, d), cache, plane.code.type, stored);
        }
      });
    });
  }
}

inline void oracle_append(const kv_cache_view& kv, const const_tensor_view& k, const const_tensor_view& v,
                          const std::int64_t* slots) {
  oracle_transfer<true>(kv, k, v, slots);
}

inline void oracle_gather(const kv_cache_view& kv, const tensor_view& k, const tensor_view& v,
                          const std::int64_t* slots) {
  oracle_transfer<false>(kv, k, v, slots);
}

/// Blocks from `src` to `dst`, which may be the same cache; pair after pair.
inline void oracle_move_blocks(const kv_cache_view& src, const kv_cache_view& dst, std::span<const block_copy> copies) {
  for (const block_copy& copy : copies) {
    for (std::int32_t token = 0; token < src.layout.block_size; ++token) {
      for_each_plane(src.layout, [&](const kv_plane& from, bool is_k) {
        const kv_plane& to = is_k ? dst.layout.k : dst.layout.v;
        for_each_element(src.layout, from, [&](std::int32_t h, std::int32_t d) {
          oracle_move_element(is_k ? dst.k : dst.v, to.code.type, to.strides.offset(copy.dst, h, token, d),
                              is_k ? src.k : src.v, from.code.type, from.strides.offset(copy.src, h, token, d));
        });
      });
    }
  }
}

}  // namespace bifolio::test

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// One layer's cache as strides. A layer is one buffer of shape (2, num_blocks, block_size · num_kv_heads · head_dim),
/// the K plane before the V plane, on every device; the order inside a block is declared here and never implied.
///
///   hnd      K and V [num_kv_heads, block_size, head_dim]                    (default; one head of a block is one run)
///   nhd      K and V [block_size, num_kv_heads, head_dim]
///   x_split  K [num_kv_heads, head_dim / x, block_size, x], V [num_kv_heads, head_dim, block_size]   (vLLM's first
///   layout)
///            x = 16 bytes of elements, halved until it divides head_dim, so that every head_dim has an x_split
///   strided  anything else that `kv_strides` can say, e.g. all layers of a block side by side (block-major)
///
/// What every call asks of strides, of whatever kind: each is at least 1 where it is used, they nest (sorted by size,
/// each steps past everything the smaller ones reach, so that no two elements share a place), and chunk divides
/// head_dim.

#include <bifolio/dtype.hpp>
#include <bifolio/export.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <string_view>

namespace bifolio {

enum class layout_kind : std::uint8_t { hnd, nhd, x_split, strided };

/// "hnd", "nhd", "x_split" or "strided".
[[nodiscard]] BIFOLIO_API std::string_view to_string(layout_kind kind) noexcept;
/// Reads the first three. Throws `error` (invalid_argument).
[[nodiscard]] BIFOLIO_API layout_kind parse_layout(std::string_view text);

/// Where element (block, head, token, dim) of one plane lies, in elements from the start of that plane:
/// block·block + head·head + token·token + (dim / chunk)·chunk_stride + (dim % chunk)·dim.
struct kv_strides {
  std::int64_t block = 0;
  std::int64_t head = 0;
  std::int64_t token = 0;
  std::int64_t dim = 1;           ///< between dims of one chunk
  std::int64_t chunk_stride = 0;  ///< between chunks of dims
  std::int32_t chunk = 0;         ///< dims in a chunk; head_dim when the head is not split
  friend constexpr bool operator==(const kv_strides&, const kv_strides&) = default;

  [[nodiscard]] constexpr std::int64_t offset(block_id block_index, std::int32_t head_index, std::int32_t token_index,
                                              std::int32_t dim_index) const noexcept {
    return static_cast<std::int64_t>(to_index(block_index)) * block + head_index * head + token_index * token +
           (dim_index / chunk) * chunk_stride + (dim_index % chunk) * dim;
  }
};

struct kv_layout {
  layout_kind kind = layout_kind::hnd;
  dtype type = dtype::f32;
  std::int32_t num_kv_heads = 0;
  std::int32_t head_dim = 0;
  std::int32_t block_size = 0;  ///< tokens
  kv_strides k;
  kv_strides v;

  /// Elements of one block in one plane: block_size · num_kv_heads · head_dim.
  [[nodiscard]] constexpr std::int64_t block_elements() const noexcept {
    return static_cast<std::int64_t>(block_size) * num_kv_heads * head_dim;
  }
  /// Bytes of one block in one layer, K and V together.
  [[nodiscard]] constexpr std::int64_t block_bytes() const noexcept {
    return 2 * block_elements() * static_cast<std::int64_t>(size_of(type));
  }
  friend constexpr bool operator==(const kv_layout&, const kv_layout&) = default;
};

/// One of the three named layouts. Throws `error`: invalid_argument when a number is below 1 or a block's bytes exceed
/// 2^40, or `kind` is strided.
[[nodiscard]] BIFOLIO_API kv_layout make_layout(layout_kind kind, dtype type, std::int32_t num_kv_heads,
                                                std::int32_t head_dim, std::int32_t block_size);

/// One layer's storage, borrowed: base pointers of the two planes and how to read them.
struct kv_cache_view {
  void* k = nullptr;  ///< [num_blocks, …] in the order of layout.k
  void* v = nullptr;  ///< [num_blocks, …] in the order of layout.v
  std::int64_t num_blocks = 0;
  kv_layout layout;
};

/// Blocks that hold `num_tokens` ≥ 0 tokens, in 64 bits and without wrapping.
[[nodiscard]] constexpr std::int64_t blocks_for(std::int64_t num_tokens, std::int32_t block_size) noexcept {
  return num_tokens / block_size + (num_tokens % block_size != 0 ? 1 : 0);
}
/// Where the token at `offset` of `block` lives, in 64 bits.
[[nodiscard]] constexpr slot_id make_slot(block_id block, std::int32_t offset, std::int32_t block_size) noexcept {
  return slot_id{static_cast<std::int64_t>(to_index(block)) * block_size + offset};
}

}  // namespace bifolio

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// One layer's cache: a K plane and a V plane, each with a code (how its elements are stored), a head dimension and
/// strides of its own. The planes are num_blocks blocks each and lie one after the other, K first, on every device; the
/// order inside a block is declared here and never implied. With equal codes and head dimensions a layer is a buffer of
/// shape (2, num_blocks, block_size · num_kv_heads · head_dim).
///
///   hnd      K and V [num_kv_heads, block_size, head_dim]                    (default; one head of a block is one run)
///   nhd      K and V [block_size, num_kv_heads, head_dim]
///   x_split  K [num_kv_heads, head_dim / x, block_size, x], V [num_kv_heads, head_dim, block_size]   (vLLM's first
///   layout)
///            x = 16 bytes of elements, halved until it divides head_dim, so that every head_dim has an x_split
///   strided  anything else that `kv_strides` can say, e.g. all layers of a block side by side (block-major)
///
/// With `v_in_k` (multi-head latent attention) V is the first v.head_dim dims of K and is stored once: there is no V
/// plane, and v.strides are those of K.
///
/// What every call asks of strides, of whatever kind: each is at least 1 where it is used, they nest (sorted by size,
/// each steps past everything the smaller ones reach, so that no two elements share a place), and chunk divides
/// head_dim (with v_in_k: that of K).

#include <bifolio/dtype.hpp>
#include <bifolio/export.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <string>
#include <string_view>

namespace bifolio::inline v0_2 {

enum class layout_kind : std::uint8_t { hnd, nhd, x_split, strided };

/// "hnd", "nhd", "x_split" or "strided".
[[nodiscard]] BIFOLIO_API std::string_view to_string(layout_kind kind) noexcept;
/// Reads the first three. Throws `error` (invalid_argument).
[[nodiscard]] BIFOLIO_API layout_kind parse_layout(std::string_view text);

/// How many elements share a scale. Scales of token_head belong to one token of one head, are computed by what stores
/// it and are stored in the tail of the token's block and plane; those of a layer or a head are static: numbers of the
/// engine's configuration, which calls receive next to the planes (`kv_cache_view`). Those of a record are part of a
/// token's row (`kv_record`).
enum class scale_granularity : std::uint8_t { none, layer, head, token_head, record };

/// "none", "layer", "head", "token_head" or "record".
[[nodiscard]] BIFOLIO_API std::string_view to_string(scale_granularity granularity) noexcept;

/// How a plane stores its elements. `value` is what attention, `gather` and `convert_blocks` read:
///
///   f32, f16, bf16    none           value = element
///   e4m3, e5m2        none           value = element, as with a scale of 1
///   e4m3, e5m2, i8    layer, head    value = code · scale,         code = x · (1 / scale)
///   e4m3, i8          token_head     value = code · scale,         code = x · (Q / a)
///   u8                token_head     value = code · scale + zero,  code = (x − zero) · (255 / range)
///   e4m3              record         see `kv_record`
///
/// Codes are rounded and saturated as dtype.hpp says; every other operation is one float32 rounding. Over the dims of
/// the token and head, a = max|x|, scale = a / Q with Q = 448 (e4m3) or 127 (i8); zero = min x, range = max x − min x,
/// scale = range / 255. Where a or range is below 2^-100 the scale is 0 and so are the codes. If any x is not finite,
/// or range overflows, scale and zero are NaN, for this token and head alone, and the codes 0. No scale spans tokens.
struct kv_code {
  dtype type = dtype::f32;
  scale_granularity granularity = scale_granularity::none;
  dtype scale_type = dtype::f32;  ///< of no meaning without scales; f32 is the only one

  /// Floats per (token, head) in the tail of a block: the scale and, for u8, the zero point after it.
  [[nodiscard]] constexpr std::int32_t tail_floats() const noexcept {
    if (granularity != scale_granularity::token_head) return 0;
    return type == dtype::u8 ? 2 : 1;
  }
  /// Whether a token's row is a `kv_record`.
  [[nodiscard]] constexpr bool is_record() const noexcept { return granularity == scale_granularity::record; }
  /// Whether the scales are numbers of the configuration.
  [[nodiscard]] constexpr bool has_static_scales() const noexcept {
    return granularity == scale_granularity::layer || granularity == scale_granularity::head;
  }
  friend constexpr bool operator==(const kv_code&, const kv_code&) = default;
};

/// The row of one token of multi-head latent attention with a code of granularity `record`, 656 bytes, which are those
/// of FlashMLA's cache in 8 bits: 512 latent dims in e4m3, then a float32 scale for each 128 of them, then 64 rotated
/// dims in bfloat16. K has head_dim 576, V is its first 512 dims (`v_in_k`); there is one such row per KV head.
///
/// value = code · scale and code = x / scale, where scale is the least power of two that is not below a / 448, of
/// a = max|x| over the 128 dims, nor below 0.0001. (Any finite scale is read.) If any of the 128 x is not finite, their
/// scale is NaN and their codes are 0. The rotated dims are stored as a plane of bfloat16 stores them, NaN canonical.
struct kv_record {
  static constexpr std::int32_t head_dim = 576;
  static constexpr std::int32_t v_head_dim = 512;
  static constexpr std::int32_t dims_per_scale = 128;
  static constexpr std::int32_t num_scales = 4;
  static constexpr std::int32_t rotated_dims = 64;
  static constexpr std::int64_t scales_offset = 512;  ///< bytes, as the next
  static constexpr std::int64_t rotated_offset = 528;
  static constexpr std::int64_t bytes = 656;
};

/// Static scales are in [least_scale, largest_scale].
inline constexpr float least_scale = 0x1p-100f;
inline constexpr float largest_scale = 0x1p100f;

/// A code by the name that programs take: f32, f16, bf16; e4m3, e5m2, i8 with a static scale per layer; e4m3-head,
/// e5m2-head, i8-head with one per KV head; e4m3-token, i8-token, u8-token with one per token and head; e4m3-record;
/// e4m3-unscaled, e5m2-unscaled. Throws `error` (invalid_argument).
[[nodiscard]] BIFOLIO_API kv_code parse_kv_code(std::string_view text);
/// Its inverse; "unknown" for what has no name.
[[nodiscard]] BIFOLIO_API std::string_view short_name(const kv_code& code) noexcept;

/// The type, with scales "<type>, scale per <granularity> (<scale type>)".
[[nodiscard]] BIFOLIO_API std::string to_string(const kv_code& code);

/// Where element (block, head, token, dim) of one plane lies, in elements from the start of that plane:
/// block·block + head·head + token·token + (dim / chunk)·chunk_stride + (dim % chunk)·dim. Of a `kv_record` this is
/// where a latent dim lies; it is in one chunk, with dim 1.
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

/// Where the scales of a plane with a scale per token and head lie: those of (block, head, token) begin `offset` +
/// head·head + token·token bytes after the start of the block, which is strides.block elements after that of the block
/// before. They lie behind the elements of the block, so that a block is one range of bytes.
struct kv_tail_strides {
  std::int64_t offset = 0;
  std::int64_t head = 0;
  std::int64_t token = 0;
  friend constexpr bool operator==(const kv_tail_strides&, const kv_tail_strides&) = default;
};

/// K or V of a layer.
struct kv_plane {
  kv_code code{};
  std::int32_t head_dim = 0;
  kv_strides strides{};
  kv_tail_strides tail{};  ///< of no meaning for codes without scales per token and head
  /// What the row of a token and head takes if its dims are side by side, in elements of `code.type`.
  [[nodiscard]] constexpr std::int64_t row_elements() const noexcept {
    return code.is_record() ? kv_record::bytes : head_dim;
  }
  friend constexpr bool operator==(const kv_plane&, const kv_plane&) = default;
};

struct kv_layout {
  layout_kind kind = layout_kind::hnd;
  std::int32_t num_kv_heads = 0;
  std::int32_t block_size = 0;  ///< tokens
  kv_plane k{};
  kv_plane v{};
  bool v_in_k = false;  ///< V is the first v.head_dim dims of K

  /// Elements of one block of a plane: block_size · num_kv_heads · head_dim.
  [[nodiscard]] constexpr std::int64_t block_elements(const kv_plane& plane) const noexcept {
    return static_cast<std::int64_t>(block_size) * num_kv_heads * plane.head_dim;
  }
  /// Bytes of the elements of one block of a plane, or of its records.
  [[nodiscard]] constexpr std::int64_t block_payload_bytes(const kv_plane& plane) const noexcept {
    return static_cast<std::int64_t>(block_size) * num_kv_heads * plane.row_elements() *
           static_cast<std::int64_t>(size_of(plane.code.type));
  }
  /// Where make_layout puts the tail: behind the elements, on a line of 64 bytes.
  [[nodiscard]] constexpr std::int64_t block_tail_offset(const kv_plane& plane) const noexcept {
    return (block_payload_bytes(plane) + 63) / 64 * 64;
  }
  /// Bytes of the scales at the end of one block of a plane: [num_kv_heads, block_size, tail_floats]. None for codes
  /// without scales per token and head.
  [[nodiscard]] constexpr std::int64_t block_tail_bytes(const kv_plane& plane) const noexcept {
    return static_cast<std::int64_t>(block_size) * num_kv_heads * plane.code.tail_floats() *
           static_cast<std::int64_t>(sizeof(float));
  }
  /// Bytes of one block of a plane that is stored: its elements, then the tail, where there is one, and then up to a
  /// multiple of 128. Every other size of a cache follows from this one.
  [[nodiscard]] constexpr std::int64_t block_bytes(const kv_plane& plane) const noexcept {
    const std::int64_t tail = block_tail_bytes(plane);
    if (tail == 0) return block_payload_bytes(plane);
    return (block_tail_offset(plane) + tail + 127) / 128 * 128;
  }
  /// Bytes of one block in one layer: of K, and of V unless it is part of K.
  [[nodiscard]] constexpr std::int64_t block_bytes() const noexcept {
    return block_bytes(k) + (v_in_k ? 0 : block_bytes(v));
  }
  friend constexpr bool operator==(const kv_layout&, const kv_layout&) = default;
};

/// One of the three named layouts, K and V of one unscaled code and head dimension. Throws `error` as below.
[[nodiscard]] BIFOLIO_API kv_layout make_layout(layout_kind kind, dtype type, std::int32_t num_kv_heads,
                                                std::int32_t head_dim, std::int32_t block_size);

/// The same with a code and a head dimension per plane. Throws `error`: invalid_argument when a number is below 1, a
/// block's bytes exceed 2^40, `kind` is strided, or, with `v_in_k`, V has more dims than K or another code,
/// or planes of records are not what `kv_record` says, or in x_split; unsupported for a code that the table at
/// `kv_code` does not have.
[[nodiscard]] BIFOLIO_API kv_layout make_layout(layout_kind kind, kv_code k, kv_code v, std::int32_t num_kv_heads,
                                                std::int32_t qk_head_dim, std::int32_t v_head_dim,
                                                std::int32_t block_size, bool v_in_k = false);

/// One layer's storage, borrowed: base pointers of the two planes and how to read them.
struct kv_cache_view {
  void* k = nullptr;  ///< [num_blocks, …] in the order of layout.k
  void* v = nullptr;  ///< [num_blocks, …] in the order of layout.v; not looked at when layout.v_in_k
  std::int64_t num_blocks = 0;
  kv_layout layout;
  /// Static scales of K, on the device: one, or one per KV head, as the code says; else not looked at.
  const float* k_scales = nullptr;
  const float* v_scales = nullptr;  ///< of V; not looked at when layout.v_in_k

  /// Where V is: k when it is part of K.
  [[nodiscard]] constexpr void* v_data() const noexcept { return layout.v_in_k ? k : v; }
};

/// Blocks that hold `num_tokens` ≥ 0 tokens, in 64 bits and without wrapping.
[[nodiscard]] constexpr std::int64_t blocks_for(std::int64_t num_tokens, std::int32_t block_size) noexcept {
  return num_tokens / block_size + (num_tokens % block_size != 0 ? 1 : 0);
}
/// Where the token at `offset` of `block` lives, in 64 bits.
[[nodiscard]] constexpr slot_id make_slot(block_id block, std::int32_t offset, std::int32_t block_size) noexcept {
  return slot_id{static_cast<std::int64_t>(to_index(block)) * block_size + offset};
}

}  // namespace bifolio::inline v0_2

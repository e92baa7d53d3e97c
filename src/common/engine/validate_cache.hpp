// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The checks of the cache calls, one place for every backend: what a call refuses it refuses here, before anything is
/// written. Nothing is dereferenced but slot_mapping and the lists of copies. A check returns the code and, when the
/// caller gives a string, a sentence; without one nothing is allocated.
///
///   null where rows, slots, blocks or static scales are to be touched; a pointer not aligned to
///   its element, or, of a plane with a tail, to its scales                                       invalid_argument
///   counts below their least value, unknown dtypes, strides that do not nest (kv_layout.hpp),
///   spans past 2^62 bytes, more blocks than a block_id can name                                  invalid_argument
///   heads, head_dim, block_size, dtypes, numbers of layers that should be equal and are not      invalid_argument
///   V as part of K (v_in_k) with strides or a code of its own or more dims, rows of v for it     invalid_argument
///   sources and destinations, or the K and V planes, that share memory                           invalid_argument
///   a code that is not in the table at kv_code                                                   unsupported
///   a slot or a block id past the end of the cache, a negative block id                          out_of_range

#include <bifolio/backend.hpp>
#include <bifolio/error.hpp>
#include <bifolio/kv_layout.hpp>
#include <bifolio/step.hpp>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "common/base/footprint.hpp"
#include "common/engine/refusal.hpp"

namespace bifolio::inline v0_2::validate {

/// Largest number of blocks: every id fits a block_id and is smaller than a padding entry.
inline constexpr std::int64_t max_num_blocks = padding_entry;

/// Elements from the first to one past the last of a stored plane of `num_blocks` ≥ 0 blocks; −1 when `strides` do not
/// nest or the span exceeds `max_span_bytes`. The numbers in `layout` may be anything.
[[nodiscard]] std::int64_t plane_span(const kv_layout& layout, const kv_plane& plane, std::int64_t num_blocks) noexcept;

/// The numbers, the codes and the strides of both planes.
[[nodiscard]] errc check(const kv_layout& layout, std::int64_t num_blocks) noexcept;

/// One layer's view for calls that only read it: its layout and its pointers.
[[nodiscard]] errc check_readable(const kv_cache_view& view) noexcept;
/// The same with a sentence, in which the view is called `name`.
[[nodiscard]] errc check_readable(const kv_cache_view& view, std::string_view name, const refusal& refuse);

/// The same, and that K and V are apart, unless V is part of K.
[[nodiscard]] errc check(const kv_cache_view& view, std::string_view name, const refusal& refuse);

/// Whether blocks hold the same: heads, head dims, block_size, and V as part of K or not.
[[nodiscard]] bool same_shape(const kv_layout& a, const kv_layout& b) noexcept;

/// Whether the order inside a block is the same, so that blocks may be moved byte for byte; what is between blocks
/// may differ.
[[nodiscard]] bool same_block_order(const kv_layout& a, const kv_layout& b) noexcept;

[[nodiscard]] errc append(const append_params& params, std::string* sentence = nullptr);
[[nodiscard]] errc gather(const gather_params& params, std::string* sentence = nullptr);
/// The same where the host cannot read slot_mapping: kernels skip slots past the end of the cache.
[[nodiscard]] errc append_on_device(const append_params& params, std::string* sentence = nullptr);
[[nodiscard]] errc gather_on_device(const gather_params& params, std::string* sentence = nullptr);
[[nodiscard]] errc copy_blocks(std::span<const kv_cache_view> layers, std::span<const block_copy> copies,
                               std::string* sentence = nullptr);
[[nodiscard]] errc convert_blocks(const kv_cache_view& src, const kv_cache_view& dst,
                                  std::span<const block_copy> copies, std::string* sentence = nullptr);
[[nodiscard]] errc swap_blocks(std::span<const kv_cache_view> src, std::span<const kv_cache_view> dst,
                               std::span<const block_copy> copies, std::string* sentence = nullptr);

}  // namespace bifolio::inline v0_2::validate

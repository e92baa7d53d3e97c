// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The memory that the views of a call touch, and whether two of them surely share no byte. Address arithmetic alone:
/// nothing is dereferenced.

#include <bifolio/kv_layout.hpp>
#include <bifolio/tensor_view.hpp>
#include <cstddef>
#include <cstdint>

namespace bifolio::inline v0_2::validate {

/// Largest span of one plane of a layer, and of anything else.
inline constexpr std::int64_t max_span_bytes = std::int64_t{1} << 62;

/// One index of an array in memory: how many values it takes and how far apart they are, in bytes.
struct axis {
  std::int64_t count;
  std::int64_t stride;
};

/// Memory that a view touches: runs of `element` bytes along its axes with more than one value, by falling stride, and
/// its span in bytes.
struct footprint {
  const std::byte* base = nullptr;
  std::int64_t span = 0;
  std::int64_t element = 1;
  axis axes[5] = {};
  std::int32_t num_axes = 0;
};

/// One stored plane of a layer. False when a stride is below 1, the axes do not nest (two elements would share a
/// place), the chunk does not divide the head or the span passes the limit; and, for a plane with a tail, when its
/// scales do not nest, are not aligned, or do not lie between the elements of their block and the next block. The
/// blocks of such a plane count as whole.
[[nodiscard]] bool make_footprint(footprint& out, const void* base, const kv_layout& layout, const kv_plane& plane,
                                  std::int64_t num_blocks) noexcept;

/// Rows of a tensor; its counts are ≥ 1. False as above, but axes need to nest and strides to be above 0 only with
/// `must_nest`.
[[nodiscard]] bool make_footprint(footprint& out, const const_tensor_view& rows, bool must_nest) noexcept;

/// An array of `num_bytes` ≥ 1 without gaps.
[[nodiscard]] footprint flat_footprint(const void* base, std::int64_t num_bytes) noexcept;

/// Whether two footprints surely share no byte: their spans are apart, or they interleave (K and V of a block side by
/// side, layers of a block side by side): at some common stride both stay within their own part of each step.
[[nodiscard]] bool apart(const footprint& a, const footprint& b) noexcept;

}  // namespace bifolio::inline v0_2::validate

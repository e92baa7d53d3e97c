// SPDX-License-Identifier: Apache-2.0
#include "common/base/footprint.hpp"

#include <bifolio/dtype.hpp>

#include "common/base/kv_code.hpp"

namespace bifolio::inline v0_2::validate {
namespace {

/// Sorts `axis`es, whose strides are in units of `stride_unit` bytes, into `out` and computes the span. False when a
/// stride is below 1, the axes do not nest (two elements would share a place) or the span passes the limit. Counts are
/// ≥ 1.
bool add_axes(footprint& out, const axis* axes, std::int32_t num_axes, std::int64_t element_bytes, bool must_nest,
              std::int64_t stride_unit) noexcept {
  for (std::int32_t i = 0; i < num_axes; ++i) {
    if (axes[i].count < 2) continue;
    axis scaled = axes[i];
    if (scaled.stride < (must_nest ? 1 : 0)) return false;
    if (__builtin_mul_overflow(scaled.stride, stride_unit, &scaled.stride)) return false;
    std::int32_t at = out.num_axes++;
    for (; at > 0 && out.axes[at - 1].stride < scaled.stride; --at) out.axes[at] = out.axes[at - 1];
    out.axes[at] = scaled;
  }
  out.element = element_bytes;
  out.span = element_bytes;
  for (std::int32_t i = out.num_axes - 1; i >= 0; --i) {
    if (must_nest && out.axes[i].stride < out.span) return false;
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(out.axes[i].count - 1, out.axes[i].stride, &reach)) return false;
    if (__builtin_add_overflow(out.span, reach, &out.span) || out.span > max_span_bytes) return false;
  }
  return true;
}

bool has_axis(const footprint& of, std::int64_t stride) noexcept {
  for (std::int32_t i = 0; i < of.num_axes; ++i) {
    if (of.axes[i].stride == stride) return true;
  }
  return false;
}

/// Bytes reached by the axes that step less than `stride`; −1 when a larger one is not a multiple of it.
std::int64_t span_below(const footprint& of, std::int64_t stride) noexcept {
  std::int64_t span = of.element;
  for (std::int32_t i = 0; i < of.num_axes; ++i) {
    if (of.axes[i].stride < stride) {
      span += (of.axes[i].count - 1) * of.axes[i].stride;
    } else if (of.axes[i].stride % stride != 0) {
      return -1;
    }
  }
  return span;
}

/// Replaces the footprint of the elements of one block of a plane by that of `num_blocks` blocks with their tails.
bool add_tails(footprint& out, const kv_layout& layout, const kv_plane& plane, std::int64_t num_blocks) noexcept {
  constexpr std::int64_t bytes = sizeof(float);
  const kv_tail_strides& tail = plane.tail;
  if (tail.offset < out.span || tail.offset > max_span_bytes || tail.head < 0 || tail.token < 0) return false;
  const auto is_aligned = [](std::int64_t step) { return step % bytes == 0; };
  if (!is_aligned(tail.offset) || !is_aligned(tail.head) || !is_aligned(tail.token)) return false;
  footprint scales;
  const axis inside[] = {{layout.num_kv_heads, tail.head}, {layout.block_size, tail.token}};
  if (!add_axes(scales, inside, 2, plane.code.tail_floats() * bytes, true, 1)) return false;
  const std::int64_t block_bytes = tail.offset + scales.span;  // both at most 2^62
  out = {.base = out.base};
  if (block_bytes > max_span_bytes || (num_blocks > 1 && !is_aligned(plane.strides.block))) return false;
  const axis blocks[] = {{num_blocks, plane.strides.block}};
  return add_axes(out, blocks, 1, block_bytes, true, static_cast<std::int64_t>(size_of(plane.code.type)));
}

}  // namespace

bool make_footprint(footprint& out, const void* base, const kv_layout& layout, const kv_plane& plane,
                    std::int64_t num_blocks) noexcept {
  const kv_strides& strides = plane.strides;
  if (strides.chunk < 1 || strides.chunk > plane.head_dim || plane.head_dim % strides.chunk != 0) return false;
  if (plane.code.is_record()) {
    if (strides.dim != 1 || strides.chunk != plane.head_dim) return false;
    // Their floats are aligned.
    for (const std::int64_t step : {strides.block, strides.head, strides.token}) {
      if (step % static_cast<std::int64_t>(sizeof(float)) != 0) return false;
    }
    const axis rows[] = {
        {num_blocks, strides.block}, {layout.num_kv_heads, strides.head}, {layout.block_size, strides.token}};
    out = {.base = static_cast<const std::byte*>(base)};
    return add_axes(out, rows, 3, kv_record::bytes, true, 1);
  }
  out = {};
  out.base = static_cast<const std::byte*>(base);
  const bool has_tail = plane.code.tail_floats() > 0;
  const axis axes[] = {{has_tail ? 1 : num_blocks, strides.block},
                       {layout.num_kv_heads, strides.head},
                       {layout.block_size, strides.token},
                       {plane.head_dim / strides.chunk, strides.chunk_stride},
                       {strides.chunk, strides.dim}};
  const auto element = static_cast<std::int64_t>(size_of(plane.code.type));
  if (!add_axes(out, axes, 5, element, true, element)) return false;
  return !has_tail || add_tails(out, layout, plane, num_blocks);
}

bool make_footprint(footprint& out, const const_tensor_view& rows, bool must_nest) noexcept {
  out = {};
  out.base = static_cast<const std::byte*>(rows.data);
  const axis axes[] = {{rows.num_tokens, rows.token_stride}, {rows.num_heads, rows.head_stride}, {rows.head_dim, 1}};
  const auto element = static_cast<std::int64_t>(size_of(rows.type));
  return add_axes(out, axes, 3, element, must_nest, element);
}

footprint flat_footprint(const void* base, std::int64_t num_bytes) noexcept {
  footprint out;
  out.base = static_cast<const std::byte*>(base);
  out.span = num_bytes;
  return out;
}

bool apart(const footprint& a, const footprint& b) noexcept {
  const auto a_begin = reinterpret_cast<std::uintptr_t>(a.base);
  const auto b_begin = reinterpret_cast<std::uintptr_t>(b.base);
  if (a_begin + static_cast<std::uintptr_t>(a.span) <= b_begin) return true;
  if (b_begin + static_cast<std::uintptr_t>(b.span) <= a_begin) return true;
  for (std::int32_t i = 0; i < a.num_axes; ++i) {
    const std::int64_t stride = a.axes[i].stride;
    if (stride < 1 || !has_axis(b, stride)) continue;
    const std::int64_t a_span = span_below(a, stride);
    const std::int64_t b_span = span_below(b, stride);
    if (a_span < 0 || b_span < 0) continue;
    // Where b starts within a step that starts with a.
    const auto step = static_cast<std::uintptr_t>(stride);
    const std::uintptr_t ahead =
        b_begin >= a_begin ? (b_begin - a_begin) % step : step - 1 - (a_begin - b_begin - 1) % step;
    if (ahead >= static_cast<std::uintptr_t>(a_span) && ahead + static_cast<std::uintptr_t>(b_span) <= step)
      return true;
  }
  return false;
}

}  // namespace bifolio::inline v0_2::validate

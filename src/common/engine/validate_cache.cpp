// SPDX-License-Identifier: Apache-2.0
#include "common/engine/validate_cache.hpp"

#include <bifolio/dtype.hpp>

#include "common/base/kv_code.hpp"

namespace bifolio::validate {
namespace {

/// The bytes of a whole layer, both planes; without a V plane `v` is `k` again.
struct layer_footprint {
  footprint k;
  footprint v;
};

layer_footprint footprint_of(const kv_cache_view& view) noexcept {
  layer_footprint result;
  (void)make_footprint(result.k, view.k, view.layout, view.layout.k, view.num_blocks);
  if (view.layout.v_in_k) {
    result.v = result.k;
  } else {
    (void)make_footprint(result.v, view.v, view.layout, view.layout.v, view.num_blocks);
  }
  return result;
}

bool apart(const layer_footprint& a, const layer_footprint& b) noexcept {
  return apart(a.k, b.k) && apart(a.k, b.v) && apart(a.v, b.k) && apart(a.v, b.v);
}

/// The stretch of addresses from the lowest to the highest byte of all layers.
struct hull {
  std::uintptr_t begin = UINTPTR_MAX;
  std::uintptr_t end = 0;

  void add(const footprint& print) noexcept {
    const auto first = reinterpret_cast<std::uintptr_t>(print.base);
    const std::uintptr_t last = first + static_cast<std::uintptr_t>(print.span);
    begin = first < begin ? first : begin;
    end = last > end ? last : end;
  }
};

hull hull_of(std::span<const kv_cache_view> layers) noexcept {
  hull result;
  for (const kv_cache_view& layer : layers) {
    if (layer.num_blocks == 0) continue;
    const layer_footprint print = footprint_of(layer);
    result.add(print.k);
    result.add(print.v);
  }
  return result;
}

/// Whether no layer of `a` shares a byte with one of `b`. Caches are apart as a whole as a rule; only where they are
/// not is every layer held against every other.
bool apart(std::span<const kv_cache_view> a, std::span<const kv_cache_view> b) noexcept {
  const hull whole_a = hull_of(a);
  const hull whole_b = hull_of(b);
  if (whole_a.end <= whole_b.begin || whole_b.end <= whole_a.begin) return true;
  for (const kv_cache_view& layer : a) {
    if (layer.num_blocks == 0) continue;
    const layer_footprint print = footprint_of(layer);
    for (const kv_cache_view& other : b) {
      if (other.num_blocks > 0 && !apart(print, footprint_of(other))) return false;
    }
  }
  return true;
}

bool aligned(const void* pointer, dtype type) noexcept {
  return reinterpret_cast<std::uintptr_t>(pointer) % size_of(type) == 0;
}

bool aligned_plane(const void* pointer, const kv_plane& plane) noexcept {
  return aligned(pointer, plane.code.tail_floats() > 0 ? dtype::f32 : plane.code.type);
}

bool has_static_scales(const float* scales, const kv_plane& plane) noexcept {
  return !plane.code.has_static_scales() || (scales != nullptr && aligned(scales, dtype::f32));
}

/// Rows of k or v against the layer they go to or come from. `out` is filled when there are rows.
template <class Void>
errc check_rows(footprint& out, const basic_tensor_view<Void>& rows, const kv_layout& layout, const kv_plane& plane,
                bool written) noexcept {
  if (!is_tensor_dtype(rows.type) || rows.num_tokens < 0) return errc::invalid_argument;
  if (rows.num_heads != layout.num_kv_heads || rows.head_dim != plane.head_dim) return errc::invalid_argument;
  if (rows.num_tokens == 0) return errc::ok;
  if (rows.data == nullptr || !aligned(rows.data, rows.type)) return errc::invalid_argument;
  const const_tensor_view view{rows.data,     rows.type,         rows.num_tokens, rows.num_heads,
                               rows.head_dim, rows.token_stride, rows.head_stride};
  return make_footprint(out, view, written) ? errc::ok : errc::invalid_argument;
}

errc check_slots(const std::int64_t* slots, std::int64_t num_slots, const kv_cache_view& kv) noexcept {
  const std::int64_t end = kv.num_blocks * kv.layout.block_size;  // below 2^31 · 2^31
  std::int64_t largest = -1;
  for (std::int64_t i = 0; i < num_slots; ++i) largest = slots[i] > largest ? slots[i] : largest;
  return largest < end ? errc::ok : errc::out_of_range;
}

/// Who can read slot_mapping.
enum class slots_on : std::uint8_t { host, device };

/// What append and gather have in common.
template <class Params>
errc check_transfer(const Params& params, bool rows_are_written, slots_on where) noexcept {
  if (const errc code = check(params.kv); code != errc::ok) return code;
  const kv_layout& layout = params.kv.layout;
  footprint k;
  footprint v;
  if (const errc code = check_rows(k, params.k, layout, layout.k, rows_are_written); code != errc::ok) return code;
  if (layout.v_in_k) {
    if (params.v.data != nullptr) return errc::invalid_argument;
  } else {
    if (params.k.num_tokens != params.v.num_tokens || params.k.type != params.v.type) return errc::invalid_argument;
    if (const errc code = check_rows(v, params.v, layout, layout.v, rows_are_written); code != errc::ok) return code;
  }
  if (params.k.num_tokens == 0) return errc::ok;
  if (params.slot_mapping == nullptr ||
      reinterpret_cast<std::uintptr_t>(params.slot_mapping) % alignof(std::int64_t) != 0) {
    return errc::invalid_argument;
  }
  if (where == slots_on::host) {
    const errc code = check_slots(params.slot_mapping, params.k.num_tokens, params.kv);
    if (code != errc::ok) return code;
  }

  if (params.kv.num_blocks > 0) {
    const layer_footprint kv = footprint_of(params.kv);
    const auto apart_from_cache = [&](const footprint& rows) { return apart(rows, kv.k) && apart(rows, kv.v); };
    if (!apart_from_cache(k) || (!layout.v_in_k && !apart_from_cache(v))) return errc::invalid_argument;
  }
  if (rows_are_written && !layout.v_in_k && !apart(k, v)) return errc::invalid_argument;
  return errc::ok;
}

bool holds(std::int64_t num_blocks, block_id id) noexcept { return to_index(id) >= 0 && to_index(id) < num_blocks; }

errc check_ids(std::span<const block_copy> copies, std::int64_t num_src, std::int64_t num_dst) noexcept {
  for (const block_copy& copy : copies) {
    if (!holds(num_src, copy.src) || !holds(num_dst, copy.dst)) return errc::out_of_range;
  }
  return errc::ok;
}

errc check_list(std::span<const block_copy> copies) noexcept {
  return copies.data() == nullptr && !copies.empty() ? errc::invalid_argument : errc::ok;
}

bool same_order(const kv_plane& a, const kv_plane& b) noexcept {
  if (a.code.tail_floats() > 0 && a.tail != b.tail) return false;
  return a.code == b.code && a.strides.head == b.strides.head && a.strides.token == b.strides.token &&
         a.strides.dim == b.strides.dim && a.strides.chunk_stride == b.strides.chunk_stride &&
         a.strides.chunk == b.strides.chunk;
}

errc check_v_in_k(const kv_layout& layout) noexcept {
  const bool is_part = layout.v.code == layout.k.code && layout.v.strides == layout.k.strides &&
                       layout.v.tail == layout.k.tail && layout.v.head_dim <= layout.k.head_dim;
  return is_part ? errc::ok : errc::invalid_argument;
}

}  // namespace

std::int64_t plane_span(const kv_layout& layout, const kv_plane& plane, std::int64_t num_blocks) noexcept {
  if (num_blocks == 0) return 0;
  footprint print;
  if (!make_footprint(print, nullptr, layout, plane, num_blocks)) return -1;
  return print.span / static_cast<std::int64_t>(size_of(plane.code.type));
}

errc check(const kv_layout& layout, std::int64_t num_blocks) noexcept {
  if (layout.num_kv_heads < 1 || layout.block_size < 1) return errc::invalid_argument;
  for (const kv_plane* plane : {&layout.k, &layout.v}) {
    if (!is_dtype(plane->code.type) || plane->head_dim < 1) return errc::invalid_argument;
    if (!detail::is_supported(plane->code)) return errc::unsupported;
  }
  if (num_blocks < 0 || num_blocks > max_num_blocks) return errc::invalid_argument;
  if (plane_span(layout, layout.k, num_blocks) < 0) return errc::invalid_argument;
  if (layout.v_in_k) return check_v_in_k(layout);
  if (layout.v != layout.k && plane_span(layout, layout.v, num_blocks) < 0) return errc::invalid_argument;
  return errc::ok;
}

errc check_readable(const kv_cache_view& view) noexcept {
  if (const errc code = check(view.layout, view.num_blocks); code != errc::ok) return code;
  if (view.num_blocks == 0) return errc::ok;
  if (view.k == nullptr || view.v_data() == nullptr) return errc::invalid_argument;
  const kv_layout& layout = view.layout;
  const bool k_is_good = aligned_plane(view.k, layout.k) && has_static_scales(view.k_scales, layout.k);
  const bool v_is_good =
      layout.v_in_k || (aligned_plane(view.v, layout.v) && has_static_scales(view.v_scales, layout.v));
  return k_is_good && v_is_good ? errc::ok : errc::invalid_argument;
}

errc check(const kv_cache_view& view) noexcept {
  if (const errc code = check_readable(view); code != errc::ok) return code;
  if (view.num_blocks == 0 || view.layout.v_in_k) return errc::ok;
  const layer_footprint print = footprint_of(view);
  return apart(print.k, print.v) ? errc::ok : errc::invalid_argument;
}

bool same_shape(const kv_layout& a, const kv_layout& b) noexcept {
  return a.num_kv_heads == b.num_kv_heads && a.k.head_dim == b.k.head_dim && a.v.head_dim == b.v.head_dim &&
         a.block_size == b.block_size && a.v_in_k == b.v_in_k;
}

bool same_block_order(const kv_layout& a, const kv_layout& b) noexcept {
  return same_shape(a, b) && same_order(a.k, b.k) && same_order(a.v, b.v);
}

errc append(const append_params& params) noexcept { return check_transfer(params, false, slots_on::host); }

errc gather(const gather_params& params) noexcept { return check_transfer(params, true, slots_on::host); }

errc append_on_device(const append_params& params) noexcept { return check_transfer(params, false, slots_on::device); }

errc gather_on_device(const gather_params& params) noexcept { return check_transfer(params, true, slots_on::device); }

errc copy_blocks(std::span<const kv_cache_view> layers, std::span<const block_copy> copies) noexcept {
  if (const errc code = check_list(copies); code != errc::ok) return code;
  if (layers.data() == nullptr && !layers.empty()) return errc::invalid_argument;
  std::int64_t checked_num_blocks = -1;  // layers are alike as a rule: their ids are checked once
  for (const kv_cache_view& layer : layers) {
    if (const errc code = check(layer); code != errc::ok) return code;
    if (layer.num_blocks == checked_num_blocks) continue;
    if (const errc code = check_ids(copies, layer.num_blocks, layer.num_blocks); code != errc::ok) return code;
    checked_num_blocks = layer.num_blocks;
  }
  return errc::ok;
}

errc convert_blocks(const kv_cache_view& src, const kv_cache_view& dst, std::span<const block_copy> copies) noexcept {
  if (const errc code = check_list(copies); code != errc::ok) return code;
  if (const errc code = check(src); code != errc::ok) return code;
  if (const errc code = check(dst); code != errc::ok) return code;
  if (!same_shape(src.layout, dst.layout)) return errc::invalid_argument;
  if (src.num_blocks > 0 && dst.num_blocks > 0 && !apart(footprint_of(src), footprint_of(dst))) {
    return errc::invalid_argument;
  }
  return check_ids(copies, src.num_blocks, dst.num_blocks);
}

errc swap_blocks(std::span<const kv_cache_view> src, std::span<const kv_cache_view> dst,
                 std::span<const block_copy> copies) noexcept {
  if (const errc code = check_list(copies); code != errc::ok) return code;
  if (src.size() != dst.size()) return errc::invalid_argument;
  if (src.empty()) return errc::ok;
  if (src.data() == nullptr || dst.data() == nullptr) return errc::invalid_argument;
  std::int64_t num_src = max_num_blocks;
  std::int64_t num_dst = max_num_blocks;
  for (std::size_t i = 0; i < src.size(); ++i) {
    if (const errc code = check(src[i]); code != errc::ok) return code;
    if (const errc code = check(dst[i]); code != errc::ok) return code;
    if (!same_block_order(src[i].layout, dst[i].layout)) return errc::invalid_argument;
    if (src[i].num_blocks < num_src) num_src = src[i].num_blocks;
    if (dst[i].num_blocks < num_dst) num_dst = dst[i].num_blocks;
  }
  if (!apart(src, dst)) return errc::invalid_argument;
  return check_ids(copies, num_src, num_dst);
}

}  // namespace bifolio::validate

// SPDX-License-Identifier: Apache-2.0
#include "common/engine/validate_cache.hpp"

#include <bifolio/dtype.hpp>

#include "common/base/kv_code.hpp"

namespace bifolio::inline v0_2::validate {
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

/// float32 scales among the bytes of its blocks.
bool has_scales_inside(const kv_plane& plane) noexcept {
  return plane.code.tail_floats() > 0 || plane.code.is_record();
}

bool aligned_plane(const void* pointer, const kv_plane& plane) noexcept {
  return aligned(pointer, has_scales_inside(plane) ? dtype::f32 : plane.code.type);
}

bool has_static_scales(const float* scales, const kv_plane& plane) noexcept {
  return !plane.code.has_static_scales() || (scales != nullptr && aligned(scales, dtype::f32));
}

/// Rows of k or v against the layer they go to or come from. `out` is filled when there are rows.
template <class Void>
errc check_rows(footprint& out, const basic_tensor_view<Void>& rows, const char* name, const kv_layout& layout,
                const kv_plane& plane, bool written, const refusal& refuse) {
  if (!is_tensor_dtype(rows.type)) return refuse_dtype(name, rows.type, tensor_dtype_names, refuse);
  if (rows.num_tokens < 0) {
    return refuse(errc::invalid_argument, "num_tokens of ", name, " is ", rows.num_tokens, "; it must not be negative");
  }
  if (rows.num_heads != layout.num_kv_heads) {
    return refuse(errc::invalid_argument, "num_heads of ", name, " is ", rows.num_heads, "; the cache has ",
                  layout.num_kv_heads, " KV heads");
  }
  if (rows.head_dim != plane.head_dim) {
    return refuse(errc::invalid_argument, "head_dim of ", name, " is ", rows.head_dim, "; the cache has ",
                  plane.head_dim);
  }
  if (rows.num_tokens == 0) return errc::ok;
  if (rows.data == nullptr) return refuse(errc::invalid_argument, "the data pointer of ", name, " is null");
  if (!aligned(rows.data, rows.type)) {
    return refuse(errc::invalid_argument, "the data pointer of ", name, " is not aligned to its elements of ",
                  static_cast<std::int64_t>(size_of(rows.type)), " bytes");
  }
  const const_tensor_view view{rows.data,     rows.type,         rows.num_tokens, rows.num_heads,
                               rows.head_dim, rows.token_stride, rows.head_stride};
  if (make_footprint(out, view, written)) return errc::ok;
  return refuse(errc::invalid_argument, "the strides of ", name, ", ", rows.token_stride, " (token) and ",
                rows.head_stride, " (head), are negative, reach past 2^62 bytes",
                written ? ", or let rows overlap that are written" : "");
}

errc check_slots(const std::int64_t* slots, std::int64_t num_slots, const kv_cache_view& kv, const refusal& refuse) {
  const std::int64_t end = kv.num_blocks * kv.layout.block_size;  // below 2^31 · 2^31
  std::int64_t largest = -1;
  for (std::int64_t i = 0; i < num_slots; ++i) largest = slots[i] > largest ? slots[i] : largest;
  if (largest < end) return errc::ok;
  return refuse(errc::out_of_range, "slot_mapping has the slot ", largest, "; the cache has ", end, " slots");
}

/// Who can read slot_mapping.
enum class slots_on : std::uint8_t { host, device };

/// What append and gather have in common.
template <class Params>
errc check_transfer(const Params& params, bool rows_are_written, slots_on where, std::string* sentence) {
  const refusal refuse(sentence);
  if (const errc code = check(params.kv, "kv", refuse); code != errc::ok) return code;
  const kv_layout& layout = params.kv.layout;
  footprint k;
  footprint v;
  errc code = check_rows(k, params.k, "k", layout, layout.k, rows_are_written, refuse);
  if (code != errc::ok) return code;
  if (layout.v_in_k) {
    if (params.v.data != nullptr) {
      return refuse(errc::invalid_argument, "v is given; V of this cache is part of K, so v must be {}");
    }
  } else {
    if (params.k.num_tokens != params.v.num_tokens) {
      return refuse(errc::invalid_argument, "k has ", params.k.num_tokens, " rows and v ", params.v.num_tokens,
                    "; they must have the same");
    }
    if (params.k.type != params.v.type) {
      return refuse(errc::invalid_argument, "the dtype of k is ", to_string(params.k.type), " and that of v number ",
                    static_cast<std::int32_t>(params.v.type), "; they must be the same");
    }
    code = check_rows(v, params.v, "v", layout, layout.v, rows_are_written, refuse);
    if (code != errc::ok) return code;
  }
  if (params.k.num_tokens == 0) return errc::ok;
  if (params.slot_mapping == nullptr) return refuse(errc::invalid_argument, "slot_mapping is null");
  if (reinterpret_cast<std::uintptr_t>(params.slot_mapping) % alignof(std::int64_t) != 0) {
    return refuse(errc::invalid_argument, "slot_mapping is not aligned to its elements of 8 bytes");
  }
  if (where == slots_on::host) {
    code = check_slots(params.slot_mapping, params.k.num_tokens, params.kv, refuse);
    if (code != errc::ok) return code;
  }

  if (params.kv.num_blocks > 0) {
    const layer_footprint kv = footprint_of(params.kv);
    const auto apart_from_cache = [&](const footprint& rows) { return apart(rows, kv.k) && apart(rows, kv.v); };
    const bool k_apart = apart_from_cache(k);
    if (!k_apart || (!layout.v_in_k && !apart_from_cache(v))) {
      return refuse(errc::invalid_argument, "the rows of ", k_apart ? "v" : "k", " share memory with the cache");
    }
  }
  if (rows_are_written && !layout.v_in_k && !apart(k, v)) {
    return refuse(errc::invalid_argument, "the rows of k and v share memory; both are written");
  }
  return errc::ok;
}

bool holds(std::int64_t num_blocks, block_id id) noexcept { return to_index(id) >= 0 && to_index(id) < num_blocks; }

errc check_ids(std::span<const block_copy> copies, std::int64_t num_src, std::int64_t num_dst, const refusal& refuse) {
  for (const block_copy& copy : copies) {
    const bool src_is_there = holds(num_src, copy.src);
    if (src_is_there && holds(num_dst, copy.dst)) continue;
    return refuse(errc::out_of_range, "pair ", &copy - copies.data(), " of copies has the ",
                  src_is_there ? "destination" : "source", " ", to_index(src_is_there ? copy.dst : copy.src),
                  "; blocks there are 0 to ", (src_is_there ? num_dst : num_src) - 1);
  }
  return errc::ok;
}

errc check_list(std::span<const block_copy> copies, const refusal& refuse) {
  if (copies.data() != nullptr || copies.empty()) return errc::ok;
  return refuse(errc::invalid_argument, "copies is null and has ", copies.size(), " pairs");
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

bool suits_records(const kv_layout& layout) noexcept {
  return detail::suits_records(layout.k.code, layout.v.code, layout.k.head_dim, layout.v.head_dim, layout.v_in_k);
}

/// What `check_readable` finds wrong with a view, by name.
errc describe(const kv_cache_view& view, std::string_view name, errc code, const refusal& refuse) {
  if (view.num_blocks < 0) {
    return refuse(code, "num_blocks of ", name, " is ", view.num_blocks, "; it must not be negative");
  }
  const kv_layout& layout = view.layout;
  if (layout.num_kv_heads < 1 || layout.block_size < 1) {
    return refuse(code, "the layout of ", name, " has ", layout.num_kv_heads, " KV heads and blocks of ",
                  layout.block_size, " tokens; both must be at least 1");
  }
  for (const bool is_k : {true, false}) {
    const kv_plane& plane = is_k ? layout.k : layout.v;
    const char* const part = is_k ? ".k" : ".v";
    if (!is_dtype(plane.code.type)) {
      return refuse(code, "the dtype of ", name, part, " is number ", static_cast<std::int32_t>(plane.code.type),
                    "; it must be one of ", dtype_names);
    }
    if (plane.head_dim < 1) {
      return refuse(code, "head_dim of ", name, part, " is ", plane.head_dim, "; it must be at least 1");
    }
    if (!detail::is_supported(plane.code)) {
      return refuse(
          code, "the code of ", name, part, ", ", [&](std::string& text) { text += to_string(plane.code); },
          ", is not implemented");
    }
  }
  if (!suits_records(layout)) {
    return refuse(code, "of ", name, " ",
                  detail::unsuitable_records(layout.k.head_dim, layout.v.head_dim, layout.v_in_k));
  }
  for (const bool is_k : {true, false}) {
    if (view.num_blocks == 0 || (!is_k && layout.v_in_k)) break;  // without blocks nothing of a plane is looked at
    const char* const part = is_k ? ".k" : ".v";
    const void* const data = is_k ? view.k : view.v;
    const kv_plane& plane = is_k ? layout.k : layout.v;
    const kv_strides& strides = plane.strides;
    if (strides.chunk < 1 || plane.head_dim % strides.chunk != 0) {
      return refuse(code, "the chunk of ", name, part, " is ", strides.chunk,
                    "; it must be a divisor of its head_dim, ", plane.head_dim);
    }
    if (view.num_blocks <= max_num_blocks && plane_span(layout, plane, view.num_blocks) < 0) {
      return refuse(code, "the strides of ", name, part, " (block ", strides.block, ", head ", strides.head, ", token ",
                    strides.token, ", dim ", strides.dim, ", chunk ", strides.chunk_stride,
                    ") let elements share a place or reach past 2^62 bytes",
                    plane.code.tail_floats() > 0 ? ", or its tail is not between the elements and the next block"
                    : plane.code.is_record()     ? ", or are not those of records: dim 1, one chunk, multiples of 4"
                                                 : "");
    }
    if (data == nullptr) return refuse(code, name, part, " is null");
    if (!aligned_plane(data, plane)) {
      const bool has_scales = has_scales_inside(plane);
      return refuse(code, name, part, " is not aligned to its ", has_scales ? "scales" : "elements", " of ",
                    has_scales ? std::int64_t{sizeof(float)} : static_cast<std::int64_t>(size_of(plane.code.type)),
                    " bytes");
    }
    const float* const scales = is_k ? view.k_scales : view.v_scales;
    if (!has_static_scales(scales, plane)) {
      return refuse(code, name, part, "_scales is ",
                    scales == nullptr ? "null" : "not aligned to its elements of 4 bytes",
                    "; the code of the plane has static scales");
    }
  }
  if (layout.v_in_k && check_v_in_k(layout) != errc::ok) {
    return refuse(code, "the strides, the code or the head_dim of V are not those of a V that is part of K");
  }
  return refuse(code, "num_blocks of ", name, " is ", view.num_blocks, "; the largest allowed value is ",
                max_num_blocks);
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
  if (!suits_records(layout)) return errc::invalid_argument;
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

errc check_readable(const kv_cache_view& view, std::string_view name, const refusal& refuse) {
  const errc code = check_readable(view);
  return code == errc::ok ? code : describe(view, name, code, refuse);
}

errc check(const kv_cache_view& view, std::string_view name, const refusal& refuse) {
  if (const errc code = check_readable(view, name, refuse); code != errc::ok) return code;
  if (view.num_blocks == 0 || view.layout.v_in_k) return errc::ok;
  const layer_footprint print = footprint_of(view);
  if (apart(print.k, print.v)) return errc::ok;
  return refuse(errc::invalid_argument, "the K plane and the V plane of ", name, " share memory");
}

bool same_shape(const kv_layout& a, const kv_layout& b) noexcept {
  return a.num_kv_heads == b.num_kv_heads && a.k.head_dim == b.k.head_dim && a.v.head_dim == b.v.head_dim &&
         a.block_size == b.block_size && a.v_in_k == b.v_in_k;
}

bool same_block_order(const kv_layout& a, const kv_layout& b) noexcept {
  return same_shape(a, b) && same_order(a.k, b.k) && same_order(a.v, b.v);
}

errc append(const append_params& params, std::string* sentence) {
  return check_transfer(params, false, slots_on::host, sentence);
}

errc gather(const gather_params& params, std::string* sentence) {
  return check_transfer(params, true, slots_on::host, sentence);
}

errc append_on_device(const append_params& params, std::string* sentence) {
  return check_transfer(params, false, slots_on::device, sentence);
}

errc gather_on_device(const gather_params& params, std::string* sentence) {
  return check_transfer(params, true, slots_on::device, sentence);
}

errc copy_blocks(std::span<const kv_cache_view> layers, std::span<const block_copy> copies, std::string* sentence) {
  const refusal refuse(sentence);
  if (const errc code = check_list(copies, refuse); code != errc::ok) return code;
  if (layers.data() == nullptr && !layers.empty()) {
    return refuse(errc::invalid_argument, "layers is null and has ", layers.size(), " views");
  }
  std::int64_t checked_num_blocks = -1;  // layers are alike as a rule: their ids are checked once
  for (const kv_cache_view& layer : layers) {
    if (const errc code = check(layer, "a layer", refuse); code != errc::ok) return code;
    if (layer.num_blocks == checked_num_blocks) continue;
    if (const errc code = check_ids(copies, layer.num_blocks, layer.num_blocks, refuse); code != errc::ok) return code;
    checked_num_blocks = layer.num_blocks;
  }
  return errc::ok;
}

errc convert_blocks(const kv_cache_view& src, const kv_cache_view& dst, std::span<const block_copy> copies,
                    std::string* sentence) {
  const refusal refuse(sentence);
  if (const errc code = check_list(copies, refuse); code != errc::ok) return code;
  if (const errc code = check(src, "src", refuse); code != errc::ok) return code;
  if (const errc code = check(dst, "dst", refuse); code != errc::ok) return code;
  if (!same_shape(src.layout, dst.layout)) {
    return refuse(errc::invalid_argument,
                  "src and dst differ in heads, head dims, block_size or v_in_k; blocks of src hold ",
                  src.layout.block_size, " tokens of ", src.layout.num_kv_heads, " heads, those of dst ",
                  dst.layout.block_size, " of ", dst.layout.num_kv_heads);
  }
  if (src.num_blocks > 0 && dst.num_blocks > 0 && !apart(footprint_of(src), footprint_of(dst))) {
    return refuse(errc::invalid_argument, "src and dst share memory");
  }
  return check_ids(copies, src.num_blocks, dst.num_blocks, refuse);
}

errc swap_blocks(std::span<const kv_cache_view> src, std::span<const kv_cache_view> dst,
                 std::span<const block_copy> copies, std::string* sentence) {
  const refusal refuse(sentence);
  if (const errc code = check_list(copies, refuse); code != errc::ok) return code;
  if (src.size() != dst.size()) {
    return refuse(errc::invalid_argument, "src has ", src.size(), " layers and dst ", dst.size(),
                  "; they must have the same");
  }
  if (src.empty()) return errc::ok;
  if (src.data() == nullptr || dst.data() == nullptr) {
    return refuse(errc::invalid_argument, src.data() == nullptr ? "src" : "dst", " is null and has ", src.size(),
                  " layers");
  }
  std::int64_t num_src = max_num_blocks;
  std::int64_t num_dst = max_num_blocks;
  for (std::size_t i = 0; i < src.size(); ++i) {
    if (const errc code = check(src[i], "src", refuse); code != errc::ok) return code;
    if (const errc code = check(dst[i], "dst", refuse); code != errc::ok) return code;
    if (!same_block_order(src[i].layout, dst[i].layout)) {
      return refuse(errc::invalid_argument, "layer ", i,
                    " of src and dst differ in the order inside a block; use convert_blocks");
    }
    if (src[i].num_blocks < num_src) num_src = src[i].num_blocks;
    if (dst[i].num_blocks < num_dst) num_dst = dst[i].num_blocks;
  }
  if (!apart(src, dst)) return refuse(errc::invalid_argument, "src and dst share memory");
  return check_ids(copies, num_src, num_dst, refuse);
}

}  // namespace bifolio::inline v0_2::validate

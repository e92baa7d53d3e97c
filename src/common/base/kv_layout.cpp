// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/error.hpp>
#include <bifolio/kv_layout.hpp>
#include <string>

#include "common/base/checked.hpp"
#include "common/base/kv_code.hpp"
#include "common/base/refuse.hpp"

namespace bifolio::inline v0_2 {
namespace {

void require_positive(const char* name, std::int32_t value) {
  if (value < 1) {
    detail::refuse(errc::invalid_argument, name, " is ", value, "; it must be at least 1");
  }
}

void require_code(const char* plane, const kv_code& code) {
  if (!is_dtype(code.type)) {
    detail::refuse(errc::invalid_argument, "dtype number ", static_cast<int>(code.type), " of the ", plane,
                   " plane is not one of ", dtype_names);
  }
  if (!detail::is_supported(code)) detail::refuse(errc::unsupported, detail::unsupported_code(plane, code));
}

void require_v_in_k(const kv_code& k, const kv_code& v, std::int32_t qk_head_dim, std::int32_t v_head_dim) {
  if (v_head_dim > qk_head_dim) {
    detail::refuse(errc::invalid_argument, "v_head_dim is ", v_head_dim,
                   "; where V is part of K it must be at most qk_head_dim, ", qk_head_dim);
  }
  if (k != v) {
    detail::refuse(
        errc::invalid_argument, "the code of V is ", [&](std::string& text) { text += to_string(v); },
        "; where V is part of K it must be that of K, ", [&](std::string& text) { text += to_string(k); });
  }
}

void require_records(layout_kind kind, const kv_code& k, const kv_code& v, std::int32_t qk_head_dim,
                     std::int32_t v_head_dim, bool v_in_k) {
  if (!detail::suits_records(k, v, qk_head_dim, v_head_dim, v_in_k)) {
    detail::refuse(errc::invalid_argument, detail::unsuitable_records(qk_head_dim, v_head_dim, v_in_k));
  }
  if (k.is_record() && kind == layout_kind::x_split) {
    detail::refuse(errc::invalid_argument,
                   "layout x_split divides rows, which records do not allow; it must be hnd or nhd");
  }
}

// x of x_split: 16 bytes of elements, halved until it divides head_dim.
std::int32_t split_width(dtype type, std::int32_t head_dim) {
  auto x = static_cast<std::int32_t>(16 / size_of(type));
  while (head_dim % x != 0) x /= 2;
  return x;
}

// The strides of one plane, whose rows take `row` elements; in x_split K is split and V has its tokens side by side.
kv_strides strides_of(layout_kind kind, bool is_k, dtype type, std::int64_t heads, std::int32_t head_dim,
                      std::int64_t tokens, std::int64_t row, std::int64_t block) {
  const std::int64_t dims = head_dim;
  switch (kind) {
    case layout_kind::hnd:
      return {.block = block, .head = tokens * row, .token = row, .dim = 1, .chunk_stride = dims, .chunk = head_dim};
    case layout_kind::nhd:
      return {.block = block, .head = row, .token = heads * row, .dim = 1, .chunk_stride = dims, .chunk = head_dim};
    case layout_kind::x_split: {
      if (is_k) {
        const std::int32_t x = split_width(type, head_dim);
        return {.block = block, .head = tokens * dims, .token = x, .dim = 1, .chunk_stride = tokens * x, .chunk = x};
      }
      return {.block = block,
              .head = tokens * dims,
              .token = 1,
              .dim = tokens,
              .chunk_stride = tokens * dims,
              .chunk = head_dim};
    }
    case layout_kind::strided:
      break;
  }
  detail::refuse(errc::invalid_argument,
                 "make_layout builds hnd, nhd and x_split; a strided layout is filled in by hand");
}

}  // namespace

std::string_view to_string(layout_kind kind) noexcept {
  switch (kind) {
    case layout_kind::hnd:
      return "hnd";
    case layout_kind::nhd:
      return "nhd";
    case layout_kind::x_split:
      return "x_split";
    case layout_kind::strided:
      return "strided";
  }
  return "unknown";
}

std::string_view to_string(scale_granularity granularity) noexcept {
  switch (granularity) {
    case scale_granularity::none:
      return "none";
    case scale_granularity::layer:
      return "layer";
    case scale_granularity::head:
      return "head";
    case scale_granularity::token_head:
      return "token_head";
    case scale_granularity::record:
      return "record";
  }
  return "unknown";
}

std::string to_string(const kv_code& code) {
  std::string text(to_string(code.type));
  if (code.granularity == scale_granularity::none) return text;
  text.append(", scale per ").append(to_string(code.granularity));
  return text.append(" (").append(to_string(code.scale_type)).append(")");
}

namespace {

constexpr struct {
  std::string_view name;
  kv_code code;
} named_codes[] = {
    {"f32", {dtype::f32}},
    {"f16", {dtype::f16}},
    {"bf16", {dtype::bf16}},
    {"e4m3", {dtype::e4m3, scale_granularity::layer}},
    {"e5m2", {dtype::e5m2, scale_granularity::layer}},
    {"i8", {dtype::i8, scale_granularity::layer}},
    {"e4m3-head", {dtype::e4m3, scale_granularity::head}},
    {"e5m2-head", {dtype::e5m2, scale_granularity::head}},
    {"i8-head", {dtype::i8, scale_granularity::head}},
    {"e4m3-token", {dtype::e4m3, scale_granularity::token_head}},
    {"i8-token", {dtype::i8, scale_granularity::token_head}},
    {"u8-token", {dtype::u8, scale_granularity::token_head}},
    {"e4m3-record", {dtype::e4m3, scale_granularity::record}},
    {"e4m3-unscaled", {dtype::e4m3}},
    {"e5m2-unscaled", {dtype::e5m2}},
};

}  // namespace

kv_code parse_kv_code(std::string_view text) {
  std::string names;
  for (const auto& [name, code] : named_codes) {
    if (name == text) return code;
    names.append(names.empty() ? "" : ", ").append(name);
  }
  detail::refuse(errc::invalid_argument, "code '", text, "' is not one of ", std::string_view(names));
}

std::string_view short_name(const kv_code& code) noexcept {
  for (const auto& [name, named] : named_codes) {
    if (named == code) return name;
  }
  return "unknown";
}

layout_kind parse_layout(std::string_view text) {
  if (text == "hnd") return layout_kind::hnd;
  if (text == "nhd") return layout_kind::nhd;
  if (text == "x_split") return layout_kind::x_split;
  detail::refuse(errc::invalid_argument, "layout '", text, "' is not one of hnd, nhd, x_split");
}

kv_layout make_layout(layout_kind kind, dtype type, std::int32_t num_kv_heads, std::int32_t head_dim,
                      std::int32_t block_size) {
  require_positive("head_dim", head_dim);
  return make_layout(kind, kv_code{type}, kv_code{type}, num_kv_heads, head_dim, head_dim, block_size);
}

kv_layout make_layout(layout_kind kind, kv_code k, kv_code v, std::int32_t num_kv_heads, std::int32_t qk_head_dim,
                      std::int32_t v_head_dim, std::int32_t block_size, bool v_in_k) {
  require_positive("num_kv_heads", num_kv_heads);
  require_positive("qk_head_dim", qk_head_dim);
  require_positive("v_head_dim", v_head_dim);
  require_positive("block_size", block_size);
  require_code("K", k);
  require_code("V", v);
  if (v_in_k) require_v_in_k(k, v, qk_head_dim, v_head_dim);
  require_records(kind, k, v, qk_head_dim, v_head_dim, v_in_k);

  constexpr std::int64_t max_block_bytes = std::int64_t{1} << 40;
  (void)detail::bounded_product(
      "the size of a block in bytes (2 * num_kv_heads * the larger head_dim * block_size * element size)",
      max_block_bytes, 2, num_kv_heads, std::max(qk_head_dim, v_head_dim), block_size,
      std::max(size_of(k.type), size_of(v.type)));

  kv_layout layout{.kind = kind, .num_kv_heads = num_kv_heads, .block_size = block_size, .v_in_k = v_in_k};
  layout.k = {.code = k, .head_dim = qk_head_dim};
  layout.v = {.code = v, .head_dim = v_head_dim};
  for (kv_plane* plane : {&layout.k, &layout.v}) {
    // The tail belongs to the block; the step from block to block is in elements.
    const std::int64_t block = layout.block_bytes(*plane) / static_cast<std::int64_t>(size_of(plane->code.type));
    plane->strides = strides_of(kind, plane == &layout.k, plane->code.type, num_kv_heads, plane->head_dim, block_size,
                                plane->row_elements(), block);
    if (const std::int64_t floats = plane->code.tail_floats(); floats > 0) {
      const std::int64_t entry = floats * static_cast<std::int64_t>(sizeof(float));
      plane->tail = {.offset = layout.block_tail_offset(*plane), .head = block_size * entry, .token = entry};
    }
  }
  if (v_in_k) {
    layout.v.strides = layout.k.strides;
    layout.v.tail = layout.k.tail;
  }
  return layout;
}

}  // namespace bifolio::inline v0_2

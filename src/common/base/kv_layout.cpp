// SPDX-License-Identifier: Apache-2.0
#include <bifolio/error.hpp>
#include <bifolio/kv_layout.hpp>
#include <string>

#include "common/base/checked.hpp"
#include "common/base/refuse.hpp"

namespace bifolio {
namespace {

void require_positive(const char* name, std::int32_t value) {
  if (value < 1) {
    detail::refuse(errc::invalid_argument, name, " is ", value, "; it must be at least 1");
  }
}

// x of x_split: 16 bytes of elements, halved until it divides head_dim.
std::int32_t split_width(dtype type, std::int32_t head_dim) {
  auto x = static_cast<std::int32_t>(16 / size_of(type));
  while (head_dim % x != 0) x /= 2;
  return x;
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

layout_kind parse_layout(std::string_view text) {
  if (text == "hnd") return layout_kind::hnd;
  if (text == "nhd") return layout_kind::nhd;
  if (text == "x_split") return layout_kind::x_split;
  detail::refuse(errc::invalid_argument, "layout '", text, "' is not one of hnd, nhd, x_split");
}

kv_layout make_layout(layout_kind kind, dtype type, std::int32_t num_kv_heads, std::int32_t head_dim,
                      std::int32_t block_size) {
  require_positive("num_kv_heads", num_kv_heads);
  require_positive("head_dim", head_dim);
  require_positive("block_size", block_size);
  if (!is_dtype(type)) {
    detail::refuse(errc::invalid_argument, "dtype number ", static_cast<int>(type), " is not one of ", dtype_names);
  }
  constexpr std::int64_t max_block_bytes = std::int64_t{1} << 40;
  (void)detail::bounded_product(
      "the size of a block in bytes (2 * num_kv_heads * head_dim * block_size * element size)", max_block_bytes, 2,
      num_kv_heads, head_dim, block_size, size_of(type));

  const std::int64_t heads = num_kv_heads;
  const std::int64_t dims = head_dim;
  const std::int64_t tokens = block_size;
  const std::int64_t block = heads * dims * tokens;
  kv_layout layout{kind, type, num_kv_heads, head_dim, block_size, {}, {}};
  switch (kind) {
    case layout_kind::hnd:
      layout.k = {
          .block = block, .head = tokens * dims, .token = dims, .dim = 1, .chunk_stride = dims, .chunk = head_dim};
      layout.v = layout.k;
      return layout;
    case layout_kind::nhd:
      layout.k = {
          .block = block, .head = dims, .token = heads * dims, .dim = 1, .chunk_stride = dims, .chunk = head_dim};
      layout.v = layout.k;
      return layout;
    case layout_kind::x_split: {
      const std::int32_t x = split_width(type, head_dim);
      layout.k = {.block = block, .head = tokens * dims, .token = x, .dim = 1, .chunk_stride = tokens * x, .chunk = x};
      layout.v = {.block = block,
                  .head = tokens * dims,
                  .token = 1,
                  .dim = tokens,
                  .chunk_stride = tokens * dims,
                  .chunk = head_dim};
      return layout;
    }
    case layout_kind::strided:
      break;
  }
  detail::refuse(errc::invalid_argument,
                 "make_layout builds hnd, nhd and x_split; a strided layout is filled in by hand");
}

}  // namespace bifolio

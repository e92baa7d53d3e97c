// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Planes with codes and scales, one (token, head) at a time: the table at `kv_code` written down, through
/// `kv_strides::offset` and the conversions of dtype.hpp alone. Works on host bytes.

#include <bifolio/dtype.hpp>
#include <bifolio/kv_layout.hpp>
#include <bifolio/step.hpp>
#include <bifolio/tensor_view.hpp>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "reference/cache_oracle.hpp"
#include "support/elements.hpp"

namespace bifolio::test {

/// One row as it is stored: an element per dim, in the low bytes, and its scales; of a record, one of its bytes each.
struct stored_row {
  std::vector<std::uint32_t> elements;
  float scale = 1.0f;
  float zero = 0.0f;
};

[[nodiscard]] inline std::uint32_t element_of_value(dtype type, float value) {
  std::uint32_t bits = 0;
  store_element(&bits, type, 0, value);
  return bits;
}

[[nodiscard]] inline stored_row oracle_encode_record(std::span<const float> values) {
  std::vector<std::byte> bytes(656);
  for (std::size_t group = 0; group < 4; ++group) {
    const std::span<const float> dims = values.subspan(128 * group, 128);
    float most = 0;
    bool finite = true;
    for (const float value : dims) {
      most = std::fmax(most, std::fabs(value));
      finite = finite && std::isfinite(value);
    }
    const float wanted = std::fmax(most / 448.0f, 1e-4f);
    float scale = 1;
    while (finite && scale < wanted) scale *= 2;
    while (scale / 2 >= wanted) scale /= 2;
    if (!finite) scale = std::bit_cast<float>(0x7fc00000u);
    std::memcpy(bytes.data() + 512 + 4 * group, &scale, 4);
    for (std::size_t i = 0; i < dims.size(); ++i) {
      store_element(bytes.data(), dtype::e4m3, static_cast<std::int64_t>(128 * group + i),
                    finite ? dims[i] / scale : 0.0f);
    }
  }
  for (std::size_t i = 0; i < 64; ++i) {
    const float value = std::isnan(values[512 + i]) ? std::bit_cast<float>(0x7fc00000u) : values[512 + i];
    store_element(bytes.data() + 528, dtype::bf16, static_cast<std::int64_t>(i), value);
  }
  stored_row row;
  for (const std::byte byte : bytes) row.elements.push_back(std::to_integer<std::uint32_t>(byte));
  return row;
}

[[nodiscard]] inline std::vector<float> oracle_decode_record(const stored_row& row) {
  std::vector<std::byte> bytes;
  for (const std::uint32_t byte : row.elements) bytes.push_back(static_cast<std::byte>(byte));
  std::vector<float> values;
  for (std::size_t i = 0; i < 512; ++i) {
    float scale = 0;
    std::memcpy(&scale, bytes.data() + 512 + 4 * (i / 128), 4);
    const float value = load_element(bytes.data(), dtype::e4m3, static_cast<std::int64_t>(i)) * scale;
    values.push_back(std::isnan(value) ? std::bit_cast<float>(0x7fc00000u) : value);
  }
  for (std::int64_t i = 0; i < 64; ++i) values.push_back(load_element(bytes.data() + 528, dtype::bf16, i));
  return values;
}

/// `static_scale`: that of the row, for codes that have one.
[[nodiscard]] inline stored_row oracle_encode(const kv_code& code, float static_scale, std::span<const float> values) {
  if (code.granularity == scale_granularity::record) return oracle_encode_record(values);
  stored_row row;
  float inverse = 1.0f;
  bool has_zero = false;
  switch (code.granularity) {
    case scale_granularity::none:
    case scale_granularity::record:
      break;
    case scale_granularity::layer:
    case scale_granularity::head:
      row.scale = static_scale;
      inverse = 1.0f / static_scale;
      break;
    case scale_granularity::token_head: {
      bool finite = true;
      float least = std::numeric_limits<float>::infinity();
      float most = -least;
      float magnitude = 0;
      for (const float value : values) {
        finite = finite && std::isfinite(value);
        least = std::fmin(least, value);
        most = std::fmax(most, value);
        magnitude = std::fmax(magnitude, std::fabs(value));
      }
      const float nan = std::bit_cast<float>(0x7fc00000u);
      has_zero = code.type == dtype::u8;
      const float largest = has_zero ? 255.0f : code.type == dtype::e4m3 ? 448.0f : 127.0f;
      const float range = has_zero ? most - least : magnitude;
      row.zero = has_zero ? least + 0.0f : 0.0f;
      if (!finite || std::isinf(range)) {
        row.scale = nan;
        if (has_zero) row.zero = nan;
        inverse = 0;
      } else if (range < 0x1p-100f) {
        row.scale = 0;
        inverse = 0;
      } else {
        row.scale = range / largest;
        inverse = largest / range;
      }
      break;
    }
  }
  for (const float value : values) {
    float scaled = value;
    if (code.granularity != scale_granularity::none) {
      scaled = inverse == 0 ? 0.0f : has_zero ? (value - row.zero) * inverse : value * inverse;
    }
    row.elements.push_back(element_of_value(code.type, scaled));
  }
  return row;
}

[[nodiscard]] inline std::vector<float> oracle_decode(const kv_code& code, const stored_row& row) {
  if (code.granularity == scale_granularity::record) return oracle_decode_record(row);
  std::vector<float> values;
  for (const std::uint32_t bits : row.elements) {
    float value = load_element(&bits, code.type, 0);
    if (code.granularity != scale_granularity::none) {
      value = value * row.scale;
      if (code.type == dtype::u8) value = value + row.zero;
      if (std::isnan(value)) value = std::bit_cast<float>(0x7fc00000u);
    }
    values.push_back(value);
  }
  return values;
}

/// A plane of a view in host memory.
struct oracle_plane {
  std::byte* base = nullptr;
  kv_plane plane;
  const float* static_scales = nullptr;

  /// `static_scales`: in host memory, those of the plane.
  static oracle_plane of(const kv_cache_view& kv, bool is_k) {
    return {static_cast<std::byte*>(is_k ? kv.k : kv.v), is_k ? kv.layout.k : kv.layout.v,
            is_k ? kv.k_scales : kv.v_scales};
  }
  [[nodiscard]] float static_scale(std::int32_t head) const {
    if (!plane.code.has_static_scales()) return 1.0f;
    return static_scales[plane.code.granularity == scale_granularity::head ? head : 0];
  }
  [[nodiscard]] std::byte* element(block_id block, std::int32_t head, std::int32_t token, std::int32_t dim) const {
    return base + plane.strides.offset(block, head, token, dim) * static_cast<std::int64_t>(size_of(plane.code.type));
  }
  [[nodiscard]] std::byte* tail(block_id block, std::int32_t head, std::int32_t token) const {
    return base + to_index(block) * plane.strides.block * static_cast<std::int64_t>(size_of(plane.code.type)) +
           plane.tail.offset + head * plane.tail.head + token * plane.tail.token;
  }
  [[nodiscard]] bool is_record() const { return plane.code.granularity == scale_granularity::record; }
  [[nodiscard]] bool has_tail() const { return plane.code.granularity == scale_granularity::token_head; }
  /// The elements of a row, or the bytes of a record.
  [[nodiscard]] std::int32_t row_size() const { return is_record() ? 656 : plane.head_dim; }
  [[nodiscard]] std::byte* part(block_id block, std::int32_t head, std::int32_t token, std::int32_t i) const {
    if (is_record()) return element(block, head, token, 0) + i;
    return element(block, head, token, i);
  }
  [[nodiscard]] stored_row read(block_id block, std::int32_t head, std::int32_t token) const {
    stored_row row;
    for (std::int32_t d = 0; d < row_size(); ++d) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, part(block, head, token, d), size_of(plane.code.type));
      row.elements.push_back(bits);
    }
    row.scale = static_scale(head);
    if (has_tail()) {
      std::memcpy(&row.scale, tail(block, head, token), 4);
      if (plane.code.type == dtype::u8) std::memcpy(&row.zero, tail(block, head, token) + 4, 4);
    }
    return row;
  }
  void write(block_id block, std::int32_t head, std::int32_t token, const stored_row& row) const {
    for (std::int32_t d = 0; d < row_size(); ++d) {
      std::memcpy(part(block, head, token, d), &row.elements[static_cast<std::size_t>(d)], size_of(plane.code.type));
    }
    if (!has_tail()) return;
    std::memcpy(tail(block, head, token), &row.scale, 4);
    if (plane.code.type == dtype::u8) std::memcpy(tail(block, head, token) + 4, &row.zero, 4);
  }
};

/// Rows to slots, or back.
template <bool ToCache, class Rows>
void oracle_code_transfer(const kv_cache_view& kv, const Rows& k, const Rows& v, const std::int64_t* slots) {
  const kv_layout& layout = kv.layout;
  for (std::int64_t i = 0; i < k.num_tokens; ++i) {
    if (slots[i] < 0) continue;
    const block_id block{static_cast<std::int32_t>(slots[i] / layout.block_size)};
    const auto token = static_cast<std::int32_t>(slots[i] % layout.block_size);
    for_each_plane(layout, [&](const kv_plane& plane, bool is_k) {
      const oracle_plane stored = oracle_plane::of(kv, is_k);
      const Rows& rows = is_k ? k : v;
      for (std::int32_t head = 0; head < layout.num_kv_heads; ++head) {
        if constexpr (ToCache) {
          stored_row row;
          if (plane.code.type == rows.type) {  // bits stay
            for (std::int32_t d = 0; d < plane.head_dim; ++d) {
              std::uint32_t bits = 0;
              std::memcpy(&bits,
                          static_cast<const std::byte*>(rows.data) +
                              row_index(rows, i, head, d) * static_cast<std::int64_t>(size_of(rows.type)),
                          size_of(rows.type));
              row.elements.push_back(bits);
            }
          } else {
            std::vector<float> values;
            for (std::int32_t d = 0; d < plane.head_dim; ++d) {
              values.push_back(load_element(rows.data, rows.type, row_index(rows, i, head, d)));
            }
            row = oracle_encode(plane.code, stored.static_scale(head), values);
          }
          stored.write(block, head, token, row);
        } else {
          const stored_row row = stored.read(block, head, token);
          const std::vector<float> values = oracle_decode(plane.code, row);
          for (std::int32_t d = 0; d < plane.head_dim; ++d) {
            const auto index = static_cast<std::size_t>(d);
            const std::int64_t at = row_index(rows, i, head, d);
            if (plane.code.type == rows.type) {
              std::memcpy(static_cast<std::byte*>(rows.data) + at * static_cast<std::int64_t>(size_of(rows.type)),
                          &row.elements[index], size_of(rows.type));
            } else {
              store_element(rows.data, rows.type, at, values[index]);
            }
          }
        }
      }
    });
  }
}

/// Blocks from `src` to `dst`, pair after pair; bits stay where codes and scales are the same.
inline void oracle_move_code_blocks(const kv_cache_view& src, const kv_cache_view& dst,
                                    std::span<const block_copy> copies) {
  for (const block_copy& copy : copies) {
    for_each_plane(src.layout, [&](const kv_plane&, bool is_k) {
      const oracle_plane from = oracle_plane::of(src, is_k);
      const oracle_plane to = oracle_plane::of(dst, is_k);
      for (std::int32_t token = 0; token < src.layout.block_size; ++token) {
        for (std::int32_t head = 0; head < src.layout.num_kv_heads; ++head) {
          const stored_row row = from.read(copy.src, head, token);
          const bool same_scales = from.is_record() || to.is_record() ? from.is_record() && to.is_record()
                                   : from.has_tail() || to.has_tail()
                                       ? from.has_tail() && to.has_tail()
                                       : std::bit_cast<std::uint32_t>(from.static_scale(head)) ==
                                             std::bit_cast<std::uint32_t>(to.static_scale(head));
          if (from.plane.code.type == to.plane.code.type && same_scales) {
            to.write(copy.dst, head, token, row);
            continue;
          }
          to.write(copy.dst, head, token,
                   oracle_encode(to.plane.code, to.static_scale(head), oracle_decode(from.plane.code, row)));
        }
      }
    });
  }
}

/// Blocks as they are, pair after pair; those of named layouts with tails whole, with what is before and after the
/// tail.
inline void oracle_copy_code_blocks(const kv_cache_view& src, const kv_cache_view& dst,
                                    std::span<const block_copy> copies) {
  for (const block_copy& copy : copies) {
    for_each_plane(src.layout, [&](const kv_plane& plane, bool is_k) {
      const oracle_plane from = oracle_plane::of(src, is_k);
      const oracle_plane to = oracle_plane::of(dst, is_k);
      if (from.has_tail() && src.layout.kind != layout_kind::strided) {
        const std::int64_t bytes = src.layout.block_bytes(plane);
        std::memmove(to.base + to_index(copy.dst) * bytes, from.base + to_index(copy.src) * bytes,
                     static_cast<std::size_t>(bytes));
        return;
      }
      for (std::int32_t token = 0; token < src.layout.block_size; ++token) {
        for (std::int32_t head = 0; head < src.layout.num_kv_heads; ++head) {
          to.write(copy.dst, head, token, from.read(copy.src, head, token));
        }
      }
    });
  }
}

}  // namespace bifolio::test

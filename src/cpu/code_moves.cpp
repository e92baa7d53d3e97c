// SPDX-License-Identifier: Apache-2.0
#include "cpu/code_moves.hpp"

#include <algorithm>
#include <cstring>

#include "common/base/kv_code.hpp"

namespace bifolio::inline v0_2::cpu {
namespace {

using detail::dim_range;
using detail::encoding;
using detail::scale_pair;

/// Dims that pass through the stack at once.
constexpr std::int64_t dims_at_once = 256;

struct scale_math {
  static float add(float a, float b) noexcept { return a + b; }
  static float sub(float a, float b) noexcept { return a - b; }
  static float div(float a, float b) noexcept { return a / b; }
};

/// One head of one token of a side.
struct code_row {
  std::byte* data = nullptr;  // of dim 0
  std::byte* tail = nullptr;  // of its scales, where it has its own
  const kv_plane* plane = nullptr;
  float static_scale = 1.0f;

  [[nodiscard]] dtype type() const noexcept { return plane->code.type; }
  [[nodiscard]] bool is_scaled() const noexcept { return plane->code.granularity != scale_granularity::none; }
  [[nodiscard]] bool is_record() const noexcept { return plane->code.is_record(); }
  [[nodiscard]] bool has_zero() const noexcept { return plane->code.tail_floats() > 1; }
  [[nodiscard]] std::size_t tail_bytes() const noexcept {
    return static_cast<std::size_t>(plane->code.tail_floats()) * sizeof(float);
  }
  [[nodiscard]] bool is_contiguous() const noexcept {
    return plane->strides.dim == 1 && plane->strides.chunk >= plane->head_dim;
  }
  [[nodiscard]] std::byte* at(std::int64_t dim) const noexcept {
    const kv_strides& s = plane->strides;
    return data + (dim / s.chunk * s.chunk_stride + dim % s.chunk * s.dim) * static_cast<std::int64_t>(size_of(type()));
  }
  [[nodiscard]] scale_pair stored_scales() const noexcept {
    if (tail == nullptr) return {static_scale, 0.0f};
    scale_pair scales;
    std::memcpy(&scales.scale, tail, sizeof(float));
    if (has_zero()) std::memcpy(&scales.zero, tail + sizeof(float), sizeof(float));
    return scales;
  }
};

code_row row_of(const code_side& side, const code_place& place, std::int64_t head) noexcept {
  const kv_plane& plane = side.plane;
  const auto element = static_cast<std::int64_t>(size_of(plane.code.type));
  std::byte* const block = side.base + place.block * plane.strides.block * element;
  code_row row;
  row.plane = &plane;
  row.data = block + (head * plane.strides.head + place.token * plane.strides.token) * element;
  if (plane.code.tail_floats() > 0) {
    row.tail = block + plane.tail.offset + head * plane.tail.head + place.token * plane.tail.token;
  }
  if (plane.code.has_static_scales()) {
    row.static_scale = side.static_scales[plane.code.granularity == scale_granularity::head ? head : 0];
  }
  return row;
}

/// Calls `body(memory, offset, num_bytes)` for the runs of elements of dims [first, first + count); `offset` in bytes
/// from the first of these dims.
template <class Body>
void for_each_run(const code_row& row, std::int64_t first, std::int64_t count, const Body& body) noexcept {
  const auto element = static_cast<std::int64_t>(size_of(row.type()));
  const kv_strides& s = row.plane->strides;
  for (std::int64_t dim = first; dim < first + count;) {
    const std::int64_t run = s.dim == 1 ? std::min(s.chunk - dim % s.chunk, first + count - dim) : 1;
    body(row.at(dim), (dim - first) * element, static_cast<std::size_t>(run * element));
    dim += run;
  }
}

void read_elements(const code_row& row, std::int64_t first, std::int64_t count, std::byte* elements) noexcept {
  for_each_run(row, first, count, [&](const std::byte* memory, std::int64_t offset, std::size_t num_bytes) {
    std::memcpy(elements + offset, memory, num_bytes);
  });
}

void write_elements(const code_row& row, std::int64_t first, std::int64_t count, const std::byte* elements) noexcept {
  for_each_run(row, first, count, [&](std::byte* memory, std::int64_t offset, std::size_t num_bytes) {
    std::memcpy(memory, elements + offset, num_bytes);
  });
}

struct element_buffer {
  alignas(64) std::byte bytes[dims_at_once * 4];
};

/// Scale, zero and inverse for a row without scales of its own.
encoding static_encoding(const code_row& row) noexcept { return {{row.static_scale, 0.0f}, 1.0f / row.static_scale}; }

/// The same for a row with its own, which are stored.
encoding store_scales(const code_row& row, const dim_range& range) noexcept {
  const encoding how = detail::encode_token_head<scale_math>(row.type(), range);
  const float stored[2] = {how.stored.scale, how.stored.zero};
  std::memcpy(row.tail, stored, row.tail_bytes());
  return how;
}

/// The values of dims [first, first + count).
void decode(const code_kernels& kernels, const code_row& row, std::int64_t first, std::int64_t count,
            element_buffer& elements, float* values) noexcept {
  const std::byte* from = row.at(first);
  if (!row.is_contiguous()) {
    read_elements(row, first, count, elements.bytes);
    from = elements.bytes;
  }
  kernels.widen[static_cast<std::size_t>(row.type())](values, from, count);
  if (!row.is_scaled()) return;
  const scale_pair scales = row.stored_scales();
  kernels.decode(values, count, scales.scale, scales.zero, row.has_zero());
}

void encode(const code_kernels& kernels, const code_row& row, const encoding& how, std::int64_t first,
            std::int64_t count, float* values, element_buffer& elements) noexcept {
  if (how.inverse == 0.0f) {
    std::fill(values, values + count, 0.0f);
  } else if (row.is_scaled()) {
    kernels.encode(values, count, how.inverse, how.stored.zero, row.has_zero());
  }
  const auto narrow = kernels.narrow[static_cast<std::size_t>(row.type())];
  if (row.is_contiguous()) {
    narrow(row.at(first), values, count);
    return;
  }
  narrow(elements.bytes, values, count);
  write_elements(row, first, count, elements.bytes);
}

/// All dims of a record.
void decode_record(const code_kernels& kernels, const code_row& row, float* values) noexcept {
  for (std::int64_t i = 0; i < kv_record::num_scales; ++i) {
    float scale = 0;
    std::memcpy(&scale, row.data + kv_record::scales_offset + i * std::int64_t{sizeof scale}, sizeof scale);
    constexpr std::int64_t dims = kv_record::dims_per_scale;
    kernels.widen[static_cast<std::size_t>(dtype::e4m3)](values + i * dims, row.data + i * dims, dims);
    kernels.decode(values + i * dims, dims, scale, 0.0f, false);
  }
  kernels.widen[static_cast<std::size_t>(dtype::bf16)](values + kv_record::v_head_dim,
                                                       row.data + kv_record::rotated_offset, kv_record::rotated_dims);
}

/// `values` are spoiled.
void encode_record(const code_kernels& kernels, const code_row& row, float* values) noexcept {
  for (std::int64_t i = 0; i < kv_record::num_scales; ++i) {
    constexpr std::int64_t dims = kv_record::dims_per_scale;
    float* const part = values + i * dims;
    dim_range range;
    kernels.measure(part, dims, range);
    const encoding how = detail::encode_record_dims<scale_math>(range);
    std::memcpy(row.data + kv_record::scales_offset + i * std::int64_t{sizeof how.stored.scale}, &how.stored.scale,
                sizeof how.stored.scale);
    if (how.inverse == 0.0f) {
      std::fill(part, part + dims, 0.0f);
    } else {
      kernels.encode(part, dims, how.inverse, 0.0f, false);
    }
    kernels.narrow[static_cast<std::size_t>(dtype::e4m3)](row.data + i * dims, part, dims);
  }
  float* const rotated = values + kv_record::v_head_dim;
  kernels.decode(rotated, kv_record::rotated_dims, 1.0f, 0.0f, false);  // one NaN
  kernels.narrow[static_cast<std::size_t>(dtype::bf16)](row.data + kv_record::rotated_offset, rotated,
                                                        kv_record::rotated_dims);
}

void store_row(const code_kernels& kernels, const code_row& row, float* values) noexcept {
  if (row.is_record()) return encode_record(kernels, row, values);
  const std::int64_t dims = row.plane->head_dim;
  encoding how = static_encoding(row);
  if (row.tail != nullptr) {
    dim_range range;
    kernels.measure(values, dims, range);
    how = store_scales(row, range);
  }
  element_buffer elements;
  for (std::int64_t dim = 0; dim < dims; dim += dims_at_once) {
    encode(kernels, row, how, dim, std::min(dims - dim, dims_at_once), values + dim, elements);
  }
}

/// One side or both are records.
void move_record(const code_kernels& kernels, const code_row& dst, const code_row& src) noexcept {
  if (dst.is_record() && src.is_record()) {
    std::memcpy(dst.data, src.data, static_cast<std::size_t>(kv_record::bytes));
    return;
  }
  float values[kv_record::head_dim];
  if (src.is_record()) {
    decode_record(kernels, src, values);
  } else {
    element_buffer elements;
    for (std::int64_t dim = 0; dim < kv_record::head_dim; dim += dims_at_once) {
      decode(kernels, src, dim, std::min(kv_record::head_dim - dim, dims_at_once), elements, values + dim);
    }
  }
  store_row(kernels, dst, values);
}

bool keeps_bits(const code_row& dst, const code_row& src) noexcept {
  if (dst.type() != src.type()) return false;
  if (dst.tail != nullptr || src.tail != nullptr) return dst.tail != nullptr && src.tail != nullptr;
  return dst.static_scale == src.static_scale;
}

void move_row(const code_kernels& kernels, const code_row& dst, const code_row& src) noexcept {
  if (dst.is_record() || src.is_record()) return move_record(kernels, dst, src);
  const std::int64_t dims = dst.plane->head_dim;
  element_buffer elements;
  if (keeps_bits(dst, src)) {
    for (std::int64_t dim = 0; dim < dims; dim += dims_at_once) {
      const std::int64_t count = std::min(dims - dim, dims_at_once);
      read_elements(src, dim, count, elements.bytes);
      write_elements(dst, dim, count, elements.bytes);
    }
    if (dst.tail != nullptr) std::memcpy(dst.tail, src.tail, dst.tail_bytes());
    return;
  }

  float values[dims_at_once];
  const bool fits = dims <= dims_at_once;
  if (fits) decode(kernels, src, 0, dims, elements, values);
  encoding how = static_encoding(dst);
  if (dst.tail != nullptr) {
    dim_range range;
    if (fits) kernels.measure(values, dims, range);
    for (std::int64_t dim = 0; !fits && dim < dims; dim += dims_at_once) {
      const std::int64_t count = std::min(dims - dim, dims_at_once);
      decode(kernels, src, dim, count, elements, values);
      kernels.measure(values, count, range);
    }
    how = store_scales(dst, range);
  }
  if (fits) {
    encode(kernels, dst, how, 0, dims, values, elements);
    return;
  }
  for (std::int64_t dim = 0; dim < dims; dim += dims_at_once) {
    const std::int64_t count = std::min(dims - dim, dims_at_once);
    decode(kernels, src, dim, count, elements, values);
    encode(kernels, dst, how, dim, count, values, elements);
  }
}

}  // namespace

void move_token(const code_kernels& kernels, const code_side& dst, const code_place& to, const code_side& src,
                const code_place& from, std::int32_t num_heads) noexcept {
  for (std::int32_t head = 0; head < num_heads; ++head) {
    move_row(kernels, row_of(dst, to, head), row_of(src, from, head));
  }
}

void store_values(const code_kernels& kernels, const code_side& dst, const code_place& to, std::int32_t head,
                  float* values) noexcept {
  store_row(kernels, row_of(dst, to, head), values);
}

}  // namespace bifolio::inline v0_2::cpu

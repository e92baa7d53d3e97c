// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels/cache_ops/kernels.hpp"

#include "cpu/kernels/simd/storage_convert.hpp"

namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA {

extern const cache_kernels cache_table;

namespace {

BIFOLIO_FORCE_INLINE void copy_bytes(void* dst, const void* src, std::size_t num_bytes) noexcept {
  __builtin_memcpy(dst, src, num_bytes);
}

/// `count` elements, both sides contiguous, one type: bytes.
template <class T>
BIFOLIO_FORCE_INLINE void copy_row(T* dst, const T* src, std::int64_t count) noexcept {
  constexpr std::int64_t step = 16 / static_cast<std::int64_t>(sizeof(T));
  if (count >= 16 * step) {
    copy_bytes(dst, src, static_cast<std::size_t>(count) * sizeof(T));
    return;
  }
  if (count >= step) {
    std::int64_t i = 0;
    for (; i + step <= count; i += step) copy_bytes(dst + i, src + i, 16);
    if (i < count)
      copy_bytes(dst + count - step, src + count - step, 16);  // the last 16 bytes, once more where they overlap
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) dst[i] = src[i];
}

/// `count` < 4 elements through a padded vector, so that one formula converts every element.
template <class D, class S>
BIFOLIO_FORCE_INLINE void convert_few(D* dst, const S* src, std::int64_t count) noexcept {
  S padded[4] = {};
  D done[4];
  for (std::int64_t i = 0; i < count; ++i) padded[i] = src[i];
  narrow<4>(done, widen<4>(padded));
  for (std::int64_t i = 0; i < count; ++i) dst[i] = done[i];
}

/// `count` elements, both sides contiguous. Tails are vectors that overlap what is already done, never reads past the
/// end.
template <class D, class S>
BIFOLIO_FORCE_INLINE void convert_row(D* dst, const S* src, std::int64_t count) noexcept {
  if constexpr (sizeof(D) == sizeof(S) && dtype_of<D> == dtype_of<S>) {
    copy_row(dst, src, count);
  } else {
    std::int64_t i = 0;
    for (; i + max_lanes <= count; i += max_lanes) narrow<max_lanes>(dst + i, widen<max_lanes>(src + i));
    if (i == count) return;
    if (i > 0) {
      narrow<max_lanes>(dst + count - max_lanes, widen<max_lanes>(src + count - max_lanes));
      return;
    }
    if constexpr (max_lanes > 8) {
      if (count >= 8) {
        narrow<8>(dst, widen<8>(src));
        if (count > 8) narrow<8>(dst + count - 8, widen<8>(src + count - 8));
        return;
      }
    }
    if (count >= 4) {
      narrow<4>(dst, widen<4>(src));
      if (count > 4) narrow<4>(dst + count - 4, widen<4>(src + count - 4));
      return;
    }
    convert_few(dst, src, count);
  }
}

template <class D, class S>
BIFOLIO_FORCE_INLINE void move_rows(D* dst, const S* src, const move_loop& rows, const move_loop& row) noexcept {
  // The rows of x_split: 16 bytes of the cache, a count that the compiler knows.
  constexpr std::int64_t chunk = 16 / static_cast<std::int64_t>(sizeof(D) < sizeof(S) ? sizeof(D) : sizeof(S));
  if (row.count == chunk) {
    for (std::int64_t i = 0; i < rows.count; ++i) convert_row(dst + i * rows.dst, src + i * rows.src, chunk);
    return;
  }
  for (std::int64_t i = 0; i < rows.count; ++i) convert_row(dst + i * rows.dst, src + i * rows.src, row.count);
}

/// Elements of the destination's type, turned as whole registers: 8 × 8 of two bytes, 4 × 4 of four.
template <class D>
struct square;

struct square_16 {
  static constexpr int side = 8;
  static constexpr std::size_t extent = 8;
  typedef std::uint16_t line __attribute__((vector_size(16)));
  BIFOLIO_FORCE_INLINE static line low(line a, line b) noexcept {
    return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  }
  BIFOLIO_FORCE_INLINE static line high(line a, line b) noexcept {
    return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
  }
};
template <>
struct square<float16> : square_16 {};
template <>
struct square<bfloat16> : square_16 {};
template <>
struct square<float> {
  static constexpr int side = 4;
  static constexpr std::size_t extent = 4;
  typedef std::uint32_t line __attribute__((vector_size(16)));
  BIFOLIO_FORCE_INLINE static line low(line a, line b) noexcept { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
  BIFOLIO_FORCE_INLINE static line high(line a, line b) noexcept { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }
};

/// dst[i · dst_step + j] = src[j · src_step + i] for i, j < side. A perfect shuffle of the lines, log2(side) times,
/// transposes.
template <class D, class S>
BIFOLIO_FORCE_INLINE void transpose_square(D* dst, std::int64_t dst_step, const S* src,
                                           std::int64_t src_step) noexcept {
  using sq = square<D>;
  using line = typename sq::line;
  constexpr int side = sq::side;
  line lines[sq::extent];
  for (int j = 0; j < side; ++j) {
    D converted[sq::extent];
    convert_row(converted, src + j * src_step, side);
    copy_bytes(&lines[j], converted, sizeof(line));
  }
  for (int stage = 1; stage < side; stage *= 2) {
    line next[sq::extent];
    for (int j = 0; j < side / 2; ++j) {
      next[2 * j] = sq::low(lines[j], lines[j + side / 2]);
      next[2 * j + 1] = sq::high(lines[j], lines[j + side / 2]);
    }
    for (int j = 0; j < side; ++j) lines[j] = next[j];
  }
  for (int i = 0; i < side; ++i) copy_bytes(dst + i * dst_step, &lines[i], sizeof(line));
}

/// The edge of a transpose: at most side × side.
template <class D, class S>
BIFOLIO_FORCE_INLINE void transpose_edge(D* dst, std::int64_t dst_step, const S* src, std::int64_t src_step,
                                         std::int64_t num_i, std::int64_t num_j) noexcept {
  for (std::int64_t j = 0; j < num_j; ++j) {
    D converted[square<D>::extent];
    convert_row(converted, src + j * src_step, num_i);
    for (std::int64_t i = 0; i < num_i; ++i) dst[i * dst_step + j] = converted[i];
  }
}

template <class D, class S>
BIFOLIO_FORCE_INLINE void move_transposed(D* dst, const S* src, const move_loop& a, const move_loop& b) noexcept {
  constexpr std::int64_t side = square<D>::side;
  for (std::int64_t i = 0; i < a.count; i += side) {
    const std::int64_t num_i = a.count - i < side ? a.count - i : side;
    for (std::int64_t j = 0; j < b.count; j += side) {
      const std::int64_t num_j = b.count - j < side ? b.count - j : side;
      D* to = dst + i * a.dst + j;
      const S* from = src + j * b.src + i;
      if (num_i == side && num_j == side) {
        transpose_square(to, a.dst, from, b.src);
      } else {
        transpose_edge(to, a.dst, from, b.src, num_i, num_j);
      }
    }
  }
}

template <class D, class S>
BIFOLIO_FORCE_INLINE void move_elements(D* dst, const S* src, const move_loop& a, const move_loop& b) noexcept {
  constexpr std::int64_t width = 64;
  S from[width];
  D to[width];
  for (std::int64_t i = 0; i < a.count; ++i) {
    for (std::int64_t j = 0; j < b.count; j += width) {
      const std::int64_t count = b.count - j < width ? b.count - j : width;
      const S* s = src + i * a.src + j * b.src;
      D* d = dst + i * a.dst + j * b.dst;
      for (std::int64_t e = 0; e < count; ++e) from[e] = s[e * b.src];
      convert_row(to, from, count);
      for (std::int64_t e = 0; e < count; ++e) d[e * b.dst] = to[e];
    }
  }
}

template <class D, class S>
void move(void* dst, const void* src, const move_plan& plan) noexcept {
  const move_loop& x = plan.outer[0];
  const move_loop& y = plan.outer[1];
  const move_loop& z = plan.outer[2];
  for (std::int64_t i = 0; i < x.count; ++i) {
    for (std::int64_t j = 0; j < y.count; ++j) {
      for (std::int64_t l = 0; l < z.count; ++l) {
        D* const d = static_cast<D*>(dst) + i * x.dst + j * y.dst + l * z.dst;
        const S* const s = static_cast<const S*>(src) + i * x.src + j * y.src + l * z.src;
        switch (plan.shape) {
          case move_shape::rows:
            move_rows(d, s, plan.a, plan.b);
            break;
          case move_shape::transpose:
            if constexpr (sizeof(D) > 1) {
              move_transposed(d, s, plan.a, plan.b);
              break;
            }
            [[fallthrough]];  // bytes stay in their order
          case move_shape::elements:
            move_elements(d, s, plan.a, plan.b);
            break;
        }
      }
    }
  }
}

template <class S>
void widen_dims(float* dst, const void* src, std::int64_t count) noexcept {
  convert_row(dst, static_cast<const S*>(src), count);
}

template <class D>
void narrow_dims(void* dst, const float* src, std::int64_t count) noexcept {
  convert_row(static_cast<D*>(dst), src, count);
}

void decode_dims(float* values, std::int64_t count, float scale, float zero, bool has_zero) noexcept {
  constexpr std::uint32_t nan = 0x7fc00000u;
  for (std::int64_t i = 0; i < count; ++i) {
    const float product = values[i] * scale;
    const float value = has_zero ? product + zero : product;
    const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, value);
    values[i] = __builtin_bit_cast(float, (bits & 0x7fffffffu) > 0x7f800000u ? nan : bits);
  }
}

void encode_dims(float* values, std::int64_t count, float inverse, float zero, bool has_zero) noexcept {
  for (std::int64_t i = 0; i < count; ++i) values[i] = (has_zero ? values[i] - zero : values[i]) * inverse;
}

/// Integers that are in the order of the floats, so that the loop may take them in any order.
void measure_dims(const float* values, std::int64_t count, detail::dim_range& range) noexcept {
  const auto key_of = [](float value) {
    const std::int32_t bits = __builtin_bit_cast(std::int32_t, value);
    return bits ^ ((bits >> 31) & 0x7fffffff);
  };
  const auto value_of = [](std::int32_t key) { return __builtin_bit_cast(float, key ^ ((key >> 31) & 0x7fffffff)); };
  std::int32_t least = key_of(range.least);
  std::int32_t most = key_of(range.most);
  std::int32_t magnitude = __builtin_bit_cast(std::int32_t, range.magnitude);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int32_t key = key_of(values[i]);
    const std::int32_t bits = __builtin_bit_cast(std::int32_t, values[i]) & 0x7fffffff;
    least = key < least ? key : least;
    most = key > most ? key : most;
    magnitude = bits > magnitude ? bits : magnitude;
  }
  range.least = value_of(least);
  range.most = value_of(most);
  range.magnitude = __builtin_bit_cast(float, magnitude);
  range.finite = range.finite && magnitude < 0x7f800000;
}

constexpr cache_kernels make_table() noexcept {
  cache_kernels table = {};
  for (const dtype dst : all_dtypes) {
    const auto to = static_cast<std::size_t>(dst);
    visit_dtype(dst, [&](auto dst_traits) {
      using storage = typename decltype(dst_traits)::storage;
      table.codes.widen[to] = &widen_dims<storage>;
      table.codes.narrow[to] = &narrow_dims<storage>;
      if constexpr (sizeof(storage) == 1) table.move[to][to] = &move<std::uint8_t, std::uint8_t>;
    });
    if (!is_tensor_dtype(dst)) continue;
    for (const dtype src : tensor_dtypes) {
      move_kernel& entry = table.move[to][static_cast<std::size_t>(src)];
      visit_tensor_dtype(dst, [&](auto dst_traits) {
        visit_tensor_dtype(src, [&](auto src_traits) {
          entry = &move<typename decltype(dst_traits)::storage, typename decltype(src_traits)::storage>;
        });
      });
    }
  }
  table.codes.decode = &decode_dims;
  table.codes.encode = &encode_dims;
  table.codes.measure = &measure_dims;
  return table;
}

}  // namespace

constexpr cache_kernels cache_table = make_table();

}  // namespace bifolio::inline v0_2::cpu::BIFOLIO_ISA

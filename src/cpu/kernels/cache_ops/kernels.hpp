// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Every cache call comes down to one thing: elements move from one strided place to another and change their type on
/// the way. A `move_plan` is that work for one tile (a run of tokens, a block, a part of a block) with the loops
/// already merged, ordered and classified; the kernel of a pair of dtypes carries it out at any pair of base pointers.

#include <bifolio/dtype.hpp>
#include <cstddef>
#include <cstdint>

#include "common/base/kv_code.hpp"

namespace bifolio::inline v0_2::cpu {

/// One loop: how often, and how far each side steps, in elements of that side.
struct move_loop {
  std::int64_t count = 1;
  std::int64_t src = 0;
  std::int64_t dst = 0;
};

enum class move_shape : std::uint8_t {
  rows,       ///< `b` is contiguous on both sides; `a` walks over the rows
  transpose,  ///< `a` is contiguous in the source, `b` in the destination
  elements,   ///< anything else
};

struct move_plan {
  static constexpr std::int32_t max_outer = 3;
  move_shape shape = move_shape::rows;
  move_loop outer[max_outer];  ///< slowest first; loops that are not needed count to 1
  move_loop a;
  move_loop b;
};

/// Source and destination do not overlap and are aligned to their elements.
using move_kernel = void (*)(void* dst, const void* src, const move_plan& plan) noexcept;

/// What planes with codes go through, `count` dims of one token and head at a time: as float32 in between.
struct code_kernels {
  void (*widen[num_dtypes])(float* dst, const void* src, std::int64_t count) noexcept;
  void (*narrow[num_dtypes])(void* dst, const float* src, std::int64_t count) noexcept;
  /// value = code · scale, + zero where `has_zero`; NaN becomes 0x7fc00000.
  void (*decode)(float* values, std::int64_t count, float scale, float zero, bool has_zero) noexcept;
  /// value · inverse, of value − zero where `has_zero`: to be narrowed.
  void (*encode)(float* values, std::int64_t count, float inverse, float zero, bool has_zero) noexcept;
  /// Widens `range` by the values.
  void (*measure)(const float* values, std::int64_t count, detail::dim_range& range) noexcept;
};

/// Kernels of append, gather, copy, convert and swap.
struct cache_kernels {
  /// [dtype of dst][dtype of src], for dtypes of tensors and for bytes that stay as they are.
  move_kernel move[num_dtypes][num_dtypes];
  code_kernels codes;

  [[nodiscard]] move_kernel mover(dtype dst, dtype src) const noexcept {
    return move[static_cast<std::size_t>(dst)][static_cast<std::size_t>(src)];
  }
};

}  // namespace bifolio::inline v0_2::cpu

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Turns two strided descriptions of the same tile into the fewest loops, and the loops into a `move_plan`.

#include <bifolio/kv_layout.hpp>
#include <bifolio/tensor_view.hpp>
#include <cstdint>

#include "cpu/kernels/cache_ops/kernels.hpp"

namespace bifolio::inline v0_2::cpu {

/// What a tile is made of.
struct tile_shape {
  std::int64_t num_heads = 0;
  std::int64_t num_tokens = 0;
  std::int64_t head_dim = 0;
  friend constexpr bool operator==(const tile_shape&, const tile_shape&) = default;
};

/// The loops of a tile, merged, by falling step of the source; none for a single element.
struct loop_nest {
  static constexpr std::int32_t max_loops = 5;
  std::int32_t num_loops = 0;
  move_loop loops[max_loops];
};

/// A part of a nest, and where it starts on the two sides, in elements.
struct nest_part {
  loop_nest nest;
  std::int64_t src = 0;
  std::int64_t dst = 0;
};

/// Whether dims of both sides can be written as loops: the larger chunk is a multiple of the smaller. Always so when
/// one side does not split its heads.
[[nodiscard]] bool chunks_nest(const kv_strides& src, const kv_strides& dst) noexcept;

/// Requires chunks_nest. The strides' block step is not looked at.
[[nodiscard]] loop_nest make_nest(const tile_shape& tile, const kv_strides& src, const kv_strides& dst) noexcept;

/// Part `index` of `num_parts` of the slowest loop; an empty nest with a count of 0 where there is less to share out.
/// A loop that is contiguous on both sides is cut at multiples of 64 elements.
[[nodiscard]] nest_part part_of(const loop_nest& nest, std::int64_t index, std::int64_t num_parts) noexcept;

[[nodiscard]] move_plan make_plan(const loop_nest& nest) noexcept;

/// Rows of k, v in the terms of a layout.
template <class Void>
[[nodiscard]] constexpr kv_strides strides_of(const basic_tensor_view<Void>& rows) noexcept {
  return {.block = 0,
          .head = rows.head_stride,
          .token = rows.token_stride,
          .dim = 1,
          .chunk_stride = rows.head_dim,
          .chunk = rows.head_dim};
}

}  // namespace bifolio::inline v0_2::cpu

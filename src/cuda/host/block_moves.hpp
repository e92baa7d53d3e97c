// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Host-side arithmetic of moving blocks: which pairs may move at once, and how the inside of a block is arranged in
/// memory.

#include <bifolio/kv_layout.hpp>
#include <bifolio/step.hpp>
#include <cstddef>
#include <cstdint>
#include <span>

namespace bifolio::inline v0_2::cuda {

/// Number of leading pairs, at most `limit` (≤ max_wave), that give the same result in any order as one after another.
/// `same_cache`: sources and destinations are blocks of one cache, so that a destination may also be a source.
inline constexpr std::size_t max_wave = 1024;
[[nodiscard]] std::size_t independent_prefix(std::span<const block_copy> copies, bool same_cache,
                                             std::size_t limit = max_wave) noexcept;

/// Leading pairs whose sources and destinations both count up by one: one run of blocks.
[[nodiscard]] std::size_t consecutive_prefix(std::span<const block_copy> copies) noexcept;

/// Loops that walk the inside of one block in one plane, outermost first; the innermost run is contiguous.
struct block_shape {
  struct loop {
    std::int64_t count = 1;
    std::int64_t stride = 0;  ///< elements
  };
  std::int64_t run = 1;        ///< contiguous elements
  std::int32_t num_loops = 0;  ///< 0: the whole block is one run
  loop loops[5];
};
[[nodiscard]] block_shape shape_of(const kv_layout& layout, const kv_plane& plane) noexcept;

}  // namespace bifolio::inline v0_2::cuda

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Planning of decode on the x_split layout: a host computation from lengths.

#include <cstddef>
#include <cstdint>

#include "cuda/host/plan_input.hpp"

namespace bifolio::inline v0_2::cuda {

/// How many partitions of 512 positions the longest sequence of one new token has, and whether one CTA walks them all
/// (v1) or several take them in turns (v2), whichever is estimated to be faster for the step's lengths. Each is right
/// for all lengths of `max_partitions`, with the same bits, and has its workspace: the choice may change from step to
/// step, without hysteresis, and is no part of the graph epoch. A captured graph keeps the choice of the step that it
/// was captured at. Nothing is uploaded: the kernels read the lengths on the device.
struct x_split_plan {
  bool has_decodes = false;          ///< sequences with one new token, which this implementation takes
  bool has_others = false;           ///< sequences with more, which the general one takes
  std::int32_t num_splits = 1;       ///< CTAs for the partitions of a row; 1: v1
  std::int32_t max_partitions = 0;   ///< a power of two, so that a growing sequence seldom changes it
  std::size_t workspace_floats = 0;  ///< v2's, also where v1 was chosen
};
/// `least_partitions`: what `reserve_plan` made room for, so that sequences grow up to there on the same kernels. v1 is
/// then chosen only where a sequence of that length would not make it the slower one.
[[nodiscard]] x_split_plan plan_x_split(const plan_input& input, std::int32_t least_partitions = 1) noexcept;

/// What plans need at most, in steps within these limits.
struct x_split_room {
  std::int32_t max_partitions = 1;
  std::size_t workspace_floats = 0;
};
[[nodiscard]] x_split_room max_x_split_room(const attention_spec& spec, const step_limits& limits,
                                            const device_numbers& device, std::int32_t least_partitions) noexcept;

}  // namespace bifolio::inline v0_2::cuda

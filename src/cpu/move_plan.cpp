// SPDX-License-Identifier: Apache-2.0
#include "cpu/move_plan.hpp"

namespace bifolio::inline v0_2::cpu {
namespace {

/// The steps of the loops over dims: chunks of `large`, chunks of `small` within one, dims within that.
struct dim_steps {
  std::int64_t large;
  std::int64_t small;
  std::int64_t dim;
};

dim_steps steps_of(const kv_strides& strides, std::int64_t large, std::int64_t small) noexcept {
  if (strides.chunk == large) return {strides.chunk_stride, small * strides.dim, strides.dim};
  return {large / small * strides.chunk_stride, strides.chunk_stride, strides.dim};
}

bool merges(const move_loop& slow, const move_loop& fast) noexcept {
  return slow.src == fast.src * fast.count && slow.dst == fast.dst * fast.count;
}

/// By falling step of the source: its lines are read in order and fetched ahead, the destination's wait in the cache.
/// The other order cost 40 % where float32 rows go to 16-bit hnd blocks (21 against 35 GB/s), and a fifth for x_split.
void add(loop_nest& nest, const move_loop& loop) noexcept {
  if (loop.count == 1) return;
  std::int32_t at = nest.num_loops++;
  for (; at > 0 && nest.loops[at - 1].src < loop.src; --at) nest.loops[at] = nest.loops[at - 1];
  nest.loops[at] = loop;
}

/// Removes loop `at` and returns it.
move_loop take(loop_nest& nest, std::int32_t at) noexcept {
  const move_loop loop = nest.loops[at];
  --nest.num_loops;
  for (std::int32_t i = at; i < nest.num_loops; ++i) nest.loops[i] = nest.loops[i + 1];
  return loop;
}

move_loop take_last(loop_nest& nest) noexcept {
  return nest.num_loops > 0 ? take(nest, nest.num_loops - 1) : move_loop{};
}

}  // namespace

bool chunks_nest(const kv_strides& src, const kv_strides& dst) noexcept {
  return src.chunk > dst.chunk ? src.chunk % dst.chunk == 0 : dst.chunk % src.chunk == 0;
}

loop_nest make_nest(const tile_shape& tile, const kv_strides& src, const kv_strides& dst) noexcept {
  const std::int64_t large = src.chunk > dst.chunk ? src.chunk : dst.chunk;
  const std::int64_t small = src.chunk > dst.chunk ? dst.chunk : src.chunk;
  const dim_steps s = steps_of(src, large, small);
  const dim_steps d = steps_of(dst, large, small);
  loop_nest nest;
  add(nest, {tile.num_heads, src.head, dst.head});
  add(nest, {tile.num_tokens, src.token, dst.token});
  add(nest, {tile.head_dim / large, s.large, d.large});
  add(nest, {large / small, s.small, d.small});
  add(nest, {small, s.dim, d.dim});
  for (std::int32_t i = nest.num_loops - 1; i > 0; --i) {
    if (!merges(nest.loops[i - 1], nest.loops[i])) continue;
    move_loop merged = take(nest, i);
    merged.count *= nest.loops[i - 1].count;
    nest.loops[i - 1] = merged;
  }
  return nest;
}

nest_part part_of(const loop_nest& nest, std::int64_t index, std::int64_t num_parts) noexcept {
  nest_part part{nest, 0, 0};
  if (nest.num_loops == 0) {
    // One element belongs to the first part.
    if (index > 0) {
      part.nest.num_loops = 1;
      part.nest.loops[0] = {0, 0, 0};
    }
    return part;
  }
  move_loop& loop = part.nest.loops[0];
  const std::int64_t grain = loop.src == 1 && loop.dst == 1 ? 64 : 1;
  const std::int64_t grains = (loop.count + grain - 1) / grain;
  const std::int64_t share = (grains + num_parts - 1) / num_parts * grain;
  const std::int64_t begin = share * index < loop.count ? share * index : loop.count;
  const std::int64_t end = loop.count - begin < share ? loop.count : begin + share;
  loop.count = end - begin;
  part.src = begin * loop.src;
  part.dst = begin * loop.dst;
  return part;
}

move_plan make_plan(const loop_nest& nest) noexcept {
  loop_nest rest = nest;
  std::int32_t row = -1;
  std::int32_t src_run = -1;
  std::int32_t dst_run = -1;
  for (std::int32_t i = 0; i < rest.num_loops; ++i) {
    const move_loop& loop = rest.loops[i];
    if (loop.src == 1 && loop.dst == 1) row = i;
    if (loop.src == 1) src_run = i;
    if (loop.dst == 1) dst_run = i;
  }

  move_plan plan;
  if (rest.num_loops == 0 || row >= 0) {
    plan.shape = move_shape::rows;
    plan.b = row >= 0 ? take(rest, row) : move_loop{1, 1, 1};
    plan.a = take_last(rest);
  } else if (src_run >= 0 && dst_run >= 0) {
    plan.shape = move_shape::transpose;
    plan.a = rest.loops[src_run];
    plan.b = rest.loops[dst_run];
    (void)take(rest, src_run > dst_run ? src_run : dst_run);
    (void)take(rest, src_run > dst_run ? dst_run : src_run);
  } else {
    plan.shape = move_shape::elements;
    const std::int32_t run = dst_run >= 0 ? dst_run : src_run;
    plan.b = run >= 0 ? take(rest, run) : take_last(rest);
    plan.a = take_last(rest);
  }
  for (std::int32_t i = 0; i < rest.num_loops; ++i) plan.outer[i] = rest.loops[i];
  return plan;
}

}  // namespace bifolio::inline v0_2::cpu

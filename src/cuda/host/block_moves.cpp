// SPDX-License-Identifier: Apache-2.0
#include "cuda/host/block_moves.hpp"

#include "common/base/kv_code.hpp"

namespace bifolio::inline v0_2::cuda {
namespace {

/// A set of block ids on the stack, open addressing, at most half full.
class small_set {
 public:
  [[nodiscard]] bool contains(std::int32_t id) const noexcept {
    for (std::size_t at = place(id);; at = (at + 1) % size) {
      if (slots_[at] == std::int64_t{id} + 1) return true;
      if (slots_[at] == 0) return false;
    }
  }
  void insert(std::int32_t id) noexcept {
    std::size_t at = place(id);
    while (slots_[at] != 0 && slots_[at] != std::int64_t{id} + 1) at = (at + 1) % size;
    slots_[at] = std::int64_t{id} + 1;
  }

 private:
  static constexpr std::size_t size = 2 * max_wave;
  [[nodiscard]] static std::size_t place(std::int32_t id) noexcept {
    return (static_cast<std::uint32_t>(id) * 2654435769u >> 16) % size;  // Fibonacci hashing, Knuth 6.4
  }
  std::int64_t slots_[size] = {};  // id + 1; 0 = free
};

}  // namespace

std::size_t independent_prefix(std::span<const block_copy> copies, bool same_cache, std::size_t limit) noexcept {
  small_set written;
  small_set read;
  std::size_t count = 0;
  for (; count < copies.size() && count < limit; ++count) {
    const std::int32_t src = to_index(copies[count].src);
    const std::int32_t dst = to_index(copies[count].dst);
    if (written.contains(dst)) break;
    if (same_cache && (written.contains(src) || read.contains(dst))) break;
    written.insert(dst);
    if (same_cache && src != dst) read.insert(src);
  }
  return count;
}

std::size_t consecutive_prefix(std::span<const block_copy> copies) noexcept {
  if (copies.empty()) return 0;
  std::size_t count = 1;
  const auto follows = [](block_id next, block_id id) {
    return std::int64_t{to_index(next)} == std::int64_t{to_index(id)} + 1;
  };
  while (count < copies.size() && follows(copies[count].src, copies[count - 1].src) &&
         follows(copies[count].dst, copies[count - 1].dst)) {
    ++count;
  }
  return count;
}

block_shape shape_of(const kv_layout& layout, const kv_plane& of_values) noexcept {
  const kv_plane plane = detail::stored_plane(of_values);
  const kv_strides& strides = plane.strides;
  using loop = block_shape::loop;
  const loop all[] = {{layout.num_kv_heads, strides.head},
                      {layout.block_size, strides.token},
                      {plane.head_dim / strides.chunk, strides.chunk_stride},
                      {strides.chunk, strides.dim}};
  block_shape shape;
  for (const loop& each : all) {
    if (each.count == 1) continue;
    std::int32_t at = shape.num_loops++;
    for (; at > 0 && shape.loops[at - 1].stride < each.stride; --at) shape.loops[at] = shape.loops[at - 1];
    shape.loops[at] = each;
  }
  while (shape.num_loops > 0 && shape.loops[shape.num_loops - 1].stride == shape.run) {
    shape.run *= shape.loops[--shape.num_loops].count;
  }
  return shape;
}

}  // namespace bifolio::inline v0_2::cuda

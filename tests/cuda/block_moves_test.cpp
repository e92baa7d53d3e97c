// SPDX-License-Identifier: Apache-2.0
// Which pairs may move at once, and how the inside of a block is arranged in memory.
#include "cuda/host/block_moves.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::cuda;

namespace {

using blocks = std::vector<std::int32_t>;

void move_in_order(blocks& src, blocks& dst, std::span<const block_copy> pairs) {
  for (const block_copy& pair : pairs) {
    dst[static_cast<std::size_t>(to_index(pair.dst))] = src[static_cast<std::size_t>(to_index(pair.src))];
  }
}

}  // namespace

TEST_CASE("independent pairs give the same result in any order, and the next pair would not always") {
  std::mt19937_64 random(test::test_seed());
  CAPTURE(test::seed_note());
  std::int64_t num_waves = 0;
  for (int round = 0; round < 2000; ++round) {
    const int num_blocks = 2 + static_cast<int>(random() % 12);
    const bool same_cache = random() % 2 == 0;
    std::vector<block_copy> pairs(random() % 20);
    for (block_copy& pair : pairs) {
      pair = {block_id{static_cast<std::int32_t>(random() % static_cast<unsigned>(num_blocks))},
              block_id{static_cast<std::int32_t>(random() % static_cast<unsigned>(num_blocks))}};
    }
    std::span<const block_copy> rest = pairs;
    while (!rest.empty()) {
      const std::size_t count = independent_prefix(rest, same_cache);
      REQUIRE(count >= 1);
      REQUIRE(count <= rest.size());
      ++num_waves;
      blocks start(static_cast<std::size_t>(num_blocks));
      for (std::int32_t i = 0; i < num_blocks; ++i) start[static_cast<std::size_t>(i)] = i;
      blocks other(start.size(), -1);
      blocks expected_same = start;
      blocks expected_other = other;
      move_in_order(expected_same, same_cache ? expected_same : expected_other, rest.first(count));
      // At once: all sources are read before the first destination is written, in a shuffled order.
      std::vector<block_copy> shuffled(rest.begin(), rest.begin() + static_cast<std::ptrdiff_t>(count));
      std::shuffle(shuffled.begin(), shuffled.end(), random);
      blocks source = start;
      blocks got_same = start;
      blocks got_other = other;
      move_in_order(source, same_cache ? got_same : got_other, shuffled);
      CHECK((same_cache ? got_same == expected_same : got_other == expected_other));
      // One after another, shuffled.
      blocks in_place = start;
      blocks in_other = other;
      move_in_order(in_place, same_cache ? in_place : in_other, shuffled);
      CHECK((same_cache ? in_place == expected_same : in_other == expected_other));
      rest = rest.subspan(count);
    }
  }
  CHECK(num_waves > 2000);
}

TEST_CASE("a wave never exceeds its limit and pairs without a conflict are one wave") {
  std::vector<block_copy> pairs;
  for (std::int32_t i = 0; i < 3000; ++i) pairs.push_back({block_id{i}, block_id{2147483647 - i}});
  CHECK(independent_prefix(pairs, true) == max_wave);
  CHECK(independent_prefix(pairs, true, 7) == 7);
  CHECK(independent_prefix(std::span(pairs).first(1000), true) == 1000);
}

TEST_CASE("consecutive blocks are found, also at the end of the range of ids") {
  const auto pair = [](std::int32_t src, std::int32_t dst) { return block_copy{block_id{src}, block_id{dst}}; };
  CHECK(consecutive_prefix({}) == 0);
  CHECK(consecutive_prefix(std::vector{pair(3, 9), pair(4, 10), pair(5, 11), pair(7, 12)}) == 3);
  CHECK(consecutive_prefix(std::vector{pair(3, 9), pair(3, 10)}) == 1);
  CHECK(consecutive_prefix(std::vector{pair(2147483647, 1), pair(-2147483647 - 1, 2)}) == 1);
}

TEST_CASE("the inside of a block is one run in the named layouts, and loops around runs in a strided one") {
  for (const layout_kind kind : {layout_kind::hnd, layout_kind::nhd, layout_kind::x_split}) {
    const kv_layout layout = make_layout(kind, dtype::f16, 3, 80, 5);
    for (const kv_plane* plane : {&layout.k, &layout.v}) {
      const block_shape shape = shape_of(layout, *plane);
      CHECK(shape.num_loops == 0);
      CHECK(shape.run == layout.block_elements(*plane));
    }
  }
  kv_layout gaps = make_layout(layout_kind::hnd, dtype::f16, 3, 8, 4);
  gaps.kind = layout_kind::strided;
  gaps.k.strides.head = 100;
  const block_shape shape = shape_of(gaps, gaps.k);
  CHECK(shape.run == 32);
  REQUIRE(shape.num_loops == 1);
  CHECK(shape.loops[0].count == 3);
  CHECK(shape.loops[0].stride == 100);
}

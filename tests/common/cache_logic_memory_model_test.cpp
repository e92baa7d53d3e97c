// SPDX-License-Identifier: Apache-2.0
/// As cache_logic_memory_test.cpp, for a step of a model's cache: what sequences hold is there after a failed begin.

#include <doctest/doctest.h>

#include <bifolio/model_cache.hpp>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#include "common/failing_memory.hpp"
#include "support/token_ids.hpp"

namespace bifolio::test {
namespace {

constexpr std::int32_t block_size = 4, num_groups = 2;

/// A sequence of six tokens whose second block is full of a pattern, forks of it to which the manager was told to
/// append by hand, so that copies of the second group wait in the manager, and one more fork, `c`.
struct copied_world {
  std::unique_ptr<backend> where = make_backend({}, {.executor_choice = executor_kind::serial});
  model_cache cache{*where, config()};
  std::vector<token_id> tokens = to_ids({1, 2, 3, 4, 5, 6});
  seq_id a{}, c{};

  static model_cache_config config() {
    model_cache_config made{.num_layers = num_groups};
    made.cache.max_sequences = 16;
    made.cache.groups = {{.kind = group_kind::full, .block_size = block_size, .num_blocks = 32},
                         {.kind = group_kind::window, .block_size = block_size, .num_blocks = 32, .window = 64}};
    for (std::int32_t layer = 0; layer < num_groups; ++layer) {
      made.groups.push_back({.layers = {layer}, .attention = {.num_q_heads = 1, .num_kv_heads = 1, .qk_head_dim = 8}});
    }
    return made;
  }
  copied_world() {
    a = cache.open(tokens).seq;
    cache.begin_step({{a, tokens}}).commit();
    for (std::int32_t g = 0; g < num_groups; ++g) std::memset(tail_of(a, g).data(), 0x55, tail_of(a, g).size());
    for (int i = 0; i < 5; ++i) {
      const append_result grown = cache.manager().append(cache.fork(a).seq, 1);
      require(grown.has_copy() && cache.engine(0).copy_blocks({&grown.copy, 1}) == errc::ok);
    }
    c = cache.fork(a).seq;
  }
  /// K of the second block of a sequence.
  [[nodiscard]] std::span<std::byte> tail_of(seq_id seq, std::int32_t group) {
    const kv_cache_view& layer = cache.engine(group).layers()[0];
    const auto num_bytes = static_cast<std::size_t>(layer.layout.block_bytes() / 2);
    const auto block = static_cast<std::size_t>(to_index(cache.manager().block_at(seq, 1, group)));
    return {static_cast<std::byte*>(layer.k) + block * num_bytes, num_bytes};
  }
  [[nodiscard]] bool holds_its_tokens(std::int32_t group) {
    return std::memcmp(tail_of(c, group).data(), tail_of(a, group).data(), tail_of(a, group).size()) == 0;
  }
};

TEST_CASE("a step that cannot begin for lack of memory leaves every block what it was, also where copies had begun") {
  const std::vector<token_id> next = to_ids({7});
  int most = 0;
  for (const bool for_good : {false, true}) {
    for (int nth = 1;; ++nth) {
      REQUIRE(nth < 200);
      copied_world world;
      fails_for_good = for_good;
      num_failures = 0;
      calls_until_failure = nth;
      bool threw = true;
      try {
        model_step step = world.cache.begin_step({{world.c, next}});
        threw = false;
      } catch (const error&) {
      }
      calls_until_failure = 0;
      CAPTURE(nth);
      CAPTURE(for_good);
      CHECK(threw == (num_failures > 0));
      CHECK(world.cache.manager().num_tokens(world.c) == 6);
      CHECK(world.holds_its_tokens(0));
      CHECK(world.cache.manager().check() == "");
      world.cache.begin_step({{world.c, next}}).commit();
      for (std::int32_t g = 0; g < num_groups; ++g) CHECK(world.holds_its_tokens(g));
      if (threw) continue;
      most = std::max(most, nth - 1);
      break;
    }
  }
  CHECK(most >= 10);
}

}  // namespace
}  // namespace bifolio::test

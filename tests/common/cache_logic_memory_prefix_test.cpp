// SPDX-License-Identifier: Apache-2.0
/// As cache_logic_memory_test.cpp, for prefix caching, swapping and fences.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/memory_resource.hpp>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/failing_memory.hpp"
#include "common/scheduler_helpers.hpp"

namespace bifolio::test {
namespace {

struct cached_world {
  counting_memory_resource counting{memory};
  kv_cache_manager manager;
  std::vector<token_id> prompt;
  std::string image = "the digest of an image, too long for a string without memory of its own";
  std::vector<extra_key> extras;
  seq_id a{}, b{}, c{};
  std::vector<seq_id> both;
  std::vector<block_copy> copies;
  std::vector<cache_event> events;
  std::vector<host_demand> demands;

  static kv_cache_config config_of(std::int32_t window, bool deduplicate, memory_resource& counting) {
    kv_cache_config config{.block_size = 2,
                           .num_blocks = 4000,
                           .sliding_window = window,
                           .max_sequences = 32,
                           .num_host_blocks = 2000,
                           .memory = &counting};
    config.prefix.enabled = true;
    config.prefix.record_events = true;
    config.prefix.deduplicate = deduplicate;
    return config;
  }
  explicit cached_world(std::int32_t window = 0, bool deduplicate = false)
      : manager(config_of(window, deduplicate, counting)) {
    for (int i = 0; i < 3000; ++i) prompt.push_back(token_id{i * i % 1009});
    for (std::int64_t p = 3; p < 1000; p += 50) {
      extras.push_back({p, 1, std::as_bytes(std::span(image.data(), image.size()))});
    }
  }
  [[nodiscard]] std::uint64_t digest() const { return manager.digest(); }
  [[nodiscard]] std::string check() const { return manager.check(); }

  [[nodiscard]] prompt_view view(std::size_t num_tokens, bool with_extras = true) const {
    return {.tokens = std::span(prompt).first(num_tokens),
            .scope = {"a tenant whose name is too long for a string without memory", 3},
            .extras = with_extras ? std::span(extras) : std::span<const extra_key>()};
  }
  seq_id open(std::size_t num_tokens, bool with_extras = true) {
    const open_result got = manager.open(view(num_tokens, with_extras), static_cast<std::int64_t>(num_tokens));
    require(got.status == alloc_status::ok);
    return got.seq;
  }
  void commit(seq_id seq, std::size_t first, std::size_t end) {
    manager.commit(seq, std::span(prompt).subspan(first, end - first));
  }
  /// Drained into a vector without capacity, so that the next event needs memory.
  void drain() {
    std::vector<cache_event> none;
    manager.drain_events(none);
  }
  /// Whether anybody still refers to the scope of `view`.
  [[nodiscard]] bool scope_is_known() const { return manager.prefix()->match(view(2), {}).end.serial != 0; }
  /// Scopes and extra keys that anybody refers to.
  [[nodiscard]] std::size_t num_interned() const { return manager.prefix()->num_interned(); }
};

TEST_CASE("a manager with prefixes and host blocks whose memory fails is not made, and leaves nothing behind") {
  counting_memory_resource counting(memory);
  for (const eviction_policy* policy : {&priority_policy(), &s3_fifo_policy()}) {
    kv_cache_config config = cached_world::config_of(0, false, counting);
    config.prefix.policy = policy;
    int nth = 1;
    for (bool made = false; !made; ++nth) {
      REQUIRE(nth < 50);
      fails_for_good = false;
      calls_until_failure = nth;
      errc code = errc::ok;
      try {
        const kv_cache_manager manager(config);
        made = true;
      } catch (const error& refused) {
        code = refused.code();
      }
      calls_until_failure = 0;
      CHECK((made || code == errc::out_of_memory));
      CHECK(counting.num_live() == 0);
    }
    CHECK(nth > (policy == &s3_fifo_policy() ? 12 : 8));
  }
}

TEST_CASE("open and can_open fail for memory without a trace") {
  const auto make = [] {
    auto world = std::make_unique<cached_world>();
    world->a = world->open(600);
    world->commit(world->a, 0, 600);
    world->drain();
    return world;
  };
  SUBCASE("in a scope that is there") {
    CHECK(fail_each_allocation(make, [](cached_world& w) { (void)w.open(1400); }) >= 25);
    CHECK(fail_each_allocation(
              make, [](cached_world& w) { require(w.manager.can_open(w.view(1400)).num_cached_tokens == 600); }) >= 2);
  }
  SUBCASE("in one that is not") {
    const auto make_empty = [] { return std::make_unique<cached_world>(); };
    CHECK(fail_each_allocation(make_empty, [](cached_world& w) { (void)w.open(1400); }) >= 25);
  }
  SUBCASE("without keeping scope or extra keys") {
    int nth = 1;
    for (bool done = false; !done; ++nth) {
      REQUIRE(nth < 200);
      cached_world world;
      fails_for_good = false;
      calls_until_failure = nth;
      try {
        const seq_id seq = world.open(1400);
        done = true;
        calls_until_failure = 0;
        CHECK(world.scope_is_known());
        CHECK(world.num_interned() == 2);  // in their blocks all extra keys are the same
        world.manager.free(seq);
      } catch (const error&) {
      }
      calls_until_failure = 0;
      CHECK_FALSE(world.scope_is_known());
      CHECK(world.num_interned() == 0);
    }
  }
}

TEST_CASE("a commit that publishes fails for memory without a trace") {
  SUBCASE("plainly") {
    CHECK(fail_each_allocation(
              [] {
                auto world = std::make_unique<cached_world>();
                world->a = world->open(1400);
                world->drain();
                return world;
              },
              [](cached_world& w) { w.commit(w.a, 0, 1201); }) >= 1);
  }
  SUBCASE("and finds duplicates") {
    CHECK(fail_each_allocation(
              [] {
                auto world = std::make_unique<cached_world>(0, true);
                world->a = world->open(1400);
                world->b = world->open(1400);
                world->commit(world->a, 0, 1400);
                world->drain();
                return world;
              },
              [](cached_world& w) {
                w.commit(w.b, 0, 1400);
                require(w.manager.prefix()->stats().num_duplicate_blocks == 700);
              }) >= 1);
  }
  SUBCASE("and gives back part of a shared chunk") {
    CHECK(fail_each_allocation(
              [] {
                auto world = std::make_unique<cached_world>(20);
                world->a = world->open(1400, false);
                world->b = world->manager.fork(world->a).seq;
                world->drain();
                return world;
              },
              [](cached_world& w) { w.commit(w.b, 0, 700); }) >= 1);
  }
}

TEST_CASE("an append that evicts, copies or unregisters fails for memory without a trace") {
  CHECK(fail_each_allocation(
            [] {
              auto world = std::make_unique<cached_world>();
              world->a = world->open(1400);
              world->commit(world->a, 0, 1400);
              world->manager.truncate(world->a, 1001);
              world->drain();
              return world;
            },
            [](cached_world& w) { require(w.manager.append(w.a, 1500).has_copy()); }) >= 3);
}

// As many events as an append can have: its last token's block is registered, and too few blocks are free to copy it,
// and each block that it takes held something else.
TEST_CASE("an append that takes every block from the cache fails for memory without a trace") {
  struct tight_world {
    kv_cache_manager manager{{.block_size = 2,
                              .num_blocks = 20,
                              .prefix = {.enabled = true, .seed = hash_seed{1, 2}, .record_events = true},
                              .memory = &memory}};
    seq_id a{};
    tight_world() {
      const std::vector<token_id> first = tokens_from(0, 12), second = tokens_from(100, 28);
      a = manager.open({.tokens = first}, 12).seq;
      manager.commit(a, first);
      manager.truncate(a, 11);
      const seq_id b = manager.open({.tokens = second}, 28).seq;
      manager.commit(b, second);
      manager.free(b);
      std::vector<cache_event> none;
      manager.drain_events(none);
    }
    [[nodiscard]] std::uint64_t digest() const { return manager.digest(); }
    [[nodiscard]] std::string check() const { return manager.check(); }
  };
  CHECK(fail_each_allocation([] { return std::make_unique<tight_world>(); },
                             [](tight_world& w) {
                               const append_result got = w.manager.append(w.a, 29);
                               require(got.status == alloc_status::ok && !got.has_copy());
                             }) >= 1);
  tight_world world;
  (void)world.manager.append(world.a, 29);
  std::vector<cache_event> events;
  world.manager.drain_events(events);
  CHECK(events.size() == 15);
}

TEST_CASE("a fork with extra keys fails for memory without a trace") {
  const auto make = [] {
    auto world = std::make_unique<cached_world>();
    world->a = world->open(1400);
    return world;
  };
  CHECK(fail_each_allocation(make, [](cached_world& w) { w.b = w.manager.fork(w.a).seq; }) >= 3);
  int nth = 1;
  for (bool done = false; !done; ++nth) {  // and keeps nothing
    REQUIRE(nth < 50);
    auto world = make();
    fails_for_good = false;
    calls_until_failure = nth;
    try {
      world->b = world->manager.fork(world->a).seq;
      done = true;
    } catch (const error&) {
    }
    calls_until_failure = 0;
    world->manager.free(world->a);
    if (done) world->manager.free(world->b);
    CHECK_FALSE(world->scope_is_known());
    CHECK(world->num_interned() == 0);
  }
}

TEST_CASE("swaps fail for memory without a trace, and append no pairs") {
  const auto make = [] {
    auto world = std::make_unique<cached_world>();
    world->a = world->open(1400);
    world->commit(world->a, 0, 1400);
    world->b = world->manager.fork(world->a).seq;
    world->c = world->open(500);
    world->both = {world->c, world->b};
    world->drain();
    return world;
  };
  CHECK(fail_each_allocation(make, [](cached_world& w) {
          try {
            require(w.manager.swap_out(w.both, w.copies) == alloc_status::ok);
          } catch (...) {
            require(w.copies.empty());
            throw;
          }
          require(w.copies.size() > 700);
        }) >= 4);
  const auto make_back = [&make] {
    auto world = make();
    REQUIRE(world->manager.swap_out(world->both, world->copies) == alloc_status::ok);
    world->manager.free(world->a);
    const seq_id all = world->manager.allocate(2 * world->manager.num_free_blocks()).seq;
    world->manager.free(all);
    world->copies = {};
    world->drain();
    return world;
  };
  CHECK(fail_each_allocation(make_back, [](cached_world& w) {
          require(w.manager.swap_in(w.both, w.copies) == alloc_status::ok);
          require(w.copies.size() > 700);
        }) >= 1);
  (void)fail_each_allocation(make_back, [](cached_world& w) { require(w.manager.blocks_to_swap_in(w.both) > 700); });
}

TEST_CASE("reset fails for memory without a trace") {
  CHECK(fail_each_allocation(
            [] {
              auto world = std::make_unique<cached_world>();
              world->a = world->open(600);
              world->commit(world->a, 0, 600);
              world->manager.free(world->a);
              world->drain();
              return world;
            },
            [](cached_world& w) { require(w.manager.reset_prefix_cache()); }) == 1);
}

TEST_CASE("calls that only give back or read allocate nothing") {
  cached_world world;
  world.a = world.open(1400);
  world.commit(world.a, 0, 1400);
  world.b = world.open(800);
  world.c = world.manager.fork(world.b).seq;
  world.both = {world.a, world.b};
  REQUIRE(world.manager.swap_out(world.both, world.copies) == alloc_status::ok);
  num_failures = 0;
  calls_until_failure = 1;
  const fence_id fence = world.manager.open_fence();
  world.manager.drain_events(world.events);
  world.manager.advance_clock(5);
  world.manager.free(world.a);
  world.manager.free(world.c);
  world.manager.free(world.b);
  world.manager.retire(fence);
  (void)world.manager.stats();
  (void)world.manager.digest();
  calls_until_failure = 0;
  CHECK(num_failures == 0);
  CHECK(world.manager.num_free_blocks() == 4000);
  CHECK(world.manager.num_free_host_blocks() == 2000);
  CHECK_FALSE(world.events.empty());
  CHECK(world.check() == "");
}

TEST_CASE("after reserve_host_memory appends and commits that publish allocate nothing") {
  cached_world world;
  world.a = world.open(100);
  world.commit(world.a, 0, 100);
  world.manager.truncate(world.a, 99);
  world.drain();
  world.demands = {{world.a, 2500}, {invalid_seq, 1000}};
  world.manager.reserve_host_memory(world.demands);
  num_failures = 0;
  calls_until_failure = 1;
  const append_result appended = world.manager.append(world.a, 2401);
  world.commit(world.a, 99, 2500);
  const allocate_result opened = world.manager.allocate(1000);
  world.commit(opened.seq, 0, 1000);
  calls_until_failure = 0;
  CHECK(num_failures == 0);
  CHECK(appended.has_copy());
  CHECK(world.check() == "");
}

TEST_CASE("hints that end late do not pile up: publishing under them settles without memory") {
  block_pool pool(16, memory);
  prefix_cache cache(pool, {.block_size = 1, .memory = &memory});
  const auto publish = [&](std::int32_t i) {
    const token_id token[1] = {token_id{i}};
    cache.reserve_events(1);
    const block_id block = cache.allocate_one();
    (void)cache.publish(block, cache.root(default_scope), token, 0, {.priority = 6, .expires_at = 1000000 + i});
    pool.release(block);
  };
  for (std::int32_t i = 0; i < 1000; ++i) publish(i);
  num_failures = 0;
  calls_until_failure = 1;
  for (std::int32_t i = 1000; i < 50000; ++i) publish(i);
  calls_until_failure = 0;
  CHECK(num_failures == 0);
  cache.advance_clock(2000000);
  for (int b = 0; b < 16; ++b) CHECK(pool.level(block_id{b}) == retention_hint::normal);
}

TEST_CASE("names of the prefix cache fail for memory without a trace") {
  struct names_world {
    block_pool pool{64, memory};
    prefix_cache cache{pool, {.block_size = 2, .record_events = true, .memory = &memory}};
    std::string salt = std::string(100, 's'), image = std::string(100, 'i');
    std::vector<extra_key> extras{{1, 1, std::as_bytes(std::span(image.data(), image.size()))}};
    std::vector<token_id> tokens = std::vector<token_id>(9, token_id{3});
    std::vector<content_key> keys;
    std::vector<block_id> out = std::vector<block_id>(4);
    [[nodiscard]] prompt_view view() const { return {.tokens = tokens, .scope = {salt, 1}, .extras = extras}; }
    [[nodiscard]] std::uint64_t digest() const { return cache.digest() ^ pool.digest(); }
    [[nodiscard]] std::string check() const { return cache.check(); }
  };
  const auto make = [] { return std::make_unique<names_world>(); };
  // These calls let std::bad_alloc through, as documented.
  const auto fail_each = [](auto make_world, auto call) {
    return fail_each_allocation(make_world, [&call](names_world& w) {
      try {
        call(w);
      } catch (const std::bad_alloc&) {
        throw error(errc::out_of_memory);
      }
    });
  };
  CHECK(fail_each(make, [](names_world& w) { (void)w.cache.acquire_scope({w.salt, 1}); }) >= 3);
  CHECK(fail_each(make, [](names_world& w) { (void)w.cache.acquire_extras(w.extras, 0); }) >= 3);
  CHECK(fail_each(make, [](names_world& w) { w.cache.append_keys(w.view(), w.keys); }) >= 2);
  CHECK(fail_each(make, [](names_world& w) { w.cache.reserve_events(9); }) == 2);
  CHECK(fail_each(
            [&make] {
              auto world = make();
              (void)world->cache.acquire_scope({world->salt, 1});
              return world;
            },
            [](names_world& w) { (void)w.cache.match_and_pin(w.view(), w.out); }) >= 1);
}

}  // namespace
}  // namespace bifolio::test

// SPDX-License-Identifier: Apache-2.0
/// Every public call of pool, manager and scheduler with each of its host allocations failing in turn, once alone and
/// once with all that follow: out_of_memory, also when not even the message can be made, a state digest as it was, and
/// the same call succeeds afterwards. And every refusal with the memory for its sentence failing: its code stays.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/backend.hpp>
#include <bifolio/cache_engine.hpp>
#include <bifolio/cpu.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "common/scheduler_helpers.hpp"

namespace {

std::int64_t calls_until_failure = 0;  // 0: none fails
bool fails_for_good = false;
std::int64_t num_failures = 0;

void* allocate_or_throw(std::size_t size, std::size_t alignment) {
  if (calls_until_failure == 1) {
    if (!fails_for_good) calls_until_failure = 0;
    ++num_failures;
    throw std::bad_alloc();
  }
  if (calls_until_failure > 1) --calls_until_failure;
  size = (size + alignment) / alignment * alignment;
  void* pointer = std::aligned_alloc(alignment, size);
  if (pointer == nullptr) throw std::bad_alloc();
  return pointer;
}

}  // namespace

void* operator new(std::size_t size) { return allocate_or_throw(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new[](std::size_t size) { return allocate_or_throw(size, __STDCPP_DEFAULT_NEW_ALIGNMENT__); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t size, std::align_val_t alignment) {
  return allocate_or_throw(size, static_cast<std::size_t>(alignment));
}
#if defined(__GNUC__) && !defined(__clang__)
// GCC inlines these without the operators new above, and then takes std::free for the wrong function.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
#endif
void operator delete(void* pointer) noexcept { std::free(pointer); }
void operator delete[](void* pointer) noexcept { std::free(pointer); }
void operator delete(void* pointer, std::size_t) noexcept { std::free(pointer); }
void operator delete[](void* pointer, std::size_t) noexcept { std::free(pointer); }
void operator delete(void* pointer, std::align_val_t) noexcept { std::free(pointer); }
void operator delete(void* pointer, std::size_t, std::align_val_t) noexcept { std::free(pointer); }
void operator delete[](void* pointer, std::align_val_t) noexcept { std::free(pointer); }
void operator delete[](void* pointer, std::size_t, std::align_val_t) noexcept { std::free(pointer); }

namespace bifolio::test {
namespace {

/// A resource over operator new, so that one counter sees every allocation.
class counted_resource final : public memory_resource {
 public:
  void* allocate(std::size_t num_bytes, std::size_t alignment) override {
    try {
      return ::operator new (num_bytes, std::align_val_t{alignment});
    } catch (const std::bad_alloc&) {
      throw error(errc::out_of_memory);
    }
  }
  void deallocate(void* pointer, std::size_t, std::size_t alignment) noexcept override {
    ::operator delete (pointer, std::align_val_t{alignment});
  }
  [[nodiscard]] device where() const noexcept override { return {}; }
};

counted_resource memory;

/// For N = 1, 2, …: a fresh world, in which the call's N-th allocation fails; until the call needs fewer than N.
/// Returns how many allocations the call makes at most.
template <class MakeWorld, class Call>
int fail_each_allocation(MakeWorld make_world, Call call) {
  int most = 0;
  for (const bool for_good : {false, true}) {
    for (int nth = 1;; ++nth) {
      REQUIRE(nth < 200);
      auto world = make_world();
      const std::uint64_t before = world->digest();
      num_failures = 0;
      fails_for_good = for_good;
      calls_until_failure = nth;
      bool threw = true;
      bool right_code = true;
      try {
        call(*world);
        threw = false;
      } catch (const error& refused) {
        right_code = refused.code() == errc::out_of_memory;
      } catch (const std::bad_alloc&) {
        right_code = false;
      }
      calls_until_failure = 0;
      CAPTURE(nth);
      CAPTURE(for_good);
      CHECK(threw == (num_failures > 0));
      CHECK(right_code);
      if (!threw) {
        most = std::max(most, nth - 1);
        break;
      }
      CHECK(world->digest() == before);
      CHECK(world->check() == "");
      call(*world);  // the world is as it was, so now it works
      CHECK(world->check() == "");
    }
  }
  return most;
}

// Calls below use no doctest macros: those allocate.
void require(bool holds) {
  if (!holds) throw std::logic_error("the call under test did something else");
}

struct manager_world {
  counting_memory_resource counting{memory};
  kv_cache_manager manager;
  seq_id a{}, b{};
  step_batch batch;
  step_plan plan;
  std::vector<host_demand> demands;
  explicit manager_world(std::int32_t window = 0)
      : manager({.block_size = 2, .num_blocks = 20000, .sliding_window = window, .memory = &counting}) {}
  [[nodiscard]] std::uint64_t digest() const { return manager.digest(); }
  [[nodiscard]] std::string check() const { return manager.check(); }

  void share(std::int64_t num_tokens, int num_fillers) {
    a = manager.allocate(num_tokens).seq;
    b = manager.fork(a).seq;
    for (int i = 0; i < num_fillers; ++i) require(manager.allocate(2 * (27 + 64)).status == alloc_status::ok);
  }
};

/// Two sequences that share full chunks, in a manager whose slab has no chunk to spare.
std::unique_ptr<manager_world> sharing_world(std::int32_t window, std::int64_t num_tokens) {
  manager_world trial(window);
  trial.share(num_tokens, 0);
  const std::int64_t before = trial.counting.num_allocations();
  int num_fillers = 0;  // one chunk each
  while (trial.manager.allocate(2 * (27 + 64)).status == alloc_status::ok &&
         trial.counting.num_allocations() == before) {
    ++num_fillers;
  }
  REQUIRE(trial.counting.num_allocations() > before);
  auto world = std::make_unique<manager_world>(window);
  world->share(num_tokens, num_fillers);
  REQUIRE(world->counting.num_allocations() == before);
  return world;
}

TEST_CASE("a pool or manager whose memory fails is not made, and leaves nothing behind") {
  counting_memory_resource counting(memory);
  for (int nth = 1; nth <= 2; ++nth) {
    calls_until_failure = nth;
    CHECK_THROWS_AS(kv_cache_manager({.num_blocks = 9, .memory = &counting}), error);
    calls_until_failure = 0;
    CHECK(counting.num_live() == 0);
  }
}

TEST_CASE("allocate fails for memory without a trace") {
  const int allocations = fail_each_allocation([] { return std::make_unique<manager_world>(); },
                                               [](manager_world& w) { (void)w.manager.allocate(2000); });
  CHECK(allocations >= 2);  // directory and chunks
}

TEST_CASE("append fails for memory without a trace") {
  SUBCASE("growing by many chunks") {
    const int allocations = fail_each_allocation(
        [] {
          auto world = std::make_unique<manager_world>();
          world->a = world->manager.allocate(3).seq;
          return world;
        },
        [](manager_world& w) { require(w.manager.append(w.a, 2500).status == alloc_status::ok); });
    CHECK(allocations >= 2);
  }
  SUBCASE("copying a tail in a chunk that others share") {
    const int allocations =
        fail_each_allocation([] { return sharing_world(0, 2 * (27 + 3 * 64) - 1); },
                             [](manager_world& w) { require(w.manager.append(w.b, 1).has_copy()); });
    CHECK(allocations >= 1);
  }
}

TEST_CASE("fork fails for memory without a trace") {
  const int allocations = fail_each_allocation([] { return sharing_world(0, 2 * (27 + 3 * 64) + 9); },
                                               [](manager_world& w) { (void)w.manager.fork(w.a); });
  CHECK(allocations >= 1);
}

TEST_CASE("truncate into a shared chunk fails for memory without a trace") {
  const int allocations = fail_each_allocation([] { return sharing_world(0, 2 * (27 + 3 * 64)); },
                                               [](manager_world& w) { w.manager.truncate(w.b, 200); });
  CHECK(allocations >= 1);
}

TEST_CASE("a commit that gives back part of a shared chunk fails for memory without a trace") {
  const int allocations = fail_each_allocation([] { return sharing_world(20, 2 * (27 + 3 * 64)); },
                                               [](manager_world& w) { w.manager.commit(w.b, 200); });
  CHECK(allocations >= 1);
}

TEST_CASE("build and reserve_host_memory fail for memory without a trace") {
  const auto make = [] {
    auto world = sharing_world(0, 300);
    world->plan.seqs = {{.seq = world->a, .query_len = 3, .seq_len = 300}};
    world->demands = {{world->a, 3000}, {invalid_seq, 2000}, {invalid_seq, 2000}};
    return world;
  };
  CHECK(fail_each_allocation(make, [](manager_world& w) { w.manager.build(w.batch, w.plan); }) >= 4);
  CHECK(fail_each_allocation(make, [](manager_world& w) { w.manager.reserve_host_memory(w.demands); }) >= 4);
}

TEST_CASE("after reserve_host_memory the calls it was for allocate nothing") {
  auto world = sharing_world(0, 2 * (27 + 3 * 64) - 1);
  world->manager.reserve_host_memory(
      std::vector<host_demand>{{world->b, 2500}, {invalid_seq, 2000}, {invalid_seq, 2 * (27 + 3 * 64)}});
  num_failures = 0;
  calls_until_failure = 1;
  const append_result appended = world->manager.append(world->b, 1000);
  const allocate_result opened = world->manager.allocate(2000);
  const allocate_result forked = world->manager.fork(world->a);
  world->manager.free(world->b);
  calls_until_failure = 0;
  CHECK(num_failures == 0);
  CHECK(appended.has_copy());
  CHECK(opened.status == alloc_status::ok);
  CHECK(forked.status == alloc_status::ok);
  CHECK(world->check() == "");
}

// --- prefix caching, swapping, fences

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

TEST_CASE("a manager with names and host blocks whose memory fails is not made, and leaves nothing behind") {
  counting_memory_resource counting(memory);
  int nth = 1;
  for (bool made = false; !made; ++nth) {
    REQUIRE(nth < 50);
    fails_for_good = false;
    calls_until_failure = nth;
    errc code = errc::ok;
    try {
      const kv_cache_manager manager(cached_world::config_of(0, false, counting));
      made = true;
    } catch (const error& refused) {
      code = refused.code();
    }
    calls_until_failure = 0;
    CHECK((made || code == errc::out_of_memory));
    CHECK(counting.num_live() == 0);
  }
  CHECK(nth > 8);
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

struct scheduler_world {
  kv_cache_manager manager{{.block_size = 1, .num_blocks = 900, .max_sequences = 16, .memory = &memory}};
  scheduler plans{manager, {.max_tokens_per_step = 400, .max_running = 12}};
  request next[2];  // a failed submit keeps what it was given
  int num_tried = 0;
  step_inputs inputs;
  step_plan plan;
  std::vector<sampled_token> tokens;
  std::vector<finished_sequence> finished;
  [[nodiscard]] std::uint64_t digest() const { return plans.digest(); }
  [[nodiscard]] std::string check() const { return plans.check(); }

  void ask(std::size_t prompt, std::int32_t max_new_tokens, std::int32_t num_samples) {
    (void)test::ask(plans, {std::vector<token_id>(prompt, token_id{1}), max_new_tokens, num_samples});
  }
  void schedule() {
    plan = plans.schedule();
    tokens = any_tokens(plan);
  }
  void commit() { finished = plans.commit(plan, tokens); }
};

TEST_CASE("submit and post_abort fail for memory without a trace, and the intake works on") {
  const auto make = [] {
    auto world = std::make_unique<scheduler_world>();
    for (request& one : world->next) one = {std::vector<token_id>(70, token_id{1}), 5, 3};
    // So many that the next message needs memory also where the intake is a std::deque (with pages of 512 bytes).
    for (int i = 0; i < 31; ++i) world->plans.post_abort(request_id{9});
    return world;
  };
  CHECK(fail_each_allocation(make, [](scheduler_world& w) {
          require(w.plans.submit(std::move(w.next[w.num_tried++])).status == alloc_status::ok);
          calls_until_failure = 0;
          w.schedule();
          require(w.plan.seqs.size() == 1);  // exactly the one that was accepted
          w.commit();
        }) >= 3);
  CHECK(fail_each_allocation(make, [](scheduler_world& w) { w.plans.post_abort(request_id{1}); }) >= 1);
}

TEST_CASE("schedule fails for memory without a trace") {
  const int allocations = fail_each_allocation(
      [] {
        auto world = std::make_unique<scheduler_world>();
        world->ask(100, 50, 3);
        world->schedule();
        world->commit();
        for (int i = 0; i < 12; ++i) world->ask(300, 9, 1);  // chunks, directories, and more than fit
        for (std::uint64_t id = 5; id < 9; ++id) world->plans.post_abort(request_id{id});
        return world;
      },
      [](scheduler_world& w) { require(!w.plans.schedule().seqs.empty()); });
  CHECK(allocations >= 4);
}

TEST_CASE("build of a step fails for memory without a trace") {
  const int allocations = fail_each_allocation(
      [] {
        auto world = std::make_unique<scheduler_world>();
        world->ask(300, 9, 1);
        world->schedule();
        return world;
      },
      [](scheduler_world& w) { w.plans.build(w.inputs); });
  CHECK(allocations >= 7);
}

TEST_CASE("commit fails for memory without a trace, also where it forks and where sequences end") {
  const int allocations = fail_each_allocation(
      [] {
        auto world = std::make_unique<scheduler_world>();
        world->ask(150, 1, 2);
        world->ask(200, 9, 8);
        world->schedule();
        world->tokens.back().stop = true;
        return world;
      },
      [](scheduler_world& w) {
        w.commit();
        require(w.finished.size() == 3);
      });
  CHECK(allocations >= 10);
}

/// With everything that asks for host memory of its own: names, keys, host blocks, beams, drafts, steps in flight.
struct full_scheduler_world {
  kv_cache_manager manager{{.block_size = 2,
                            .num_blocks = 60,
                            .watermark = 0,
                            .max_sequences = 24,
                            .prefix = {.enabled = true, .seed = hash_seed{1, 2}, .record_events = true},
                            .num_host_blocks = 40,
                            .memory = &memory}};
  scheduler plans{
      manager,
      {.max_tokens_per_step = 300, .max_running = 12, .max_steps_in_flight = 2, .preemption = preemption_mode::swap}};
  step_plan plan;
  std::vector<sampled_token> tokens;
  std::vector<finished_sequence> finished;
  std::vector<token_id> drafts{token_id{4}, token_id{5}};
  [[nodiscard]] std::uint64_t digest() const { return plans.digest(); }
  [[nodiscard]] std::string check() const { return plans.check(); }

  request_id ask(request what) { return test::ask(plans, std::move(what)); }
  void schedule() {
    plan = plans.schedule();
    tokens = any_tokens(plan);
  }
  void commit() { finished = plans.commit(plan, tokens); }
  void step() {
    schedule();
    if (!plan.empty()) commit();
  }
};

request asking_everything(std::int32_t first, std::size_t length) {
  request what;
  what.prompt = tokens_from(first, length);
  what.max_new_tokens = 30;
  what.prefix_salt = "a salt that is too long for a short string's own room";
  what.extras.push_back({.position = 1, .kind = 1, .value = {std::byte{1}, std::byte{2}}});
  return what;
}

// Where only the admission of requests lacks memory, they wait: a failure then shows only when nothing else can be
// done.
TEST_CASE("schedule with prefixes and swaps fails for memory without a trace, or does with less") {
  for (const bool others_run : {false, true}) {
    CAPTURE(others_run);
    int least = 0;
    for (int nth = 1; nth < 400; ++nth) {
      full_scheduler_world world;
      if (others_run) {
        (void)world.ask(asking_everything(10, 20));
        world.step();
        world.step();
      }
      (void)world.ask(asking_everything(100, 24));
      (void)world.ask(asking_everything(200, 24));
      const std::uint64_t before = world.digest();
      num_failures = 0;
      fails_for_good = true;
      calls_until_failure = nth;
      bool threw = false;
      bool right_code = true;
      std::size_t num_rows = 0;
      try {
        num_rows = world.plans.schedule().seqs.size();
      } catch (const error& refused) {
        threw = true;
        right_code = refused.code() == errc::out_of_memory;
      } catch (const std::bad_alloc&) {
        threw = true;
      }
      calls_until_failure = 0;
      CAPTURE(nth);
      CHECK(right_code);
      CHECK(world.check() == "");
      if (num_failures == 0) {
        CHECK(num_rows == (others_run ? 3 : 2));
        least = nth;
        break;
      }
      if (threw) {
        if (others_run) CHECK(world.digest() == before);
      } else {
        CHECK(num_rows >= 1);
        world.plan = world.plans.schedule();  // those that were put off come with the next step
        CHECK(world.plan.seqs.size() >= 1);
      }
      if (!threw) continue;
      // Once there is memory again, all goes on.
      std::size_t finished = 0;
      for (int i = 0; i < 300 && world.plans.has_work(); ++i) {
        world.step();
        finished += world.finished.size();
        world.finished.clear();
      }
      CHECK(finished == (others_run ? 3 : 2));
    }
    CHECK(least >= 10);
  }
}

/// A step that forks samples, re-parents beams and takes drafts back is in flight.
std::unique_ptr<full_scheduler_world> world_before_forks(bool with_extras) {
  auto world = std::make_unique<full_scheduler_world>();
  request samples = asking_everything(10, 9);
  request beams = asking_everything(30, 9);
  request speculates = asking_everything(50, 9);
  samples.num_samples = 3;
  beams.beam_width = 3;
  speculates.max_draft_tokens = 4;
  if (!with_extras) {
    for (request* one : {&samples, &beams, &speculates}) one->extras.clear();
  }
  (void)world->ask(beams);
  const request_id guessed = world->ask(speculates);
  world->step();
  (void)world->ask(samples);
  world->plans.propose(guessed, 0, world->drafts);
  world->schedule();
  // The first beam goes on twice, the second is dropped.
  for (std::size_t i = 0; i < 3; ++i) world->tokens[i].from_sample = i == 1 ? 0 : -1;
  return world;
}

TEST_CASE("commit of forks, beams and drafts with prefixes fails for memory without a trace") {
  const int allocations = fail_each_allocation([] { return world_before_forks(false); },
                                               [](full_scheduler_world& w) {
                                                 w.commit();
                                                 require(w.finished.empty());
                                                 require(w.manager.stats().num_sequences == 3 + 1 + 3);
                                               });
  CHECK(allocations >= 5);
}

// A fork copies the handles of extra keys. Without memory for that, samples and beams are computed again.
TEST_CASE("a fork for which there is no memory costs time, not tokens") {
  int nth = 1;
  std::int64_t num_preempted = 0;
  for (;; ++nth) {
    REQUIRE(nth < 200);
    auto world = world_before_forks(true);
    const std::uint64_t before = world->digest();
    num_failures = 0;
    fails_for_good = true;
    calls_until_failure = nth;
    bool threw = false;
    try {
      world->commit();
    } catch (const error&) {
      threw = true;
    } catch (const std::bad_alloc&) {
      threw = true;
    }
    calls_until_failure = 0;
    CAPTURE(nth);
    if (threw) CHECK(world->digest() == before);
    REQUIRE(world->check() == "");
    if (num_failures == 0) break;
    if (threw) continue;
    num_preempted += 7 - world->manager.stats().num_sequences;
    std::size_t finished = 0;
    for (int i = 0; i < 500 && world->plans.has_work(); ++i) {
      world->step();
      REQUIRE(world->check() == "");
      for (const finished_sequence& one : world->finished) finished += one.tokens.size() == 30 ? 1U : 0U;
      world->finished.clear();
    }
    CHECK(finished == 3 + 1 + 3);
    CHECK(world->manager.num_free_blocks() == 60);
  }
  CHECK(num_preempted > 0);
}

TEST_CASE("propose fails for memory without a trace") {
  const int allocations = fail_each_allocation(
      [] {
        auto world = std::make_unique<full_scheduler_world>();
        request what = asking_everything(50, 9);
        what.max_draft_tokens = 4;
        (void)world->ask(what);
        world->step();
        return world;
      },
      [](full_scheduler_world& w) { w.plans.propose(request_id{1}, 0, w.drafts); });
  CHECK(allocations == 1);
}

/// The code of what `call` throws with its N-th allocation failing, once alone and once with all that follow; `ok` if
/// these differ, if there is no sentence, or if anything but `error` is thrown.
template <class Call>
errc code_without_memory(Call call) {
  errc first = errc::ok;
  for (const bool for_good : {false, true}) {
    for (int nth = 1;; ++nth) {
      errc code = errc::ok;
      num_failures = 0;
      fails_for_good = for_good;
      calls_until_failure = nth;
      try {
        call();
      } catch (const error& refused) {
        calls_until_failure = 0;
        code = refused.code();
        if (std::string(refused.what()).find(to_string(code)) == std::string::npos && num_failures > 0) return errc::ok;
      } catch (...) {
      }
      calls_until_failure = 0;
      if (first == errc::ok) first = code;
      if (code == errc::ok || code != first) return errc::ok;
      if (num_failures == 0) break;
    }
  }
  return first;
}

TEST_CASE("a refusal keeps its code when there is no memory for its sentence") {
  manager_world w;
  w.a = w.manager.allocate(7).seq;
  const seq_id gone = w.manager.allocate(7).seq;
  w.manager.free(gone);
  kv_cache_manager& manager = w.manager;
  step_batch batch;
  step_plan plan;
  plan.seqs = {{.seq = w.a, .query_len = 1, .seq_len = 9}};
  kv_cache_config bad_config{.num_blocks = 9, .watermark = 3, .memory = &memory};
  CHECK(code_without_memory([&] { kv_cache_manager made(bad_config); }) == errc::invalid_argument);
  CHECK(code_without_memory([&] { manager.free(gone); }) == errc::not_found);
  CHECK(code_without_memory([&] { (void)manager.append(w.a, -1); }) == errc::invalid_argument);
  CHECK(code_without_memory([&] { (void)manager.block_at(w.a, 100); }) == errc::out_of_range);
  CHECK(code_without_memory([&] { manager.build(batch, plan); }) == errc::out_of_range);
  CHECK(code_without_memory([&] { manager.retire(fence_id{7}); }) == errc::invalid_argument);
  block_pool pool(8, memory);
  CHECK(code_without_memory([&] { pool.release(block_id{3}, reuse_order::last); }) == errc::not_found);
  CHECK(code_without_memory([&] { pool.release(block_id{9}, reuse_order::last); }) == errc::invalid_argument);

  scheduler plans(manager, {.max_running = 4});
  request wrong;
  wrong.prompt = {token_id{1}};
  wrong.beam_width = wrong.num_samples = 2;
  CHECK(code_without_memory([&] { (void)plans.submit(std::move(wrong)); }) == errc::invalid_argument);
  CHECK(code_without_memory([&] { plans.propose(request_id{99}, 0, {}); }) == errc::not_found);
  CHECK(code_without_memory([&] { (void)plans.commit(plan, {}); }) == errc::failed_precondition);

  CHECK(code_without_memory([] { (void)parse_dtype("a name of many letters"); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)parse_device("a name of many letters"); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)parse_layout("a name of many letters"); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)parse_executor("a name of many letters"); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)parse_isa("a name of many letters"); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)parse_step_plan("no JSON, and longer than any small buffer"); }) ==
        errc::invalid_argument);
  CHECK(code_without_memory([] { (void)make_executor(executor_kind::serial, -7); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)make_backend({device_type::cpu, 3}); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)make_backend({static_cast<device_type>(9), 3}); }) == errc::invalid_argument);
  CHECK(code_without_memory([] { (void)make_layout(layout_kind::hnd, dtype::f32, 1 << 30, 1 << 30, 1 << 30); }) ==
        errc::invalid_argument);
  CHECK(code_without_memory([] { (void)default_host_memory().allocate(std::size_t{1} << 62, 64); }) ==
        errc::out_of_memory);

  const std::unique_ptr<backend> cpu = make_backend();
  attention_plan attention;
  attention_spec spec{.num_q_heads = 3, .num_kv_heads = 2, .head_dim = 8, .block_size = 16};
  CHECK(code_without_memory([&] { cpu->plan_attention(attention, spec, step_batch_view{}, 9); }) ==
        errc::invalid_argument);
  CHECK(code_without_memory([&] {
          const std::optional<error> problem = find_problem(attention, {});
          if (problem.has_value()) throw error(*problem);
        }) != errc::ok);
  const cache_engine_config engine;
  CHECK(code_without_memory([&] { cache_engine made(*cpu, engine); }) == errc::invalid_argument);
}

}  // namespace
}  // namespace bifolio::test

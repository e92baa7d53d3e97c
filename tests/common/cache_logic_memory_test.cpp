// SPDX-License-Identifier: Apache-2.0
/// Every public call of pool, manager and scheduler with each of its host allocations failing in turn, once alone and
/// once with all that follow: out_of_memory, also when not even the message can be made, a state digest as it was, and
/// the same call succeeds afterwards. Here the calls without prefix caching; the other files of the executable have
/// prefix caching and swapping, the scheduler, and refusals.

#include <doctest/doctest.h>

#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/memory_resource.hpp>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/failing_memory.hpp"

namespace bifolio::test {
namespace {

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
    fails_for_good = false;
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

}  // namespace
}  // namespace bifolio::test

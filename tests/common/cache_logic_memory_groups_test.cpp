// SPDX-License-Identifier: Apache-2.0
/// As cache_logic_memory_test.cpp, for a manager with a layer group of each kind.

#include <doctest/doctest.h>

#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/memory_resource.hpp>
#include <memory>
#include <string>
#include <vector>

#include "common/failing_memory.hpp"

namespace bifolio::test {
namespace {

struct grouped_world {
  counting_memory_resource counting{memory};
  kv_cache_manager manager;
  std::vector<token_id> prompt;
  std::string image = "the digest of an image, too long for a string without memory of its own";
  seq_id a{}, b{};
  std::vector<seq_id> both;
  std::vector<std::vector<block_copy>> copies;
  step_batch batch;
  std::vector<step_batch> others;
  step_plan plan;
  std::vector<host_demand> demands;

  static kv_cache_config config_of(memory_resource& counting) {
    kv_cache_config config{.max_sequences = 32, .memory = &counting};
    config.prefix.enabled = true;
    config.prefix.record_events = true;
    config.groups = {
        {.kind = group_kind::full, .block_size = 2, .num_blocks = 4000, .num_host_blocks = 2000},
        {.kind = group_kind::window, .block_size = 2, .num_blocks = 4000, .num_host_blocks = 2000, .window = 700},
        {.kind = group_kind::state, .block_size = 1, .num_blocks = 90, .num_host_blocks = 40, .snapshot_interval = 64},
        {.kind = group_kind::cross, .block_size = 2, .num_blocks = 900, .num_host_blocks = 400, .max_tokens = 300},
    };
    return config;
  }
  grouped_world() : manager(config_of(counting)), others(3) {
    for (int i = 0; i < 3000; ++i) prompt.push_back(token_id{i * i % 1009});
    copies.resize(4);
  }
  [[nodiscard]] std::uint64_t digest() const { return manager.digest(); }
  [[nodiscard]] std::string check() const { return manager.check(); }
  [[nodiscard]] prompt_view view(std::size_t num_tokens) const {
    prompt_view asked{.tokens = std::span(prompt).first(num_tokens), .scope = {"a tenant with a long, long name", 3}};
    asked.cross = {211, std::as_bytes(std::span(image.data(), image.size()))};
    return asked;
  }
  /// Two sequences with the same first tokens, 1001 of which the second found.
  void share() {
    a = manager.open(view(1001), 1001).seq;
    commit(a, 1001);
    b = manager.fork(a).seq;
    both = {a, b};
  }
  /// Takes the room for events away, so that calls must make it anew.
  void drain() {
    for (std::int32_t g = 0; g < manager.num_groups(); ++g) {
      std::vector<cache_event> events;
      manager.drain_events(events, g);
    }
  }
  void commit(seq_id seq, std::int64_t end) {
    for (;;) {
      const std::int64_t done = manager.num_committed(seq);
      manager.commit(seq, std::span(prompt).subspan(static_cast<std::size_t>(done),
                                                    static_cast<std::size_t>(manager.num_tokens(seq) - done)));
      const std::int64_t left = end - manager.num_tokens(seq);
      if (left <= 0) return;
      require(manager.append(seq, std::min(left, manager.step_limit(seq))).status == alloc_status::ok);
    }
  }
};

std::unique_ptr<grouped_world> shared_world() {
  auto world = std::make_unique<grouped_world>();
  world->share();
  return world;
}

TEST_CASE("a manager with groups whose memory fails is not made, and leaves nothing behind") {
  counting_memory_resource counting(memory);
  const kv_cache_config config = grouped_world::config_of(counting);
  for (int nth = 1; nth <= 12; ++nth) {
    fails_for_good = false;
    calls_until_failure = nth;
    CHECK_THROWS_AS(kv_cache_manager{config}, error);
    calls_until_failure = 0;
    CHECK(counting.num_live() == 0);
  }
}

TEST_CASE("opening in groups fails for memory without a trace") {
  CHECK(fail_each_allocation([] { return std::make_unique<grouped_world>(); },
                             [](grouped_world& w) { (void)w.manager.open(w.view(2000), 2000); }) >= 8);
  CHECK(fail_each_allocation(shared_world, [](grouped_world& w) { (void)w.manager.open(w.view(2000), 2000); }) >= 4);
  CHECK(fail_each_allocation([] { return std::make_unique<grouped_world>(); },
                             [](grouped_world& w) { (void)w.manager.allocate(2000, 200); }) >= 4);
}

TEST_CASE("appending, committing and forking in groups fail for memory without a trace") {
  CHECK(fail_each_allocation(shared_world, [](grouped_world& w) {
          require(w.manager.append(w.b, 1500).status == alloc_status::ok);
        }) >= 2);
  CHECK(fail_each_allocation(
            [] {
              auto world = shared_world();
              require(world->manager.append(world->b, 1500).status == alloc_status::ok);
              world->drain();
              return world;
            },
            [](grouped_world& w) { w.manager.commit(w.b, std::span(w.prompt).subspan(1001, 1400)); }) >= 1);
  CHECK(fail_each_allocation(
            [] {
              auto world = std::make_unique<grouped_world>();
              world->a = world->manager.open(world->view(64), 64).seq;
              world->drain();
              return world;
            },
            [](grouped_world& w) { w.manager.commit(w.a, std::span(w.prompt).first(32)); }) >= 1);
  CHECK(fail_each_allocation(shared_world, [](grouped_world& w) { (void)w.manager.fork(w.a); }) >= 1);
  (void)fail_each_allocation(
      [] {
        auto world = shared_world();
        require(world->manager.append(world->b, 1500).status == alloc_status::ok);
        return world;
      },
      [](grouped_world& w) { w.manager.truncate(w.b, 1001); });
}

TEST_CASE("swapping, building and reserving in groups fail for memory without a trace") {
  CHECK(fail_each_allocation(shared_world, [](grouped_world& w) {
          require(w.manager.swap_out(w.both, w.copies) == alloc_status::ok);
        }) >= 4);
  CHECK(fail_each_allocation(
            [] {
              auto world = shared_world();
              require(world->manager.swap_out(world->both, world->copies) == alloc_status::ok);
              return world;
            },
            [](grouped_world& w) { require(w.manager.swap_in(w.both, w.copies) == alloc_status::ok); }) >= 2);
  const auto make = [] {
    auto world = shared_world();
    require(world->manager.append(world->b, 3).status == alloc_status::ok);
    world->plan.seqs = {{.seq = world->b, .query_len = 3, .seq_len = 1004}};
    world->demands = {{world->a, 3000}, {invalid_seq, 2000}, {invalid_seq, 2000}};
    return world;
  };
  CHECK(fail_each_allocation(make, [](grouped_world& w) { w.manager.build(w.batch, w.others, w.plan); }) >= 12);
  CHECK(fail_each_allocation(make, [](grouped_world& w) { w.manager.reserve_host_memory(w.demands); }) >= 4);
}

TEST_CASE("after reserve_host_memory the calls on groups that it was for allocate nothing") {
  auto world = shared_world();
  world->manager.reserve_host_memory(std::vector<host_demand>{{world->a, 3000}, {world->b, 3000}, {invalid_seq, 3000}});
  num_failures = 0;
  calls_until_failure = 1;
  bool works = world->manager.append(world->b, 1500).status == alloc_status::ok;
  world->manager.commit(world->b, std::span(world->prompt).subspan(1001, 1500));
  works = works && world->manager.append(world->a, 100).status == alloc_status::ok;
  world->manager.commit(world->a, std::span(world->prompt).subspan(1001, 100));
  world->manager.truncate(world->a, 1101);
  calls_until_failure = 0;
  CHECK(num_failures == 0);
  CHECK(works);
  CHECK(world->check() == "");
}

}  // namespace
}  // namespace bifolio::test

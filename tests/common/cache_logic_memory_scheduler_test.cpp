// SPDX-License-Identifier: Apache-2.0
/// As cache_logic_memory_test.cpp, for the scheduler.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/scheduler.hpp>
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

TEST_CASE("a submit that failed is no work") {
  for (int nth = 1;; ++nth) {
    REQUIRE(nth < 100);
    scheduler_world world;
    world.next[0] = {std::vector<token_id>(70, token_id{1}), 5, 3};
    num_failures = 0;
    fails_for_good = false;
    calls_until_failure = nth;
    bool threw = false;
    try {
      (void)world.plans.submit(std::move(world.next[0]));
    } catch (const error&) {
      threw = true;
    }
    calls_until_failure = 0;
    CAPTURE(nth);
    if (!threw) break;
    CHECK_FALSE(world.plans.has_work());
  }
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

TEST_CASE("requests that a failed schedule took from the intake are admitted by rank") {
  for (int nth = 1;; ++nth) {
    REQUIRE(nth < 100);
    kv_cache_manager manager({.block_size = 4, .num_blocks = 40, .memory = &memory});
    scheduler plans(manager, {.max_running = 1});
    request what;
    what.prompt = tokens_from(1, 5);
    what.max_new_tokens = 3;
    request_id last{};
    for (const std::int32_t priority : {0, 5}) {  // as many as fill the list of arrivals
      what.priority = priority;
      last = ask(plans, what);
    }
    num_failures = 0;
    fails_for_good = false;
    calls_until_failure = nth;
    bool threw = false;
    try {
      (void)plans.schedule();
    } catch (const error&) {
      threw = true;
    }
    calls_until_failure = 0;
    if (!threw) break;
    CAPTURE(nth);
    CHECK(plans.schedule().seqs.at(0).request == last);
    CHECK(plans.check() == "");
  }
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

/// With everything that allocates host memory of its own: names, keys, host blocks, beams, drafts, steps in flight.
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

}  // namespace
}  // namespace bifolio::test

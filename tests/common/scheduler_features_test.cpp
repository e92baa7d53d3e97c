// SPDX-License-Identifier: Apache-2.0
/// Which requests get blocks, and how long others wait: prefixes, swaps, priorities, full pools.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/scheduler_helpers.hpp"
#include "support/random.hpp"

namespace bifolio::test {
namespace {

// --- prefix caching

TEST_CASE("a prompt begins after what is cached of it, and the last token is always computed") {
  kv_cache_manager manager(caching(100));
  scheduler plans(manager, {});
  (void)ask(plans, {.prompt = tokens_from(10, 14), .max_new_tokens = 1});
  CHECK(step(plans).num_tokens == 14);
  const request_id longer = ask(plans, {.prompt = tokens_from(10, 20), .max_new_tokens = 1});
  step_plan plan = plans.schedule();
  REQUIRE(row_of(plan, longer) != nullptr);
  CHECK(row_of(plan, longer)->num_cached_tokens == 12);
  CHECK(row_of(plan, longer)->query_len == 8);
  CHECK(row_of(plan, longer)->seq_len == 20);
  const std::vector<finished_sequence> done = plans.commit(plan, any_tokens(plan));
  REQUIRE(done.size() == 1);
  CHECK(done[0].num_cached_tokens == 12);
  const request_id same = ask(plans, {.prompt = tokens_from(10, 20), .max_new_tokens = 1});
  plan = step(plans);
  CHECK(row_of(plan, same)->num_cached_tokens == 19);
  CHECK(row_of(plan, same)->query_len == 1);
  CHECK(plan.copies.size() == 1);  // of the block that the last token is computed into
  CHECK(plans.stats().num_cached_tokens == 12 + 19);
  require_baseline(manager);
}

TEST_CASE("equal tokens of another salt, adapter or extra key are not shared") {
  kv_cache_manager manager(caching(100));
  scheduler plans(manager, {});
  const std::vector<owned_extra_key> image{{.position = 2, .kind = 1, .value = {std::byte{5}}}};
  const std::vector<owned_extra_key> other{{.position = 2, .kind = 1, .value = {std::byte{6}}}};
  const request kinds[] = {
      {.prompt = tokens_from(10, 12), .max_new_tokens = 1},
      {.prompt = tokens_from(10, 12), .max_new_tokens = 1, .prefix_salt = "tenant"},
      {.prompt = tokens_from(10, 12), .max_new_tokens = 1, .adapter_id = 3},
      {.prompt = tokens_from(10, 12), .max_new_tokens = 1, .extras = image},
      {.prompt = tokens_from(10, 12), .max_new_tokens = 1, .extras = other},
  };
  for (const request& what : kinds) {
    const request_id id = ask(plans, what);
    CHECK(row_of(step(plans), id)->num_cached_tokens == 0);
  }
  for (const request& what : kinds) {
    const request_id id = ask(plans, what);
    CHECK(row_of(step(plans), id)->num_cached_tokens == 11);
  }
}

TEST_CASE("a sequence that is preempted finds its own blocks again, sampled tokens included") {
  kv_cache_manager manager(caching(10));
  scheduler plans(manager, {.preemption = preemption_mode::recompute});
  const request_id first = ask(plans, {.prompt = tokens_from(10, 13), .max_new_tokens = 13});
  const request_id second = ask(plans, {.prompt = tokens_from(50, 13), .max_new_tokens = 13});
  std::vector<finished_sequence> done;
  std::int64_t preempted = 0;
  std::int32_t cached = 0;
  while (plans.has_work()) {
    const step_plan plan = step(plans, &done);
    preempted += std::ssize(plan.preempted);
    if (preempted > 0 && row_of(plan, second) != nullptr) {
      cached = std::max(cached, row_of(plan, second)->num_cached_tokens);
    }
  }
  CHECK(preempted == 1);
  CHECK(cached > 0);
  CHECK(done.size() == 2);
  CHECK(done[0].request == first);
  // The first one took the blocks from their end, so what it left is a beginning.
  CHECK(plans.stats().num_scheduled_tokens < 2 * 25 + 13 + 13);
  require_baseline(manager);
}

TEST_CASE("requests that wait are looked up again when their turn comes") {
  kv_cache_manager manager(caching(100));
  scheduler plans(manager, {.max_running = 1});
  (void)ask(plans, {.prompt = tokens_from(10, 16), .max_new_tokens = 3});
  const request_id waits = ask(plans, {.prompt = tokens_from(10, 16), .max_new_tokens = 1});
  step_plan plan;
  for (int i = 0; i < 4; ++i) plan = step(plans);
  REQUIRE(row_of(plan, waits) != nullptr);
  CHECK(row_of(plan, waits)->num_cached_tokens == 15);
}

// --- swapping

TEST_CASE("a sequence that is swapped out comes back with all it computed") {
  kv_cache_manager manager(
      {.block_size = 2, .num_blocks = 12, .watermark = 0, .first_generation = 10, .num_host_blocks = 20});
  scheduler plans(manager, {.max_running = 4, .preemption = preemption_mode::swap});
  const request_id first = ask(plans, {.prompt = tokens_from(10, 8), .max_new_tokens = 9});
  const request_id second = ask(plans, {.prompt = tokens_from(50, 8), .max_new_tokens = 9});
  std::vector<finished_sequence> done;
  std::int64_t out = 0, in = 0, came_back = 0;
  while (plans.has_work()) {
    const step_plan plan = step(plans, &done);
    CHECK(plan.preempted.empty());
    out += std::ssize(plan.swapped_out);
    in += std::ssize(plan.swapped_in);
    for (const seq_id seq : plan.swapped_in) {
      CHECK(std::none_of(plan.seqs.begin(), plan.seqs.end(), [&](const auto& row) { return row.seq == seq; }));
      came_back = plan.step;
    }
    if (came_back != 0 && plan.step == came_back + 1) CHECK(row_of(plan, second) != nullptr);
  }
  CHECK(out == 1);
  CHECK(in == 1);
  CHECK(done.size() == 2);
  CHECK(done[0].request == first);
  CHECK(plans.stats().num_scheduled_tokens == 2 * 16);  // nothing twice
  CHECK(plans.stats().num_swap_outs == 1);
  CHECK(plans.stats().num_swap_ins == 1);
  require_baseline(manager);
}

TEST_CASE("preemption swaps where that is cheaper, and recomputes where it is not or the host is full") {
  const auto play = [](preemption_mode mode, double cost, std::int64_t host, std::int32_t max_sequences) {
    kv_cache_manager manager(
        {.block_size = 2, .num_blocks = 12, .watermark = 0, .max_sequences = max_sequences, .num_host_blocks = host});
    scheduler plans(manager, {.max_running = 4, .preemption = mode, .swap_block_cost = cost});
    (void)ask(plans, {.prompt = tokens_from(10, 8), .max_new_tokens = 9});
    (void)ask(plans, {.prompt = tokens_from(50, 8), .max_new_tokens = 9});
    while (plans.has_work()) (void)step(plans);
    CHECK(plans.stats().num_preemptions == 1);
    require_baseline(manager);
    return plans.stats().num_swap_outs;
  };
  CHECK(play(preemption_mode::automatic, 1.5, 20, 8) == 1);
  CHECK(play(preemption_mode::automatic, 2.5, 20, 8) == 0);  // more than the two tokens of a block
  CHECK(play(preemption_mode::swap, 2.5, 20, 8) == 1);
  CHECK(play(preemption_mode::recompute, 0, 20, 8) == 0);
  CHECK(play(preemption_mode::swap, 0, 0, 8) == 0);
  CHECK(play(preemption_mode::swap, 0, 3, 8) == 0);   // no room
  CHECK(play(preemption_mode::swap, 0, 20, 4) == 0);  // no records
}

TEST_CASE("a sequence comes back when it fits next to the watermark and can grow") {
  kv_cache_manager manager({.block_size = 2, .num_blocks = 20, .watermark = 0.1, .num_host_blocks = 20});
  scheduler plans(manager, {.max_running = 4, .preemption = preemption_mode::swap});
  (void)ask(plans, {.prompt = tokens_from(10, 2), .max_new_tokens = 20});
  (void)ask(plans, {.prompt = tokens_from(50, 8), .max_new_tokens = 9});
  (void)step(plans);
  const seq_id foreign = manager.allocate(2 * manager.num_free_blocks()).seq;
  CHECK(step(plans).swapped_out.size() == 1);
  // 4 blocks, the watermark of 2, and one to grow by.
  manager.truncate(foreign, 2 * (manager.num_table_blocks(foreign) + manager.num_free_blocks() - 6));
  REQUIRE(manager.num_free_blocks() == 6);
  CHECK(step(plans).swapped_in.empty());
  manager.truncate(foreign, 2 * (manager.num_table_blocks(foreign) + manager.num_free_blocks() - 8));
  const step_plan plan = step(plans);  // takes one for the other sequence
  CHECK(manager.num_free_blocks() == 7 - 4);
  CHECK(plan.swapped_in.size() == 1);
  manager.free(foreign);
}

TEST_CASE("a sequence of which nothing is certain yet is not swapped out") {
  kv_cache_manager manager({.block_size = 1, .num_blocks = 4, .watermark = 0, .num_host_blocks = 4});
  scheduler plans(manager, {.max_running = 4, .max_steps_in_flight = 2, .preemption = preemption_mode::swap});
  (void)ask(plans, {.prompt = tokens_from(10, 2), .max_new_tokens = 3});
  (void)ask(plans, {.prompt = tokens_from(50, 2), .max_new_tokens = 3});
  CHECK(plans.schedule().seqs.size() == 2);
  const step_plan plan = plans.schedule();
  CHECK(plan.preempted.size() == 1);
  CHECK(plan.swapped_out.empty());
}

TEST_CASE("sequences whose copies failed are computed again, and nobody else is") {
  for (const bool fails_on_way_back : {false, true}) {
    CAPTURE(fails_on_way_back);
    kv_cache_manager manager({.block_size = 2, .num_blocks = 12, .watermark = 0, .num_host_blocks = 20});
    scheduler plans(manager, {.max_running = 4, .preemption = preemption_mode::swap});
    (void)ask(plans, {.prompt = tokens_from(10, 8), .max_new_tokens = 9});
    (void)ask(plans, {.prompt = tokens_from(50, 8), .max_new_tokens = 9});
    std::vector<finished_sequence> done;
    std::int64_t failed = 0;
    for (int i = 0; plans.has_work(); ++i) {
      REQUIRE(i < 100);
      const step_plan& plan = plans.schedule();
      if (!(fails_on_way_back ? plan.swapped_in : plan.swapped_out).empty() && failed == 0) {
        failed += plans.fail_swaps(plan);
        CHECK(plans.check() == "");
      }
      for (finished_sequence& one : plans.commit(plan, any_tokens(plan))) done.push_back(std::move(one));
      REQUIRE(plans.check() == "");
    }
    CHECK(failed == 1);
    CHECK(plans.stats().num_failed_swaps == 1);
    CHECK(done.size() == 2);
    for (const finished_sequence& one : done) CHECK(one.tokens.size() == 9);
    CHECK(plans.stats().num_scheduled_tokens > 2 * 16);
    require_baseline(manager);
  }
}

// --- order, waiting

TEST_CASE("larger priorities go first, equal ones in order of arrival, and the least is preempted first") {
  kv_cache_manager manager({.block_size = 2, .num_blocks = 12, .watermark = 0});
  scheduler plans(manager, {.max_running = 2});
  const request_id low = ask(plans, {.prompt = tokens_from(10, 4), .max_new_tokens = 9, .priority = -1});
  const request_id middle = ask(plans, {.prompt = tokens_from(20, 4), .max_new_tokens = 9});
  const request_id middle_too = ask(plans, {.prompt = tokens_from(30, 4), .max_new_tokens = 9});
  const request_id high = ask(plans, {.prompt = tokens_from(40, 4), .max_new_tokens = 9, .priority = 5});
  std::vector<finished_sequence> done;
  const step_plan plan = step(plans, &done);
  CHECK(row_of(plan, high) != nullptr);
  CHECK(row_of(plan, middle) != nullptr);
  CHECK(plan.seqs.size() == 2);
  while (plans.has_work()) (void)step(plans, &done);
  REQUIRE(done.size() == 4);
  CHECK(done[0].request == high);
  CHECK(done[1].request == middle);
  CHECK(done[2].request == middle_too);
  CHECK(done[3].request == low);

  scheduler tight(manager, {.max_running = 3});
  const request_id early = ask(tight, {.prompt = tokens_from(10, 6), .max_new_tokens = 12, .priority = -1});
  (void)step(tight);
  const request_id late = ask(tight, {.prompt = tokens_from(20, 6), .max_new_tokens = 12});
  const seq_id early_seq = row_of(step(tight), early)->seq;
  std::vector<seq_id> preempted;
  while (tight.has_work()) {
    const step_plan next = step(tight);
    preempted.insert(preempted.end(), next.preempted.begin(), next.preempted.end());
    if (row_of(next, early) == nullptr && tight.has_work()) CHECK(row_of(next, late) != nullptr);
  }
  REQUIRE(!preempted.empty());
  CHECK(preempted[0] == early_seq);  // it arrived first and ranks last
}

TEST_CASE("a level of priority is worth priority_span steps of waiting, so nobody waits for ever") {
  for (const std::int32_t span : {0, 5, 40}) {
    CAPTURE(span);
    kv_cache_manager manager({.block_size = 4, .num_blocks = 8, .watermark = 0});
    scheduler plans(manager, {.max_running = 1, .priority_span = span});
    (void)ask(plans, {.prompt = tokens_from(1, 3), .max_new_tokens = 4, .priority = 2});
    (void)step(plans);
    const request_id low = ask(plans, {.prompt = tokens_from(10, 3), .max_new_tokens = 4});
    std::int64_t waited = 0;
    for (;; ++waited) {
      REQUIRE(waited < 1000);
      (void)ask(plans, {.prompt = tokens_from(20, 3), .max_new_tokens = 4, .priority = 2});
      if (row_of(step(plans), low) != nullptr) break;
    }
    // Those that arrive up to 2 · span steps later go first, 4 steps each, and the one that ran.
    const std::int64_t others = 1 + 2 * span + 1;
    CHECK(waited <= others * (3 + 4 + 1));
    CHECK(waited >= (2 * span) * 4 - 4);
  }
}

TEST_CASE("no request waits longer than those before it can take") {
  MESSAGE(seed_note());
  random_source random(test_seed());
  for (const std::int32_t depth : {1, 3}) {
    for (int round = 0; round < 12; ++round) {
      CAPTURE(depth);
      CAPTURE(round);
      kv_cache_manager manager({.block_size = 4,
                                .num_blocks = 18,
                                .watermark = round % 2 == 0 ? 0 : 0.2,
                                .prefix = {.enabled = round % 3 == 0},
                                .num_host_blocks = round % 2 == 0 ? 16 : 0});
      scheduler plans(manager, {.max_tokens_per_step = 16,
                                .max_running = 5,
                                .max_steps_in_flight = depth,
                                .preemption = preemption_mode::swap});
      struct open_request {
        std::int64_t cost = 0;
        std::int64_t deadline = 0;
        std::int32_t samples = 1;
      };
      std::map<std::uint64_t, open_request> open;
      std::int64_t steps = 0;
      std::int64_t submitted = 0;
      std::deque<step_plan> flights;
      while (submitted < 60 || plans.has_work()) {
        REQUIRE(steps < 40000);
        if (submitted < 60 && random.one_in(3)) {
          ++submitted;
          request what{.prompt = tokens_from(static_cast<std::int32_t>(random.between(1, 500)),
                                             static_cast<std::size_t>(random.between(1, 40))),
                       .max_new_tokens = static_cast<std::int32_t>(random.between(1, 25)),
                       .num_samples = static_cast<std::int32_t>(random.between(1, 3))};
          open_request one;
          one.samples = what.num_samples;
          one.cost = static_cast<std::int64_t>(what.prompt.size()) + what.num_samples * (what.max_new_tokens + 1);
          one.deadline = one.cost;
          for (const auto& [id, other] : open) one.deadline += other.cost;
          one.deadline = steps + depth * one.deadline;
          open[to_index(ask(plans, std::move(what)))] = one;
        }
        ++steps;
        const step_plan& plan = plans.schedule();
        if (!plan.empty()) flights.push_back(plan);
        if (flights.empty() || (!plan.empty() && plans.num_steps_in_flight() < depth)) continue;
        for (const finished_sequence& done : plans.commit(flights.front(), any_tokens(flights.front()))) {
          open_request& one = open.at(to_index(done.request));
          CHECK(steps <= one.deadline);
          if (--one.samples == 0) open.erase(to_index(done.request));
        }
        flights.pop_front();
        REQUIRE(plans.check() == "");
      }
      CHECK(open.empty());
      require_baseline(manager);
    }
  }
}

TEST_CASE("a pool that one request fills serves all, whatever is on, each step doing something") {
  for (const std::int32_t block_size : {1, 3, 16}) {
    for (const int kind : {0, 1, 2, 3}) {
      CAPTURE(block_size);
      CAPTURE(kind);
      const std::int32_t tokens = 20 + 13 - 1;
      std::int64_t blocks = (tokens + block_size - 1) / block_size;
      const std::int32_t beams = kind == 3 ? 3 : 0;
      if (beams > 0) blocks = 20 / block_size + beams * (blocks - 20 / block_size) + beams / 2;
      kv_cache_manager manager({.block_size = block_size,
                                .num_blocks = blocks,
                                .watermark = 0.3,
                                .prefix = {.enabled = kind == 1},
                                .num_host_blocks = kind >= 2 ? 2 * blocks : 0});
      scheduler plans(manager, {.max_tokens_per_step = 7, .max_running = 6, .preemption = preemption_mode::swap});
      for (int i = 0; i < 12; ++i) {
        (void)ask(plans, {.prompt = tokens_from(i, 20),
                          .max_new_tokens = 13,
                          .num_samples = beams > 0 ? 1 : 3,
                          .beam_width = beams});
      }
      std::vector<finished_sequence> done;
      for (int i = 0; plans.has_work(); ++i) {
        REQUIRE(i < 20000);
        CHECK_FALSE(step(plans, &done).empty());
      }
      CHECK(done.size() == 36);
      require_baseline(manager);
    }
  }
}

}  // namespace
}  // namespace bifolio::test

// SPDX-License-Identifier: Apache-2.0
/// One promise of the scheduler each: prefixes, swaps, priorities, beams, drafts, steps in flight, replay.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/simulated_engine.hpp"

namespace bifolio::test {
namespace {

std::vector<token_id> tokens_from(std::int32_t first, std::size_t count) {
  std::vector<token_id> tokens;
  for (std::size_t i = 0; i < count; ++i) tokens.push_back(token_id{first + static_cast<std::int32_t>(i)});
  return tokens;
}

request_id ask(scheduler& plans, request what) {
  const submit_result got = plans.submit(std::move(what));
  REQUIRE(got.status == alloc_status::ok);
  return got.id;
}

std::vector<sampled_token> any_tokens(const step_plan& plan) {
  std::vector<sampled_token> tokens;
  for (const scheduled_seq& row : plan.seqs) {
    for (std::int32_t k = 0; k < row.num_samples; ++k) tokens.push_back({token_id{900 + k}});
  }
  return tokens;
}

step_plan step(scheduler& plans, std::vector<finished_sequence>* finished = nullptr) {
  const step_plan& plan = plans.schedule();
  REQUIRE(plans.check() == "");
  std::vector<finished_sequence> done = plans.commit(plan, any_tokens(plan));
  if (finished != nullptr) finished->insert(finished->end(), done.begin(), done.end());
  REQUIRE(plans.check() == "");
  return plan;
}

const scheduled_seq* row_of(const step_plan& plan, request_id id, std::int32_t sample = 0) {
  const auto found = std::find_if(plan.seqs.begin(), plan.seqs.end(),
                                  [&](const auto& row) { return row.request == id && row.sample == sample; });
  return found == plan.seqs.end() ? nullptr : &*found;
}

void require_baseline(const kv_cache_manager& manager) {
  CHECK(manager.num_free_blocks() == manager.config().num_blocks);
  CHECK(manager.num_free_host_blocks() == manager.config().num_host_blocks);
  CHECK(manager.stats().num_sequences == 0);
  CHECK(manager.pool().num_fenced() == 0);
  CHECK(manager.pool().num_open_fences() == 0);
}

// --- prefix caching

kv_cache_config caching(std::int64_t num_blocks, std::int64_t num_host_blocks = 0) {
  return {.block_size = 4,
          .num_blocks = num_blocks,
          .watermark = 0,
          .first_generation = 1000,
          .prefix = {.enabled = true, .seed = hash_seed{1, 2}},
          .num_host_blocks = num_host_blocks};
}

TEST_CASE("a prompt begins behind what is cached of it, and the last token is always computed") {
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

// --- beams

TEST_CASE("beams are continued as often as they are named, and dropped when they are not") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 100});
  scheduler plans(manager, {});
  const request_id id = ask(plans, {.prompt = tokens_from(10, 6), .max_new_tokens = 4, .beam_width = 3});
  const step_plan first = plans.schedule();
  REQUIRE(first.seqs.size() == 1);
  CHECK(first.seqs[0].num_samples == 3);
  (void)plans.commit(first, std::vector<sampled_token>{{token_id{1}}, {token_id{2}}, {token_id{3}}});
  CHECK(manager.stats().num_sequences == 3);
  CHECK(manager.stats().num_used_blocks == 2);
  step_plan plan = plans.schedule();
  REQUIRE(plan.seqs.size() == 3);
  CHECK(plan.copies.size() == 2);
  CHECK(manager.stats().num_used_blocks == 1 + 3);
  // 1 goes on twice, 0 is dropped, 2 goes on once, from another place.
  (void)plans.commit(
      plan, std::vector<sampled_token>{{token_id{4}, false, 1}, {token_id{5}, false, 2}, {token_id{6}, false, 1}});
  REQUIRE(plans.check() == "");
  const auto said = [&](std::int32_t sample) {
    const std::span<const token_id> all = plans.output(id, sample);
    return std::vector<token_id>(all.begin(), all.end());
  };
  CHECK(said(0) == std::vector{token_id{2}, token_id{4}});
  CHECK(said(1) == std::vector{token_id{3}, token_id{5}});
  CHECK(said(2) == std::vector{token_id{2}, token_id{6}});
  CHECK(manager.stats().num_sequences == 3);
  CHECK(manager.stats().num_used_blocks == 1 + 2);  // the block of the dropped one came back
  plan = plans.schedule();
  CHECK(plan.copies.size() == 1);
  // One ends: the other two go on, and then all end by length.
  std::vector<finished_sequence> done =
      plans.commit(plan, std::vector<sampled_token>{{token_id{7}}, {token_id{8}, true, 0}, {token_id{9}, false, 0}});
  REQUIRE(done.size() == 1);
  CHECK(done[0].sample == 1);
  CHECK(done[0].reason == finish_reason::stop);
  CHECK(done[0].tokens == std::vector{token_id{2}, token_id{4}, token_id{8}});
  REQUIRE(plans.check() == "");
  plan = plans.schedule();
  REQUIRE(plan.seqs.size() == 2);
  done = plans.commit(plan, std::vector<sampled_token>{{token_id{10}, false, 2}, {token_id{11}}});
  REQUIRE(done.size() == 2);
  CHECK(done[0].tokens == std::vector{token_id{2}, token_id{4}, token_id{9}, token_id{10}});
  CHECK(done[1].tokens == std::vector{token_id{2}, token_id{4}, token_id{9}, token_id{11}});
  CHECK_FALSE(plans.has_work());
  require_baseline(manager);
}

TEST_CASE("a beam that is not there is refused, and the step stays in flight") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 100});
  scheduler plans(manager, {});
  (void)ask(plans, {.prompt = tokens_from(10, 6), .max_new_tokens = 4, .beam_width = 2});
  (void)ask(plans, {.prompt = tokens_from(10, 6), .max_new_tokens = 4});
  (void)step(plans);
  const step_plan plan = plans.schedule();
  const std::uint64_t before = plans.digest();
  for (const std::int32_t from : {2, -2, 7}) {
    const std::vector<sampled_token> bad{{token_id{1}, false, from}, {token_id{2}}, {token_id{3}}};
    CHECK_THROWS_AS((void)plans.commit(plan, bad), error);
  }
  const std::vector<sampled_token> bad{{token_id{1}}, {token_id{2}}, {token_id{3}, false, 1}};
  CHECK_THROWS_AS((void)plans.commit(plan, bad), error);
  CHECK(plans.digest() == before);
  CHECK(plans.commit(plan, any_tokens(plan)).empty());
}

// --- drafts

TEST_CASE("drafts that were sampled are kept, the others' slots are rolled back") {
  kv_cache_manager manager(caching(100));
  scheduler plans(manager, {});
  const request_id id = ask(plans, {.prompt = tokens_from(10, 6), .max_new_tokens = 20, .max_draft_tokens = 4});
  (void)step(plans);  // samples 900
  plans.propose(id, 0, std::vector{token_id{1}, token_id{2}, token_id{3}});
  const step_plan& plan = plans.schedule();
  REQUIRE(plan.seqs.size() == 1);
  CHECK(plan.seqs[0].query_len == 4);
  CHECK(plan.seqs[0].num_drafts == 3);
  CHECK(plan.seqs[0].num_samples == 4);
  step_inputs inputs;
  plans.build(inputs);
  CHECK(inputs.tokens == std::vector{token_id{900}, token_id{1}, token_id{2}, token_id{3}});
  CHECK(inputs.sample_rows == std::vector<std::int32_t>{0, 1, 2, 3});
  CHECK(manager.num_tokens(plan.seqs[0].seq) == 10);
  // Two are right, the third is not; what was sampled behind it is ignored.
  (void)plans.commit(plan, std::vector<sampled_token>{{token_id{1}}, {token_id{2}}, {token_id{7}}, {token_id{8}}});
  REQUIRE(plans.check() == "");
  const std::span<const token_id> said = plans.output(id);
  CHECK(std::vector<token_id>(said.begin(), said.end()) ==
        std::vector{token_id{900}, token_id{1}, token_id{2}, token_id{7}});
  CHECK(plans.stats().num_draft_tokens == 3);
  CHECK(plans.stats().num_accepted_drafts == 2);
  CHECK(manager.prefix()->stats().num_cached_blocks == 2);  // 9 tokens are computed, 8 of them in full blocks
  const step_plan& next = plans.schedule();
  CHECK(next.seqs[0].query_len == 1);  // proposals are used once
  CHECK(next.seqs[0].seq_len == 10);
  (void)plans.commit(next, any_tokens(next));
  // A block that only held a refused draft was never published.
  const request_id same = ask(plans, {.prompt = {token_id{10}, token_id{11}, token_id{12}, token_id{13}, token_id{14},
                                                 token_id{15}, token_id{900}, token_id{1}, token_id{2}, token_id{3}},
                                      .max_new_tokens = 1});
  CHECK(row_of(step(plans), same)->num_cached_tokens == 8);
}

TEST_CASE("drafts end with the answer: no token past max_new_tokens, none behind a stop") {
  for (const bool stops : {false, true}) {
    kv_cache_manager manager({.block_size = 4, .num_blocks = 100});
    scheduler plans(manager, {});
    const request_id id = ask(plans, {.prompt = tokens_from(10, 6), .max_new_tokens = 4, .max_draft_tokens = 8});
    (void)step(plans);
    plans.propose(id, 0, std::vector<token_id>(8, token_id{5}));
    const step_plan& plan = plans.schedule();
    CHECK(plan.seqs[0].num_drafts == 2);  // three more tokens are wanted
    const auto done =
        plans.commit(plan, std::vector<sampled_token>{{token_id{5}}, {token_id{5}, stops}, {token_id{6}}});
    REQUIRE(done.size() == 1);
    CHECK(done[0].tokens.size() == (stops ? 3 : 4));
    CHECK(done[0].reason == (stops ? finish_reason::stop : finish_reason::length));
    require_baseline(manager);
  }
}

TEST_CASE("nobody is preempted for a draft, and a wrong proposal is refused") {
  kv_cache_manager manager({.block_size = 2, .num_blocks = 6, .watermark = 0});
  scheduler plans(manager, {.vocab_size = 1000});
  const request_id id = ask(plans, {.prompt = tokens_from(10, 4), .max_new_tokens = 6, .max_draft_tokens = 4});
  const request_id other = ask(plans, {.prompt = tokens_from(10, 4), .max_new_tokens = 3});
  const step_plan& first = plans.schedule();
  const std::vector<token_id> one{token_id{5}};
  const auto code = [&](request_id which, std::int32_t sample, const std::vector<token_id>& drafts) {
    try {
      plans.propose(which, sample, drafts);
    } catch (const error& refused) {
      return refused.code();
    }
    return errc::ok;
  };
  CHECK(code(id, 0, one) == errc::failed_precondition);  // it is being computed
  (void)plans.commit(first, any_tokens(first));
  CHECK(code(id, 1, one) == errc::not_found);
  CHECK(code(request_id{77}, 0, one) == errc::not_found);
  CHECK(code(id, 0, std::vector<token_id>(5, token_id{5})) == errc::invalid_argument);
  CHECK(code(id, 0, {token_id{1000}}) == errc::invalid_argument);
  CHECK(code(other, 0, one) == errc::invalid_argument);
  CHECK(code(id, 0, std::vector<token_id>(4, token_id{5})) == errc::ok);
  const step_plan plan = step(plans);
  CHECK(plan.preempted.empty());
  CHECK(row_of(plan, id)->num_drafts == 0);  // two blocks are free, three would be needed
  CHECK(row_of(plan, other) != nullptr);
}

// --- steps in flight

TEST_CASE("a step goes on with tokens that the step before it still samples") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 100});
  scheduler plans(manager, {.max_steps_in_flight = 3});
  const request_id a = ask(plans, {.prompt = tokens_from(10, 3), .max_new_tokens = 10});
  const request_id b = ask(plans, {.prompt = tokens_from(20, 5), .max_new_tokens = 2});
  step_inputs inputs;
  const step_plan first = plans.schedule();
  plans.build(inputs);
  CHECK(inputs.late_tokens.empty());
  const step_plan second = plans.schedule();
  plans.build(inputs);
  CHECK(inputs.tokens == std::vector{token_id{-1}, token_id{-1}});
  CHECK(inputs.positions == std::vector<std::int32_t>{3, 5});
  CHECK(inputs.late_tokens == std::vector<late_token>{{first.step, 0, 0}, {first.step, 1, 1}});
  const step_plan third = plans.schedule();
  CHECK(row_of(third, b) == nullptr);  // both of its tokens are on their way
  CHECK_THROWS_AS((void)plans.schedule(), error);
  CHECK(plans.num_steps_in_flight() == 3);
  CHECK_THROWS_AS((void)plans.commit(second, any_tokens(second)), error);  // not the oldest
  (void)plans.commit(first, std::vector<sampled_token>{{token_id{1}}, {token_id{2}}});
  plans.build(inputs);  // the third: what it needs is sampled by the second
  CHECK(inputs.late_tokens == std::vector<late_token>{{second.step, 0, 0}});
  CHECK(plans.check() == "");
  const auto done = plans.commit(second, std::vector<sampled_token>{{token_id{3}}, {token_id{4}}});
  REQUIRE(done.size() == 1);
  CHECK(done[0].tokens == std::vector{token_id{2}, token_id{4}});
  plans.build(inputs);
  CHECK(inputs.late_tokens.empty());  // known by now
  CHECK(inputs.tokens == std::vector{token_id{3}});
  (void)plans.commit(third, any_tokens(third));
  CHECK(plans.output(a).size() == 3);
}

TEST_CASE("blocks of a sequence that ended return when the steps that still compute it are committed, in order") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 100});
  scheduler plans(manager, {.max_steps_in_flight = 4});
  const request_id id = ask(plans, {.prompt = tokens_from(10, 16), .max_new_tokens = 10});
  std::deque<step_plan> flights;
  for (int i = 0; i < 4; ++i) flights.push_back(plans.schedule());
  CHECK(manager.num_free_blocks() == 95);
  const auto done = plans.commit(flights[0], std::vector<sampled_token>{{token_id{1}, true}});
  CHECK(done.size() == 1);
  CHECK(plans.output(id).empty());
  CHECK(plans.abort(id) == errc::not_found);
  for (std::size_t i = 1; i < 4; ++i) {
    CHECK(manager.num_free_blocks() == 95);
    CHECK(plans.has_work());
    CHECK(plans.check() == "");
    CHECK(plans.commit(flights[i], any_tokens(flights[i])).empty());
  }
  CHECK_FALSE(plans.has_work());
  require_baseline(manager);
}

TEST_CASE("blocks that preemption takes from a step in flight are handed out when that step is committed") {
  kv_cache_manager manager({.block_size = 2, .num_blocks = 6, .watermark = 0});
  scheduler plans(manager, {.max_running = 2, .max_steps_in_flight = 2});
  const request_id first = ask(plans, {.prompt = tokens_from(10, 4), .max_new_tokens = 8});
  const request_id second = ask(plans, {.prompt = tokens_from(20, 4), .max_new_tokens = 8});
  std::deque<step_plan> flights;
  std::map<std::uint64_t, std::size_t> said;
  bool has_seen_fence = false;
  for (int i = 0; plans.has_work(); ++i) {
    REQUIRE(i < 200);
    if (flights.size() < 2) {
      const step_plan& plan = plans.schedule();
      REQUIRE(plans.check() == "");
      has_seen_fence = has_seen_fence || manager.pool().num_fenced() > 0;
      if (!plan.empty()) flights.push_back(plan);
      if (!plan.empty() && flights.size() < 2) continue;
    }
    REQUIRE(!flights.empty());
    for (const finished_sequence& one : plans.commit(flights.front(), any_tokens(flights.front()))) {
      said[to_index(one.request)] = one.tokens.size();
    }
    flights.pop_front();
  }
  CHECK(has_seen_fence);
  CHECK(plans.stats().num_preemptions > 0);
  CHECK(said[to_index(first)] == 8);
  CHECK(said[to_index(second)] == 8);
  require_baseline(manager);
}

// --- abort

TEST_CASE("a request aborted at any step, in any state, leaves everything as if it had not been") {
  // Kinds of the victim: plain, samples, beams, drafts; pools so small that it is preempted or swapped.
  for (const int kind : {0, 1, 2, 3}) {
    for (const std::int32_t depth : {1, 3}) {
      for (const bool swaps : {false, true}) {
        for (int point = 0; point < 70; ++point) {
          CAPTURE(kind);
          CAPTURE(depth);
          CAPTURE(swaps);
          CAPTURE(point);
          kv_cache_manager manager({.block_size = 2,
                                    .num_blocks = 34,
                                    .watermark = 0,
                                    .max_sequences = 16,
                                    .prefix = {.enabled = point % 2 == 0},
                                    .num_host_blocks = swaps ? 40 : 0});
          scheduler plans(manager, {.max_tokens_per_step = 6,
                                    .max_running = 7,
                                    .max_steps_in_flight = depth,
                                    .preemption = preemption_mode::swap});
          request what{.prompt = tokens_from(20, 11), .max_new_tokens = 6};
          if (kind == 1) what.num_samples = 3;
          if (kind == 2) what.beam_width = 3;
          if (kind == 3) what.max_draft_tokens = 3;
          const request_id before = ask(plans, {.prompt = tokens_from(10, 20), .max_new_tokens = 16, .num_samples = 2});
          const request_id victim = ask(plans, what);
          const request_id after = ask(plans, {.prompt = tokens_from(30, 5), .max_new_tokens = 6});
          std::map<std::uint64_t, std::int64_t> ended;
          std::deque<step_plan> flights;
          int at = 0;
          const auto maybe_abort = [&] {
            if (at++ != point) return;
            (void)plans.abort(victim);
            REQUIRE(plans.check() == "");
          };
          for (int i = 0; plans.has_work(); ++i) {
            REQUIRE(i < 500);
            maybe_abort();
            if (kind == 3 && !plans.output(victim).empty() && flights.empty()) {
              plans.propose(victim, 0, std::vector{token_id{900}, token_id{5}});
            }
            const step_plan& plan = plans.schedule();
            REQUIRE(plans.check() == "");
            maybe_abort();
            if (!plan.empty()) flights.push_back(plan);
            if (!plan.empty() && plans.num_steps_in_flight() < depth) continue;
            if (flights.empty()) {  // the victim was all that was left
              REQUIRE_FALSE(plans.has_work());
              break;
            }
            for (const finished_sequence& one : plans.commit(flights.front(), any_tokens(flights.front()))) {
              ++ended[to_index(one.request)];
            }
            flights.pop_front();
            REQUIRE(plans.check() == "");
          }
          require_baseline(manager);
          CHECK(ended[to_index(before)] == 2);
          CHECK(ended[to_index(after)] == 1);
          CHECK(ended[to_index(victim)] + plans.stats().num_aborted == (kind == 1 || kind == 2 ? 3 : 1));
        }
      }
    }
  }
}

// --- plans

TEST_CASE("a plan comes back from its JSON, and what is no plan is refused with the place") {
  step_plan plan;
  plan.step = 3;
  plan.seqs = {{.seq = seq_id{std::uint64_t{5} << 40},
                .query_len = 3,
                .seq_len = 9,
                .request = request_id{4},
                .sample = 1,
                .num_samples = 3,
                .num_drafts = 2,
                .num_cached_tokens = 0},
               {.seq = seq_id{6}, .query_len = 1, .seq_len = 9, .num_cached_tokens = 8}};
  plan.copies = {{block_id{7}, block_id{8}}};
  plan.swap_outs = {{block_id{1}, block_id{2}}, {block_id{3}, block_id{4}}};
  plan.swap_ins = {{block_id{5}, block_id{6}}};
  plan.swapped_out = {seq_id{9}};
  plan.swapped_in = {seq_id{10}, seq_id{11}};
  plan.preempted = {seq_id{1}, seq_id{2}};
  plan.aborted = {request_id{12}};
  plan.num_tokens = 4;
  const std::string json = to_string(plan);
  CHECK(json ==
        R"({"step":3,"seqs":[{"seq":5497558138880,"query_len":3,"seq_len":9,"request":4,"sample":1,"num_samples":3,)"
        R"("num_drafts":2,"num_cached_tokens":0},{"seq":6,"query_len":1,"seq_len":9,"request":0,"sample":0,)"
        R"("num_samples":0,"num_drafts":0,"num_cached_tokens":8}],"copies":[[7,8]],"swap_outs":[[1,2],[3,4]],)"
        R"("swap_ins":[[5,6]],"swapped_out":[9],"swapped_in":[10,11],"preempted":[1,2],"aborted":[12],)"
        R"("num_tokens":4})");
  CHECK(parse_step_plan(json) == plan);
  CHECK(parse_step_plan(to_string(step_plan{})) == step_plan{});
  CHECK(parse_step_plan(" { \"num_tokens\" : 7 ,\n\t\"step\":2 } ").num_tokens == 7);
  for (std::size_t cut = 0; cut < json.size(); ++cut) {
    CHECK_THROWS_AS((void)parse_step_plan(json.substr(0, cut)), error);
  }
  for (const char* bad : {"{\"stop\":1}", "{\"step\":1} x", "{\"step\":x}", "{\"step\":99999999999999999999}",
                          "{\"copies\":[[1]]}", "{\"seqs\":[{\"seq\":-1}]}", "{\"seqs\":[{\"rank\":1}]}", "[]"}) {
    CAPTURE(bad);
    CHECK_THROWS_AS((void)parse_step_plan(bad), error);
  }
}

TEST_CASE("a recorded run can be replayed: the same plans and the same digests") {
  struct record {
    std::string plan;
    std::vector<sampled_token> sampled;
    std::uint64_t digest = 0;
  };
  // Everything is on. A replay takes the sampled tokens from the record, no engine needed.
  const auto play = [](std::vector<record>& log, bool replays) {
    kv_cache_config cache = caching(22, 12);
    cache.max_sequences = 20;
    kv_cache_manager manager(cache);
    scheduler plans(manager, {.max_tokens_per_step = 24,
                              .max_running = 8,
                              .max_chunk_tokens = 9,
                              .max_steps_in_flight = 2,
                              .preemption = preemption_mode::automatic,
                              .swap_block_cost = 2,
                              .priority_span = 4});
    simulated_engine engine(manager, 30);
    std::deque<std::pair<step_plan, std::size_t>> flights;
    std::int32_t submitted = 0;
    std::size_t at = 0;
    step_inputs inputs;
    for (int i = 0; submitted < 40 || plans.has_work(); ++i) {
      REQUIRE(i < 5000);
      for (; submitted < std::min(40, 2 * (i + 1)); ++submitted) {
        const request what{.prompt = tokens_from(submitted % 4 * 100, static_cast<std::size_t>(3 + submitted * 7 % 23)),
                           .max_new_tokens = 2 + submitted * 5 % 17,
                           .num_samples = submitted % 5 == 1 ? 3 : 1,
                           .beam_width = submitted % 5 == 2 ? 2 : 0,
                           .priority = submitted % 3,
                           .prefix_salt = submitted % 7 == 0 ? "salt" : ""};
        engine.note(ask(plans, what), what);
      }
      if (i % 13 == 12) (void)plans.abort(request_id{static_cast<std::uint64_t>(i / 2)});
      const step_plan& plan = plans.schedule();
      if (!plan.empty()) {
        if (replays) {
          REQUIRE(at < log.size());
          REQUIRE(to_string(plan) == log[at].plan);
          CHECK(parse_step_plan(log[at].plan) == plan);
        } else {
          plans.build(inputs);
          log.push_back({to_string(plan), engine.execute(plan, inputs), 0});
        }
        flights.emplace_back(plan, at++);
        if (flights.size() < 2) continue;
      }
      if (flights.empty()) continue;
      record& oldest = log[flights.front().second];
      (void)plans.commit(flights.front().first, oldest.sampled);
      if (replays) {
        REQUIRE(plans.digest() == oldest.digest);
      } else {
        oldest.digest = plans.digest();
      }
      flights.pop_front();
    }
    CHECK(plans.stats().num_swap_outs > 0);
    CHECK(plans.stats().num_preemptions > plans.stats().num_swap_outs);  // some are computed again
    CHECK(plans.stats().num_cached_tokens > 0);
    return plans.digest();
  };
  std::vector<record> log;
  const std::uint64_t end = play(log, false);
  CHECK(play(log, true) == end);
}

}  // namespace
}  // namespace bifolio::test

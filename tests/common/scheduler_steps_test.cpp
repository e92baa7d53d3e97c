// SPDX-License-Identifier: Apache-2.0
/// What a step may be besides one token for each: beams, drafts, steps in flight, aborts, plans in a log.

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
#include "common/simulated_engine.hpp"

namespace bifolio::test {
namespace {

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

TEST_CASE("beams need more blocks than one sequence, two of them already") {
  kv_cache_manager manager({.block_size = 16, .num_blocks = 1});
  scheduler plans(manager, {});
  CHECK(plans.submit({.prompt = tokens_from(10, 6), .max_new_tokens = 4, .beam_width = 2}).status ==
        alloc_status::never);
  CHECK(plans.submit({.prompt = tokens_from(10, 6), .max_new_tokens = 4, .beam_width = 1}).status == alloc_status::ok);
}

TEST_CASE("a scheduler that ends with steps in flight leaves no fence open") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 20});
  {
    scheduler plans(manager, {.max_steps_in_flight = 3});
    (void)ask(plans, {.prompt = tokens_from(10, 6), .max_new_tokens = 8});
    for (int n = 0; n < 3; ++n) CHECK_FALSE(plans.schedule().empty());
    CHECK(plans.num_steps_in_flight() == 3);
  }
  CHECK(manager.num_free_blocks() == 20);
  CHECK(manager.check() == "");
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

TEST_CASE("beams for which no sequence is left to fork start again together, also when the first has ended") {
  for (const bool first_ends : {false, true}) {
    CAPTURE(first_ends);
    kv_cache_manager manager({.block_size = 4, .num_blocks = 100, .max_sequences = 4});
    scheduler plans(manager, {.max_running = 4});
    const auto take = [&](int count) {
      std::vector<seq_id> taken;
      for (int i = 0; i < count; ++i) taken.push_back(manager.allocate(1).seq);
      return taken;
    };
    const request_id id = ask(plans, {.prompt = tokens_from(10, 6), .max_new_tokens = 4, .beam_width = 3});
    const step_plan& plan = plans.schedule();
    std::vector<seq_id> foreign = take(first_ends ? 3 : 2);  // with one record left, one of two forks succeeds
    std::vector<finished_sequence> done =
        plans.commit(plan, std::vector<sampled_token>{{token_id{1}, first_ends}, {token_id{2}}, {token_id{3}}});
    REQUIRE(plans.check() == "");
    CHECK(done.size() == (first_ends ? 1 : 0));
    REQUIRE(plans.has_work());
    CHECK(plans.stats().num_running == 0);
    CHECK(manager.stats().num_sequences == std::ssize(foreign));
    // The prompt is computed again, and again there is no sequence for each of them.
    step_plan again = step(plans, &done);
    REQUIRE(again.seqs.size() == 1);
    CHECK(again.seqs[0].query_len == 6);
    CHECK(again.seqs[0].num_samples == 0);
    CHECK(plans.stats().num_running == 0);
    for (const seq_id seq : foreign) manager.free(seq);
    for (int i = 0; plans.has_work(); ++i) {
      REQUIRE(i < 20);
      (void)step(plans, &done);
    }
    REQUIRE(done.size() == 3);
    for (const finished_sequence& one : done) {
      CHECK(one.request == id);
      const bool ended_first = first_ends && one.sample == 0;
      CHECK(one.tokens.size() == (ended_first ? 1 : 4));
      CHECK(one.tokens[0] == token_id{one.sample + 1});
    }
    require_baseline(manager);
  }
}

TEST_CASE("the first beams catch up in every step, next to samples that could use up its tokens") {
  kv_cache_manager manager({.block_size = 1, .num_blocks = 40, .watermark = 0});
  scheduler plans(manager, {.max_tokens_per_step = 4, .max_running = 8});
  const request_id before = ask(plans, {.prompt = tokens_from(10, 2), .max_new_tokens = 12});
  const request_id beams = ask(plans, {.prompt = tokens_from(20, 2), .max_new_tokens = 6, .beam_width = 2});
  for (int i = 0; i < 4; ++i) (void)step(plans);
  CHECK(plans.output(beams).size() == 4);
  const seq_id foreign = manager.allocate(manager.num_free_blocks()).seq;
  CHECK(step(plans).preempted.size() == 2);
  manager.free(foreign);
  CHECK(plans.abort(before) == errc::ok);
  (void)ask(plans, {.prompt = tokens_from(30, 1), .max_new_tokens = 12, .num_samples = 4});
  std::vector<finished_sequence> done;
  for (int i = 0; done.empty(); ++i) {
    REQUIRE(i < 20);
    const step_plan plan = step(plans, &done);
    CHECK((row_of(plan, beams) != nullptr || row_of(plan, beams, 1) != nullptr));
  }
  CHECK(done[0].request == beams);
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
  // Two are right, the third is not; what was sampled after it is ignored.
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

TEST_CASE("drafts end with the answer: no token past max_new_tokens, none after a stop") {
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
  CHECK(inputs.placeholders.empty());
  const step_plan second = plans.schedule();
  plans.build(inputs);
  CHECK(inputs.tokens == std::vector{token_id{-1}, token_id{-1}});
  CHECK(inputs.positions == std::vector<std::int32_t>{3, 5});
  CHECK(inputs.placeholders == std::vector<token_placeholder>{{first.step, 0, 0}, {first.step, 1, 1}});
  const step_plan third = plans.schedule();
  CHECK(row_of(third, b) == nullptr);  // both of its tokens are on their way
  CHECK_THROWS_AS((void)plans.schedule(), error);
  CHECK(plans.num_steps_in_flight() == 3);
  CHECK_THROWS_AS((void)plans.commit(second, any_tokens(second)), error);  // not the oldest
  (void)plans.commit(first, std::vector<sampled_token>{{token_id{1}}, {token_id{2}}});
  plans.build(inputs);  // the third: what it needs is sampled by the second
  CHECK(inputs.placeholders == std::vector<token_placeholder>{{second.step, 0, 0}});
  CHECK(plans.check() == "");
  const auto done = plans.commit(second, std::vector<sampled_token>{{token_id{3}}, {token_id{4}}});
  REQUIRE(done.size() == 1);
  CHECK(done[0].tokens == std::vector{token_id{2}, token_id{4}});
  plans.build(inputs);
  CHECK(inputs.placeholders.empty());  // known by now
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

TEST_CASE("who waits for more blocks than are free keeps later ones from taking these, and preempts nobody") {
  for (const bool with_prompt : {false, true}) {
    CAPTURE(with_prompt);
    kv_cache_manager manager({.block_size = 2, .num_blocks = with_prompt ? 14 : 11, .watermark = 0});
    scheduler plans(manager, {.max_running = 16, .max_chunk_tokens = 3, .max_steps_in_flight = 2});
    // By rank, with the blocks that they want in the third step.
    const request_id beams = ask(plans, {.prompt = tokens_from(10, 2), .max_new_tokens = 3, .beam_width = 2});  // 2
    const request_id beam = ask(plans, {.prompt = tokens_from(20, 2), .max_new_tokens = 3, .beam_width = 1});   // 1
    const request_id in_place = ask(plans, {.prompt = tokens_from(30, 2), .max_new_tokens = 9});                // 0
    const request_id guesses = ask(plans, {.prompt = tokens_from(40, 3), .max_new_tokens = 9, .max_draft_tokens = 2});
    const request_id grows = ask(plans, {.prompt = tokens_from(50, 3), .max_new_tokens = 9});  // 1
    const request_id ends = ask(plans, {.prompt = tokens_from(60, 1), .max_new_tokens = 1});
    request_id prompt = invalid_request;
    if (with_prompt) prompt = ask(plans, {.prompt = tokens_from(70, 7), .max_new_tokens = 9});  // 1
    const step_plan first = plans.schedule();
    REQUIRE(first.seqs.size() == (with_prompt ? 7 : 6));
    const step_plan second = plans.schedule();
    CHECK(second.seqs.size() == (with_prompt ? 3 : 2));
    CHECK(manager.num_free_blocks() == 2);
    const seq_id foreign = manager.allocate(1).seq;
    CHECK(plans.commit(first, any_tokens(first)).size() == 1);
    CHECK(manager.pool().num_fenced() == 1);  // of the one that ended, until the second step is committed
    CHECK(row_of(second, ends) == nullptr);
    const request_id waits = ask(plans, {.prompt = tokens_from(80, 1), .max_new_tokens = 1});
    plans.propose(guesses, 0, std::vector{token_id{1}, token_id{2}});
    const step_plan third = plans.schedule();
    CHECK(third.preempted.empty());
    CHECK(manager.num_free_blocks() == 1);
    CHECK(row_of(third, beams) == nullptr);
    CHECK(row_of(third, beam) == nullptr);
    CHECK(row_of(third, grows) == nullptr);
    CHECK(row_of(third, prompt) == nullptr);
    CHECK(row_of(third, waits) == nullptr);
    REQUIRE(row_of(third, in_place) != nullptr);
    REQUIRE(row_of(third, guesses) != nullptr);
    CHECK(row_of(third, guesses)->num_drafts == 0);
    manager.free(foreign);
    (void)plans.commit(second, any_tokens(second));
    const step_plan fourth = plans.schedule();
    CHECK(row_of(fourth, beams) != nullptr);
    CHECK(row_of(fourth, beams, 1) != nullptr);
    CHECK(plans.check() == "");
  }
}

TEST_CASE("a prompt that waits for more blocks than are free does so too") {
  kv_cache_manager manager({.block_size = 1, .num_blocks = 8, .watermark = 0});
  scheduler plans(manager, {.max_chunk_tokens = 2, .max_steps_in_flight = 2});
  const request_id prompt = ask(plans, {.prompt = tokens_from(10, 6), .max_new_tokens = 1});
  const request_id grows = ask(plans, {.prompt = tokens_from(20, 1), .max_new_tokens = 6});
  (void)ask(plans, {.prompt = tokens_from(30, 1), .max_new_tokens = 1});
  const step_plan first = plans.schedule();
  const step_plan second = plans.schedule();
  (void)plans.commit(first, any_tokens(first));
  CHECK(manager.num_free_blocks() == 1);
  CHECK(manager.pool().num_fenced() == 1);
  const step_plan third = plans.schedule();
  CHECK(third.empty());
  CHECK(third.preempted.empty());
  (void)plans.commit(second, any_tokens(second));
  const step_plan fourth = plans.schedule();
  REQUIRE(row_of(fourth, prompt) != nullptr);
  CHECK(row_of(fourth, prompt)->query_len == 2);
  CHECK(row_of(fourth, grows) == nullptr);
}

TEST_CASE("a preempted sequence whose last token is still being sampled takes no blocks again") {
  for (const bool swaps : {false, true}) {
    CAPTURE(swaps);
    kv_cache_manager manager({.block_size = 4, .num_blocks = 4, .watermark = 0, .num_host_blocks = swaps ? 4 : 0});
    scheduler plans(manager, {.max_running = 4, .max_steps_in_flight = 3, .preemption = preemption_mode::swap});
    const seq_id foreign = manager.allocate(1).seq;
    const request_id beams = ask(plans, {.prompt = tokens_from(10, 4), .max_new_tokens = 2, .beam_width = 2});
    const request_id victim = ask(plans, {.prompt = tokens_from(20, 2), .max_new_tokens = 2});
    const step_plan first = plans.schedule();
    const step_plan second = plans.schedule();
    REQUIRE(row_of(second, victim) != nullptr);
    (void)plans.commit(first, any_tokens(first));
    const step_plan third = plans.schedule();  // the beams want two blocks, one is free
    CHECK(third.seqs.empty());
    CHECK(third.preempted.size() + third.swapped_out.size() == 1);
    CHECK(third.swapped_out.size() == (swaps ? 1 : 0));
    CHECK(plans.abort(beams) == errc::ok);
    CHECK(manager.num_free_blocks() == 1);
    CHECK(plans.schedule().empty());
    const std::vector<finished_sequence> done = plans.commit(second, any_tokens(second));
    REQUIRE(done.size() == 1);
    CHECK(done[0].request == victim);
    CHECK(done[0].tokens.size() == 2);
    if (swaps) (void)plans.commit(third, {});
    CHECK_FALSE(plans.has_work());
    CHECK(plans.stats().num_scheduled_tokens == 4 + 2 + 1);
    manager.free(foreign);
    require_baseline(manager);
  }
}

TEST_CASE("what steps in flight sample from blocks that came back wrong is ignored, even if they were lost since") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 6, .watermark = 0, .num_host_blocks = 10});
  scheduler plans(manager, {.max_running = 4, .max_steps_in_flight = 4, .swap_block_cost = 3});
  const request_id older = ask(plans, {.prompt = tokens_from(10, 7), .max_new_tokens = 12});
  const request_id aborted = ask(plans, {.prompt = tokens_from(30, 5), .max_new_tokens = 12});
  const request_id victim = ask(plans, {.prompt = tokens_from(50, 7), .max_new_tokens = 10});
  (void)step(plans);
  (void)step(plans);
  CHECK(step(plans).swapped_out.size() == 1);  // 8 tokens in 2 blocks
  CHECK(plans.abort(aborted) == errc::ok);
  const step_plan back = plans.schedule();
  REQUIRE(back.swapped_in.size() == 1);
  const step_plan second = plans.schedule();
  const step_plan third = plans.schedule();
  CHECK(row_of(second, victim) != nullptr);
  CHECK(row_of(third, victim) != nullptr);
  const step_plan last = plans.schedule();  // `older` wants a block
  CHECK(last.preempted.size() == 1);        // with 3 blocks its 8 certain tokens are computed again
  CHECK(plans.output(victim).size() == 2);
  CHECK(plans.fail_swaps(back) == 0);
  CHECK(plans.fail_swaps(back) == 0);  // once for each list of copies, say
  for (const step_plan* plan : {&back, &second, &third}) (void)plans.commit(*plan, any_tokens(*plan));
  CHECK(plans.check() == "");
  CHECK(plans.output(victim).size() == 2);
  CHECK(plans.output(older).size() == 6);
}

TEST_CASE("a token that was computed before its sequence's blocks moved is kept when the copies fail") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 4, .watermark = 0, .num_host_blocks = 10});
  scheduler plans(manager, {.max_running = 4, .max_steps_in_flight = 2, .preemption = preemption_mode::swap});
  (void)ask(plans, {.prompt = tokens_from(10, 7), .max_new_tokens = 9});
  const request_id victim = ask(plans, {.prompt = tokens_from(50, 7), .max_new_tokens = 9});
  (void)step(plans);
  const step_plan computes = plans.schedule();
  REQUIRE(row_of(computes, victim) != nullptr);
  const step_plan moves = plans.schedule();
  REQUIRE(moves.swapped_out.size() == 1);
  CHECK(plans.fail_swaps(moves) == 1);
  (void)plans.commit(computes, any_tokens(computes));
  CHECK(plans.output(victim).size() == 2);
  CHECK(plans.check() == "");
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

TEST_CASE("a step plan's JSON nested however deep is refused in a short sentence of printable characters") {
  const auto refusal = [](const std::string& json) -> std::string {
    try {
      (void)parse_step_plan(json);
    } catch (const error& problem) {
      CHECK(problem.code() == errc::invalid_argument);
      return problem.what();
    }
    return "it was accepted";
  };
  for (const char* unit : {"[", "{", "{\"seqs\":", "{\"seqs\":[", "[["}) {
    for (const char* before : {"", "{\"copies\":", "{\"copies\":[", "{\"seqs\":[",
                               "{\"seqs\":[{\"seq\":", "{\"step\":", "{\"preempted\":["}) {
      std::string json = before;
      while (json.size() < 1'000'000) json += unit;
      CAPTURE(unit);
      CAPTURE(before);
      CHECK(refusal(json).size() < 120);
      CHECK(refusal(json).find("is expected") != std::string::npos);
    }
  }
  CHECK(refusal("\x1b[2J\n\x9b\x7f\"") == "a step plan's JSON has \"?[2J???\"\" at character 0 where '{' is expected");
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

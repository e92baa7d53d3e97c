// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>
#include <time.h>

#include <algorithm>
#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/scheduler_helpers.hpp"

namespace bifolio::test {
namespace {

request_id ask(scheduler& plans, std::size_t prompt, std::int32_t max_new_tokens, std::int32_t num_samples = 1) {
  return test::ask(plans, {std::vector<token_id>(prompt, token_id{1}), max_new_tokens, num_samples});
}

TEST_CASE("a long prompt is computed in chunks next to others that decode, and sampled when it is complete") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 100});
  scheduler plans(manager, {.max_tokens_per_step = 10, .max_running = 8});
  const request_id decoding = ask(plans, 3, 20);
  (void)step(plans);
  const request_id lengthy = ask(plans, 25, 2);
  std::vector<std::int32_t> chunks, lengths, samples;
  for (int i = 0; i < 3; ++i) {
    const step_plan plan = step(plans);
    REQUIRE(row_of(plan, decoding) != nullptr);
    CHECK(row_of(plan, decoding)->query_len == 1);
    CHECK(row_of(plan, decoding)->num_samples == 1);
    chunks.push_back(row_of(plan, lengthy)->query_len);
    lengths.push_back(row_of(plan, lengthy)->seq_len);
    samples.push_back(row_of(plan, lengthy)->num_samples);
  }
  CHECK(chunks == std::vector<std::int32_t>{9, 9, 7});
  CHECK(lengths == std::vector<std::int32_t>{9, 18, 25});
  CHECK(samples == std::vector<std::int32_t>{0, 0, 1});
}

TEST_CASE("max_chunk_tokens leaves room for several prompts in a step") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 100});
  scheduler plans(manager, {.max_tokens_per_step = 32, .max_running = 8, .max_chunk_tokens = 8});
  for (int i = 0; i < 6; ++i) ask(plans, 20, 2);
  const step_plan plan = step(plans);
  REQUIRE(plan.seqs.size() == 4);
  for (const scheduled_seq& row : plan.seqs) CHECK(row.query_len == 8);
  CHECK(plans.stats().num_running == 4);
  CHECK(plans.stats().num_waiting == 2);
}

TEST_CASE("the inputs of a step are the tokens, positions and sampled rows of the plan") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 100});
  scheduler plans(manager, {.max_tokens_per_step = 6, .max_running = 8});
  (void)plans.submit({{token_id{10}, token_id{11}, token_id{12}, token_id{13}}, 3, 1});
  (void)plans.submit({{token_id{20}, token_id{21}, token_id{22}}, 3, 1});
  step_inputs inputs;
  const step_plan& plan = plans.schedule();
  plans.build(inputs);
  CHECK(inputs.tokens ==
        std::vector{token_id{10}, token_id{11}, token_id{12}, token_id{13}, token_id{20}, token_id{21}});
  CHECK(inputs.positions == std::vector<std::int32_t>{0, 1, 2, 3, 0, 1});
  CHECK(inputs.sample_rows == std::vector<std::int32_t>{3});
  CHECK(inputs.batch.query_start_loc == std::vector<std::int32_t>{0, 4, 6});
  (void)plans.commit(plan, std::vector<sampled_token>{{token_id{14}}});
  (void)plans.schedule();
  plans.build(inputs);
  CHECK(inputs.tokens == std::vector{token_id{14}, token_id{22}});
  CHECK(inputs.positions == std::vector<std::int32_t>{4, 2});
  CHECK(inputs.sample_rows == std::vector<std::int32_t>{0, 1});
}

TEST_CASE("sequences end by length or by the caller's word, and their tokens come with them") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 100});
  scheduler plans(manager, {});
  const request_id a = ask(plans, 3, 2);
  const request_id b = ask(plans, 3, 5);
  (void)plans.commit(plans.schedule(), std::vector<sampled_token>{{token_id{7}}, {token_id{8}}});
  CHECK(plans.output(b).size() == 1);
  const auto done = plans.commit(plans.schedule(), std::vector<sampled_token>{{token_id{9}}, {token_id{10}, true}});
  REQUIRE(done.size() == 2);
  CHECK(done[0].request == a);
  CHECK(done[0].reason == finish_reason::length);
  CHECK(done[0].tokens == std::vector{token_id{7}, token_id{9}});
  CHECK(done[1].request == b);
  CHECK(done[1].reason == finish_reason::stop);
  CHECK(done[1].tokens == std::vector{token_id{8}, token_id{10}});
  CHECK_FALSE(plans.has_work());
  CHECK(manager.num_free_blocks() == 100);
}

TEST_CASE("parallel samples compute their prompt once, share its blocks and copy the tail when they write") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 100});
  scheduler plans(manager, {});
  const request_id id = ask(plans, 14, 10, 5);
  const step_plan first = step(plans);
  REQUIRE(first.seqs.size() == 1);
  CHECK(first.num_tokens == 14);
  CHECK(first.seqs[0].num_samples == 5);
  CHECK(manager.stats().num_used_blocks == 4);
  CHECK(manager.stats().num_sequences == 5);
  for (std::int32_t k = 0; k < 5; ++k) CHECK(plans.output(id, k)[0] == token_id{900 + k});
  const step_plan second = step(plans);
  CHECK(second.seqs.size() == 5);
  CHECK(second.copies.size() == 4);  // the last writer keeps the original
  for (const block_copy& copy : second.copies) CHECK(copy.src == block_id{3});
  CHECK(manager.stats().num_used_blocks == 3 + 5);
  for (std::int32_t k = 0; k < 5; ++k) CHECK(second.seqs[static_cast<std::size_t>(k)].sample == k);
  CHECK(step(plans).copies.empty());
}

TEST_CASE("samples that end with their first token are never forked") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 100});
  scheduler plans(manager, {});
  (void)ask(plans, 5, 1, 4);
  std::vector<finished_sequence> done;
  (void)step(plans, &done);
  CHECK(done.size() == 4);
  CHECK(manager.stats().num_forks == 0);
  CHECK(manager.num_free_blocks() == 100);
  (void)ask(plans, 5, 3, 4);
  const step_plan& plan = plans.schedule();
  const std::vector<sampled_token> tokens{{token_id{1}, true}, {token_id{2}}, {token_id{3}, true}, {token_id{4}}};
  CHECK(plans.commit(plan, tokens).size() == 2);
  CHECK(plans.check() == "");
  CHECK(manager.stats().num_forks == 2);
  CHECK(step(plans).seqs.size() == 2);
}

TEST_CASE("a request with samples waits until all of them have a place") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 100});
  scheduler plans(manager, {.max_running = 4});
  const request_id single = ask(plans, 4, 2);
  const request_id four = ask(plans, 4, 2, 4);
  const request_id later = ask(plans, 4, 2);
  step_plan plan = step(plans);
  CHECK(row_of(plan, single) != nullptr);
  CHECK(row_of(plan, four) == nullptr);
  CHECK(row_of(plan, later) == nullptr);  // nobody overtakes
  plan = step(plans);
  plan = step(plans);
  CHECK(row_of(plan, four) != nullptr);
  CHECK(row_of(plan, later) == nullptr);
}

TEST_CASE("admission takes only what allocation will have, the watermark and open prompts kept free") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 20, .watermark = 0.1});
  scheduler plans(manager, {.max_tokens_per_step = 12, .max_running = 8, .max_chunk_tokens = 8});
  const request_id a = ask(plans, 40, 2);  // 10 blocks, 2 at a time
  const request_id b = ask(plans, 36, 2);  // 9 more would leave 1 block: below the watermark of 2
  for (int i = 0; i < 5; ++i) {
    const step_plan plan = step(plans);
    CHECK(row_of(plan, a) != nullptr);
    CHECK(row_of(plan, b) == nullptr);
  }
  while (plans.has_work()) CHECK(step(plans).preempted.empty());
}

TEST_CASE("admission keeps a block free for each sample that will fork") {
  for (const std::int64_t num_blocks : {5, 6}) {
    CAPTURE(num_blocks);
    kv_cache_manager manager({.block_size = 4, .num_blocks = num_blocks, .watermark = 0});
    scheduler plans(manager, {});
    const request_id samples = ask(plans, 4, 9, 3);  // 1 block and 2 more
    const request_id more = ask(plans, 4, 9, 3);
    const step_plan plan = step(plans);
    CHECK(row_of(plan, samples) != nullptr);
    CHECK((row_of(plan, more) != nullptr) == (num_blocks == 6));
  }
}

TEST_CASE("when blocks run out the latest arrival is preempted, and goes on with its tokens later") {
  kv_cache_manager manager({.block_size = 2, .num_blocks = 8, .watermark = 0});
  scheduler plans(manager, {.max_running = 4});
  const request_id oldest = ask(plans, 4, 9);
  const request_id latest = ask(plans, 4, 9);
  std::vector<finished_sequence> done;
  std::int64_t preempted = 0;
  for (int i = 0; plans.has_work(); ++i) {
    REQUIRE(i < 100);
    const step_plan plan = step(plans, &done);
    preempted += static_cast<std::int64_t>(plan.preempted.size());
    if (done.empty()) CHECK(row_of(plan, oldest) != nullptr);
  }
  CHECK(preempted == 1);
  CHECK(plans.stats().num_preemptions == 1);
  REQUIRE(done.size() == 2);
  CHECK(done[0].request == oldest);
  CHECK(done[1].request == latest);
  CHECK(done[1].tokens.size() == 9);
  // Recomputation: tokens that were computed twice are counted twice.
  CHECK(plans.stats().num_scheduled_tokens > 2 * (4 + 8));
  CHECK(plans.stats().num_sampled_tokens == 18);
}

TEST_CASE("with a pool that one request fills, each step computes something and all requests end") {
  for (const std::int32_t block_size : {1, 3, 16}) {
    for (const std::int32_t samples : {1, 3}) {
      CAPTURE(block_size);
      CAPTURE(samples);
      const std::int32_t blocks = (20 + 13 - 1 + block_size - 1) / block_size;
      kv_cache_manager manager({.block_size = block_size, .num_blocks = blocks, .watermark = 0.3});
      scheduler plans(manager, {.max_tokens_per_step = 7, .max_running = 6});
      for (int i = 0; i < 12; ++i) ask(plans, 20, 13, samples);
      std::vector<finished_sequence> done;
      for (int i = 0; plans.has_work(); ++i) {
        REQUIRE(i < 20000);
        CHECK(step(plans, &done).num_tokens > 0);
      }
      CHECK(done.size() == static_cast<std::size_t>(12 * samples));
      CHECK(manager.num_free_blocks() == blocks);
    }
  }
}

TEST_CASE("a burst of arrivals keeps its order, and costs each of them alike") {
  // Thread time of the schedule that receives `count` requests, the least of several.
  const auto cost = [](std::size_t count, std::int32_t priorities) {
    double least = 1e18;
    for (int round = 0; round < 5; ++round) {
      kv_cache_manager manager({.block_size = 4, .num_blocks = 8, .max_sequences = 4});
      scheduler plans(manager, {.max_tokens_per_step = 8, .max_running = 1});
      std::uint64_t state = 12345;
      for (std::size_t i = 0; i < count; ++i) {
        state = state * 6364136223846793005U + 1442695040888963407U;
        const auto priority = static_cast<std::int32_t>((state >> 33) % static_cast<std::uint64_t>(priorities));
        (void)test::ask(plans, {.prompt = {token_id{1}, token_id{2}}, .max_new_tokens = 1, .priority = priority});
      }
      timespec before{}, after{};
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &before);
      const step_plan& plan = plans.schedule();
      clock_gettime(CLOCK_THREAD_CPUTIME_ID, &after);
      REQUIRE(plan.seqs.size() == 1);
      REQUIRE(plans.stats().num_waiting == static_cast<std::int64_t>(count) - 1);
      if (round == 0) REQUIRE(plans.check() == "");  // the order of rank among others
      least = std::min(least, static_cast<double>(after.tv_sec - before.tv_sec) * 1e9 +
                                  static_cast<double>(after.tv_nsec - before.tv_nsec));
    }
    return least;
  };
  for (const std::int32_t priorities : {1, 1000}) {
    CAPTURE(priorities);
    const double thousand = cost(1'000, priorities);
    const double ten_thousand = cost(10'000, priorities);
    CAPTURE(thousand);
    CAPTURE(ten_thousand);
    CHECK(ten_thousand < 60 * thousand);  // a hundred times as long, and longer for misses of the caches, if quadratic
  }
}

TEST_CASE("a stream of later requests never holds up an earlier one") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 12, .watermark = 0});
  scheduler plans(manager, {.max_tokens_per_step = 16, .max_running = 4});
  for (int i = 0; i < 3; ++i) ask(plans, 12, 8);
  const request_id large = ask(plans, 40, 8);  // 12 blocks: the whole pool
  std::vector<finished_sequence> done;
  std::int64_t steps_until_done = 0;
  while (std::none_of(done.begin(), done.end(), [&](const auto& one) { return one.request == large; })) {
    ask(plans, 3, 8);
    (void)step(plans, &done);
    REQUIRE(++steps_until_done < 200);
  }
  // Before it: three short ones of at most 1 + 8 steps each. Itself: 3 chunks and 7 more tokens.
  CHECK(steps_until_done <= 3 * 9 + 3 + 7);
  // In order of arrival, as all have the same number of tokens to sample.
  for (const finished_sequence& one : done) CHECK(one.request <= large);
}

TEST_CASE("the oldest sequence is computed in every step") {
  kv_cache_manager manager({.block_size = 2, .num_blocks = 30, .watermark = 0});
  scheduler plans(manager, {.max_tokens_per_step = 9, .max_running = 8});
  std::vector<finished_sequence> done;
  std::vector<request_id> open;
  for (int i = 0; i < 400; ++i) {
    open.push_back(ask(plans, static_cast<std::size_t>(1 + i * 7 % 23), 1 + i * 5 % 17));
    done.clear();
    const step_plan plan = step(plans, &done);
    REQUIRE(plan.num_tokens > 0);
    CHECK(row_of(plan, open.front()) != nullptr);
    for (const finished_sequence& one : done) std::erase(open, one.request);
    if (open.empty()) break;
  }
}

TEST_CASE("the first prompt leaves a token of the step to each that decodes") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 100});
  scheduler plans(manager, {.max_tokens_per_step = 10});
  const request_id decodes = ask(plans, 3, 20);
  (void)step(plans);
  const request_id first = test::ask(plans, {.prompt = tokens_from(10, 40), .priority = 1});
  for (int i = 0; i < 4; ++i) {
    const step_plan plan = step(plans);
    REQUIRE(row_of(plan, first) != nullptr);
    CHECK(row_of(plan, first)->query_len == 9);
    CHECK(row_of(plan, decodes) != nullptr);
  }
}

TEST_CASE("the oldest prompt goes on next to samples that could use up every token of a step") {
  kv_cache_manager manager({.block_size = 2, .num_blocks = 60, .watermark = 0});
  scheduler plans(manager, {.max_tokens_per_step = 4, .max_running = 12, .max_chunk_tokens = 2});
  const request_id oldest = ask(plans, 40, 1);
  (void)ask(plans, 1, 60, 8);
  std::vector<finished_sequence> done;
  for (int i = 0; done.empty(); ++i) {
    REQUIRE(i <= 40);
    CHECK(row_of(step(plans, &done), oldest) != nullptr);
  }
  CHECK(done[0].request == oldest);
}

TEST_CASE("a request aborted at any point gives back every block, and the others end as if it had not been") {
  // Points: before each schedule and between each schedule and its commit, by either way of aborting.
  for (const bool posted : {false, true}) {
    for (const std::int32_t samples : {1, 3}) {
      for (int point = 0; point < 60; ++point) {
        CAPTURE(posted);
        CAPTURE(samples);
        CAPTURE(point);
        kv_cache_manager manager({.block_size = 2, .num_blocks = 24, .watermark = 0, .max_sequences = 12});
        scheduler plans(manager, {.max_tokens_per_step = 6, .max_running = 7});
        const request_id before = ask(plans, 9, 6);
        const request_id victim = ask(plans, 11, 6, samples);
        const request_id after = ask(plans, 5, 6);
        std::map<std::uint64_t, std::int64_t> ended;
        int at = 0;
        const auto maybe_abort = [&] {
          if (at++ != point) return;
          if (posted) {
            plans.post_abort(victim);
          } else {
            (void)plans.abort(victim);
          }
          REQUIRE(plans.check() == "");
        };
        int steps = 0;
        do {
          maybe_abort();
          const step_plan& plan = plans.schedule();
          REQUIRE(plans.check() == "");
          maybe_abort();
          for (const finished_sequence& one : plans.commit(plan, any_tokens(plan))) {
            ++ended[to_index(one.request)];
            CHECK(one.tokens.size() == 6);
          }
          REQUIRE(plans.check() == "");
          REQUIRE(++steps < 500);
        } while (plans.has_work());
        CHECK(manager.num_free_blocks() == 24);
        CHECK(manager.stats().num_sequences == 0);
        CHECK(ended[to_index(before)] == 1);
        CHECK(ended[to_index(after)] == 1);
        CHECK(ended[to_index(victim)] + plans.stats().num_aborted == samples);
        CHECK(plans.stats().num_waiting + plans.stats().num_running == 0);
      }
    }
  }
}

TEST_CASE("blocks of an aborted sequence return with the step that writes them, not before") {
  kv_cache_manager manager({.block_size = 2, .num_blocks = 24});
  scheduler plans(manager, {});
  const request_id id = ask(plans, 8, 6);
  const step_plan& plan = plans.schedule();
  CHECK(plans.abort(id) == errc::ok);
  CHECK(manager.num_free_blocks() == 20);
  step_inputs inputs;
  plans.build(inputs);  // the step goes on
  CHECK(plans.has_work());
  CHECK(plans.commit(plan, any_tokens(plan)).empty());
  CHECK(manager.num_free_blocks() == 24);
  CHECK_FALSE(plans.has_work());
}

TEST_CASE("with a sliding window a prompt longer than the pool is computed") {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 10, .watermark = 0, .sliding_window = 12});
  scheduler plans(manager, {.max_tokens_per_step = 8, .max_running = 2});
  (void)ask(plans, 300, 50);
  (void)ask(plans, 300, 50);
  std::vector<finished_sequence> done;
  for (int i = 0; plans.has_work(); ++i) {
    REQUIRE(i < 1000);
    (void)step(plans, &done);
  }
  CHECK(done.size() == 2);
  CHECK(manager.num_free_blocks() == 10);
}

TEST_CASE("equal requests give equal plans and digests") {
  const auto play = [](std::vector<step_plan>& plans_made) {
    kv_cache_manager manager({.block_size = 2, .num_blocks = 30, .first_generation = 1000});
    scheduler plans(manager, {.max_tokens_per_step = 12, .max_running = 6});
    for (int i = 0; i < 20; ++i) ask(plans, static_cast<std::size_t>(1 + i % 9), 1 + i % 6, 1 + i % 3);
    std::vector<std::uint64_t> digests;
    do {
      plans_made.push_back(step(plans));
      digests.push_back(plans.digest());
    } while (plans.has_work());
    return digests;
  };
  std::vector<step_plan> first, second;
  CHECK(play(first) == play(second));
  CHECK(first == second);
}

TEST_CASE("sequences that others opened in the manager never make a step fail") {
  kv_cache_manager manager({.block_size = 2, .num_blocks = 12, .watermark = 0, .max_sequences = 4});
  scheduler plans(manager, {.max_running = 3});
  const seq_id foreign = manager.allocate(4).seq;
  const seq_id second = manager.allocate(4).seq;
  (void)ask(plans, 6, 6, 3);
  std::vector<finished_sequence> done;
  for (int i = 0; i < 40 && (plans.has_work()); ++i) (void)step(plans, &done);
  CHECK(done.size() == 3);
  manager.free(foreign);
  manager.free(second);
  CHECK(manager.num_free_blocks() == 12);
}

}  // namespace
}  // namespace bifolio::test

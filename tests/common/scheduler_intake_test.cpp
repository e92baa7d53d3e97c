// SPDX-License-Identifier: Apache-2.0
/// Requests and aborts from many threads while the owner schedules. Meant for TSan too.

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <bifolio/scheduler.hpp>
#include <cstdint>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "support/adversarial_executor.hpp"

namespace bifolio::test {
namespace {

struct run_result {
  std::map<std::uint64_t, std::int64_t> prompt_of;  ///< request → the value of its prompt's tokens
  std::map<std::uint64_t, int> finished;
  std::map<std::uint64_t, int> dropped;
  std::string problem;
  std::int64_t free_blocks = 0;
};

run_result run(int num_threads, int requests_each, bool with_aborts) {
  kv_cache_manager manager({.block_size = 4, .num_blocks = 200, .max_sequences = 32});
  scheduler plans(manager, {.max_tokens_per_step = 256, .max_running = 32});
  run_result result;
  std::mutex mutex;
  std::atomic<int> still_asking{num_threads};
  std::vector<std::thread> threads;
  for (int t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < requests_each; ++i) {
        const std::int32_t value = t * requests_each + i;
        const submit_result got = plans.submit(
            {std::vector<token_id>(static_cast<std::size_t>(1 + i % 7), token_id{value}), 1 + i % 3, 1 + i % 2});
        if (with_aborts && i % 5 == 0) plans.post_abort(got.id);
        const std::lock_guard lock(mutex);
        result.prompt_of[to_index(got.id)] = value;
      }
      still_asking.fetch_sub(1);
    });
  }
  step_inputs inputs;
  for (bool asking = true; asking || plans.has_work();) {
    asking = still_asking.load() > 0;  // read before the intake is emptied
    const step_plan& plan = plans.schedule();
    for (const request_id id : plan.aborted) ++result.dropped[to_index(id)];
    if (plan.seqs.empty()) {
      std::this_thread::yield();
      continue;
    }
    plans.build(inputs);
    std::vector<sampled_token> tokens;
    for (std::size_t i = 0; i < plan.seqs.size(); ++i) {
      // Echo the prompt, so that each answer shows whose it is.
      const auto first = static_cast<std::size_t>(inputs.batch.query_start_loc[i]);
      for (std::int32_t k = 0; k < plan.seqs[i].num_samples; ++k) tokens.push_back({inputs.tokens[first]});
    }
    for (const finished_sequence& one : plans.commit(plan, tokens)) {
      ++result.finished[to_index(one.request)];
      const std::lock_guard lock(mutex);
      const auto asked = result.prompt_of.find(to_index(one.request));
      // The asking thread may not have noted it yet; the final count finds it.
      if (asked != result.prompt_of.end() && to_index(one.tokens.front()) != asked->second) {
        result.problem = "an answer belongs to another request";
      }
    }
  }
  for (std::thread& one : threads) one.join();
  if (result.problem.empty()) result.problem = plans.check();
  result.free_blocks = manager.num_free_blocks();
  return result;
}

TEST_CASE("requests from many threads are each answered once") {
  const run_result got = run(4, 400, false);
  CHECK(got.problem == "");
  CHECK(got.prompt_of.size() == 1600);  // ids are unique
  CHECK(got.finished.size() == 1600);
  int sequences = 0;
  for (const auto& [id, count] : got.finished) {
    CHECK(got.prompt_of.contains(id));
    CHECK(count == 1 + static_cast<int>(got.prompt_of.at(id) % 400 % 2));
    sequences += count;
  }
  CHECK(sequences == 2400);
  CHECK(got.free_blocks == 200);
}

TEST_CASE("requests aborted by their threads end once, finished or dropped") {
  const run_result got = run(4, 400, true);
  CHECK(got.problem == "");
  for (const auto& [id, value] : got.prompt_of) {
    const bool finished = got.finished.contains(id);
    const bool dropped = got.dropped.contains(id);
    CHECK((finished || dropped));
    if (dropped) CHECK(value % 400 % 5 == 0);
    if (dropped) CHECK(got.dropped.at(id) == 1);
  }
  CHECK(!got.dropped.empty());
  CHECK(got.free_blocks == 200);
}

/// What the intake is, without threads of its own: calls of three threads in every order.
struct ordered_calls {
  kv_cache_manager manager{{.block_size = 4, .num_blocks = 60, .max_sequences = 16}};
  scheduler plans{manager, {.max_tokens_per_step = 64, .max_running = 16}};
  std::vector<std::uint64_t> submitted[2];  // by producer
  std::map<std::uint64_t, int> finished, dropped;

  void produce(std::int32_t producer) {
    for (std::int32_t i = 0; i < 2; ++i) {
      const submit_result got = plans.submit({std::vector<token_id>(3, token_id{producer}), 1, 1});
      submitted[producer].push_back(to_index(got.id));
      adversarial_executor::stop();
    }
    plans.post_abort(request_id{submitted[producer].back()});
  }
  void step() {
    const step_plan& plan = plans.schedule();
    for (const request_id id : plan.aborted) ++dropped[to_index(id)];
    if (plan.seqs.empty()) return;
    const std::vector<sampled_token> tokens(plan.seqs.size(), sampled_token{token_id{1}});
    for (const finished_sequence& one : plans.commit(plan, tokens)) ++finished[to_index(one.request)];
  }
};

TEST_CASE("submissions, aborts and steps in every order of three threads lose nothing and answer once") {
  std::int64_t num_dropped = 0;
  const std::int64_t count = for_each_interleaving(3, 100000, [&](adversarial_executor& workers) {
    ordered_calls calls;
    const auto work = [](void* context, std::int32_t worker) noexcept {
      auto& all = *static_cast<ordered_calls*>(context);
      if (worker > 0) return all.produce(worker - 1);
      for (int i = 0; i < 2; ++i) {
        all.step();
        adversarial_executor::stop();
      }
    };
    workers.run(3, work, &calls);
    for (int i = 0; i < 8 && calls.plans.has_work(); ++i) calls.step();
    calls.step();  // takes what is left in the intake
    REQUIRE(!calls.plans.has_work());
    REQUIRE(calls.plans.check() == "");
    for (const auto& ids : calls.submitted) {
      REQUIRE(ids.size() == 2);
      REQUIRE(calls.finished[ids.front()] == 1);
      REQUIRE(calls.finished[ids.back()] + calls.dropped[ids.back()] == 1);
      num_dropped += calls.dropped[ids.back()];
    }
    REQUIRE(calls.manager.num_free_blocks() == 60);
  });
  MESSAGE(count, " orders");
  CHECK(count == 1680);  // 9! / (3!)³: three stretches of three threads
  CHECK(num_dropped > 0);
  CHECK(num_dropped < 2 * count);
}

TEST_CASE("a scheduler that goes with requests still in its intake frees them") {
  kv_cache_manager manager({.num_blocks = 20});
  {
    scheduler plans(manager, {});
    (void)plans.submit({std::vector<token_id>(5, token_id{1}), 4, 2});
    (void)plans.schedule();
    for (int i = 0; i < 100; ++i) (void)plans.submit({std::vector<token_id>(5, token_id{1}), 4, 1});
    plans.post_abort(request_id{3});
  }
  CHECK(manager.num_free_blocks() == 20);
}

}  // namespace
}  // namespace bifolio::test

// SPDX-License-Identifier: Apache-2.0
/// Whole runs of scheduler, manager and a simulated engine against serial computation: whatever was batched, chunked,
/// preempted, forked or aborted, each sequence ends with the tokens it would have alone.

#include <doctest/doctest.h>

#include <bifolio/scheduler.hpp>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/simulated_engine.hpp"
#include "support/random.hpp"

namespace bifolio::test {
namespace {

struct shape {
  std::int32_t block_size;
  std::int64_t num_blocks;
  std::int32_t sliding_window;
  std::int32_t max_running;
  std::int32_t max_tokens_per_step;
  std::int32_t max_chunk_tokens;
  std::int32_t longest_prompt;
  std::int32_t longest_answer;
  std::int32_t most_samples;
  std::int32_t abort_one_in;  ///< steps; 0: never
};

struct outcome {
  std::string problem;
  scheduler_stats stats;
  cache_stats cache;
};

outcome run(const shape& how, std::int32_t num_requests, std::uint64_t seed) {
  random_source random(seed);
  kv_cache_manager manager({.block_size = how.block_size,
                            .num_blocks = how.num_blocks,
                            .sliding_window = how.sliding_window,
                            .max_sequences = how.max_running});
  scheduler plans(manager, {.max_tokens_per_step = how.max_tokens_per_step,
                            .max_running = how.max_running,
                            .max_chunk_tokens = how.max_chunk_tokens,
                            .vocab_size = simulated_vocabulary});
  constexpr std::int32_t stop_one_in = 40;
  simulated_engine engine(manager, stop_one_in);
  std::map<std::uint64_t, request> asked;
  std::map<std::pair<std::uint64_t, std::int32_t>, std::vector<token_id>> ended;
  std::map<std::uint64_t, bool> aborted;
  step_inputs inputs;
  std::int32_t submitted = 0;
  const auto fail = [&](const std::string& what) {
    return outcome{"step " + std::to_string(plans.stats().num_steps) + ": " + what, plans.stats(), manager.stats()};
  };
  const auto abort_any = [&] {
    if (asked.empty()) return;
    auto victim = asked.begin();
    std::advance(victim, random.between(0, static_cast<std::int64_t>(asked.size()) - 1));
    if (random.one_in(2)) {
      plans.post_abort(request_id{victim->first});
    } else if (plans.abort(request_id{victim->first}) == errc::ok) {
      aborted[victim->first] = true;
    }
  };
  for (std::int64_t step = 0; submitted < num_requests || plans.has_work(); ++step) {
    if (step > 200000) return fail("no end in sight");
    while (submitted < num_requests && (random.one_in(2) || !plans.has_work())) {
      ++submitted;
      request what;
      what.prompt.resize(static_cast<std::size_t>(random.between(1, how.longest_prompt)));
      for (token_id& token : what.prompt) {
        token = token_id{static_cast<std::int32_t>(random.between(0, simulated_vocabulary - 1))};
      }
      what.max_new_tokens = static_cast<std::int32_t>(random.between(1, how.longest_answer));
      what.num_samples = static_cast<std::int32_t>(random.between(1, how.most_samples));
      const submit_result got = plans.submit(what);
      if (got.status == alloc_status::never) continue;
      engine.note_prompt(got.id, what.prompt.size());
      asked[to_index(got.id)] = std::move(what);
      if (random.one_in(3)) break;
    }
    if (how.abort_one_in > 0 && random.one_in(how.abort_one_in)) abort_any();
    const step_plan& plan = plans.schedule();
    for (const request_id id : plan.aborted) aborted[to_index(id)] = true;
    if (plan.num_tokens > how.max_tokens_per_step) return fail("token budget exceeded");
    if (plans.stats().num_running > how.max_running) return fail("max_running exceeded");
    if (plan.seqs.empty()) {
      if (plans.has_work()) return fail("an empty step while there is work");
      (void)plans.commit(plan, {});
      continue;
    }
    std::int64_t tokens = 0;
    for (const scheduled_seq& row : plan.seqs) {
      tokens += row.query_len;
      if (how.max_chunk_tokens > 0 && row.query_len > how.max_chunk_tokens) return fail("chunk too long");
    }
    if (tokens != plan.num_tokens) return fail("num_tokens");
    plans.build(inputs);
    const std::vector<sampled_token> sampled = engine.compute(plan, inputs);
    if (how.abort_one_in > 0 && random.one_in(how.abort_one_in)) abort_any();
    for (finished_sequence& done : plans.commit(plan, sampled)) {
      if (aborted.contains(to_index(done.request))) return fail("an aborted sequence finished");
      if (!ended.emplace(std::pair{to_index(done.request), done.sample}, std::move(done.tokens)).second) {
        return fail("a sequence finished twice");
      }
    }
    if (step % 16 == 0) {
      if (std::string problem = plans.check(); !problem.empty()) return fail("check(): " + problem);
    }
  }
  if (std::string problem = plans.check(); !problem.empty()) return fail("check(): " + problem);
  if (manager.num_free_blocks() != how.num_blocks) return fail("blocks were lost");
  for (const auto& [id, what] : asked) {
    for (std::int32_t sample = 0; sample < what.num_samples; ++sample) {
      const auto found = ended.find({id, sample});
      if (found == ended.end()) {
        if (!aborted.contains(id)) return fail("a sequence never finished");
        continue;
      }
      if (found->second != continue_serially(what, sample, how.sliding_window, stop_one_in)) {
        return fail("request " + std::to_string(id) + " sample " + std::to_string(sample) +
                    " differs from what it gives alone");
      }
    }
  }
  return {"", plans.stats(), manager.stats()};
}

TEST_CASE("every sequence gives the tokens it gives alone, whatever was batched, chunked, preempted, forked, aborted") {
  constexpr shape shapes[] = {
      {4, 200, 0, 16, 64, 0, 40, 30, 1, 0},    // roomy
      {4, 24, 0, 8, 32, 0, 40, 40, 1, 0},      // preemption all the time
      {4, 24, 0, 8, 32, 8, 40, 40, 4, 0},      // and samples, and short chunks
      {1, 60, 0, 32, 16, 0, 30, 30, 3, 0},     // more runners than tokens in a step
      {16, 6, 0, 6, 2048, 0, 60, 30, 2, 0},    // a handful of blocks
      {4, 40, 0, 12, 24, 5, 60, 40, 5, 6},     // aborts at any point
      {4, 16, 9, 6, 16, 7, 90, 60, 3, 9},      // a window: prompts longer than the pool
      {1, 4, 0, 4, 4, 0, 2, 3, 4, 3},          // the smallest
      {2, 400, 0, 24, 700, 0, 300, 60, 6, 0},  // tables of several chunks, shared
      {4, 30, 0, 8, 16, 2, 60, 50, 1, 0},      // old prompts in small chunks beside young decoders
      {2, 260, 0, 24, 700, 0, 300, 60, 6, 12},
  };
  MESSAGE(seed_note());
  std::int64_t preemptions = 0, copies = 0, aborts = 0, finished = 0;
  for (std::size_t i = 0; i < std::size(shapes); ++i) {
    CAPTURE(i);
    const outcome got = run(shapes[i], 300, hash_of(test_seed(), i));
    CHECK(got.problem == "");
    preemptions += got.stats.num_preemptions;
    copies += got.cache.num_copied_blocks;
    aborts += got.stats.num_aborted;
    finished += got.stats.num_finished;
  }
  CHECK(finished > 3000);
  CHECK(preemptions > 300);
  CHECK(copies > 500);
  CHECK(aborts > 50);
}

}  // namespace
}  // namespace bifolio::test

// SPDX-License-Identifier: Apache-2.0
/// Random runs of the scheduler in many shapes; scheduler_run.hpp says what each must show.

#include <doctest/doctest.h>

#include <cstdint>
#include <span>
#include <vector>

#include "common/scheduler_run.hpp"

namespace bifolio::test {
namespace {

/// Runs each shape, once or num_test_runs() times; the sums of one run's statistics.
scheduler_outcome run_all(std::span<const scheduler_shape> shapes, std::int32_t num_requests) {
  MESSAGE(seed_note());
  scheduler_outcome sum;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    CAPTURE(i);
    CAPTURE(shapes[i].name);
    for (std::int64_t again = 1; again < num_test_runs(); ++again) {
      CAPTURE(again);
      CHECK(scheduler_run(shapes[i], hash_of(test_seed(), i, again)).run(num_requests).problem == "");
    }
    const scheduler_outcome got = scheduler_run(shapes[i], hash_of(test_seed(), i)).run(num_requests);
    CHECK(got.problem == "");
    sum.stats.num_preemptions += got.stats.num_preemptions;
    sum.stats.num_swap_outs += got.stats.num_swap_outs;
    sum.stats.num_swap_ins += got.stats.num_swap_ins;
    sum.stats.num_failed_swaps += got.stats.num_failed_swaps;
    sum.stats.num_cached_tokens += got.stats.num_cached_tokens;
    sum.stats.num_draft_tokens += got.stats.num_draft_tokens;
    sum.stats.num_accepted_drafts += got.stats.num_accepted_drafts;
    sum.stats.num_aborted += got.stats.num_aborted;
    sum.stats.num_finished += got.stats.num_finished;
    sum.cache.num_copied_blocks += got.cache.num_copied_blocks;
    sum.cache.num_forks += got.cache.num_forks;
    sum.num_late += got.num_late;
  }
  return sum;
}

TEST_CASE("every sequence gives the tokens it gives alone, whatever was batched, chunked, preempted, forked, aborted") {
  const scheduler_shape shapes[] = {
      {.name = "roomy", .num_blocks = 200, .max_running = 16, .max_tokens_per_step = 64},
      {.name = "preemption all the time"},
      {.name = "samples and short chunks", .max_chunk_tokens = 8, .most_samples = 4},
      {.name = "more runners than tokens in a step",
       .block_size = 1,
       .num_blocks = 80,
       .max_running = 32,
       .max_tokens_per_step = 16,
       .most_samples = 3},
      {.name = "a handful of blocks",
       .block_size = 16,
       .num_blocks = 6,
       .max_tokens_per_step = 2048,
       .longest_prompt = 60,
       .most_samples = 2},
      {.name = "aborts at any point",
       .num_blocks = 40,
       .max_running = 12,
       .max_chunk_tokens = 5,
       .most_samples = 5,
       .abort_one_in = 6},
      {.name = "a window: prompts longer than the pool",
       .num_blocks = 16,
       .max_tokens_per_step = 16,
       .max_chunk_tokens = 7,
       .longest_prompt = 90,
       .most_samples = 3,
       .sliding_window = 9,
       .abort_one_in = 9},
      {.name = "the smallest",
       .block_size = 1,
       .num_blocks = 4,
       .max_running = 4,
       .max_tokens_per_step = 4,
       .longest_prompt = 2,
       .longest_answer = 3,
       .most_samples = 4,
       .abort_one_in = 3},
      {.name = "tables of several chunks, shared",
       .block_size = 2,
       .num_blocks = 400,
       .max_running = 24,
       .max_tokens_per_step = 700,
       .longest_prompt = 300,
       .most_samples = 6},
      {.name = "old prompts in small chunks beside young decoders", .max_chunk_tokens = 2, .longest_prompt = 60},
      {.name = "priorities", .most_samples = 2, .most_priority = 4},
  };
  const scheduler_outcome sum = run_all(shapes, 200);
  CHECK(sum.stats.num_finished > 2500);
  CHECK(sum.stats.num_preemptions > 300);
  CHECK(sum.cache.num_copied_blocks > 300);
  CHECK(sum.stats.num_aborted > 30);
}

TEST_CASE("a prefix that is hit gives the tokens that computing it gives") {
  const scheduler_shape shapes[] = {
      {.name = "roomy", .num_blocks = 300, .most_samples = 3, .prefix_caching = true},
      {.name = "evicted all the time", .most_samples = 3, .prefix_caching = true, .most_priority = 2},
      {.name = "deduplicated", .num_blocks = 60, .most_samples = 3, .prefix_caching = true, .deduplicate = true},
      {.name = "block size 1", .block_size = 1, .num_blocks = 100, .most_samples = 2, .prefix_caching = true},
      {.name = "a window",
       .block_size = 3,
       .num_blocks = 30,
       .max_chunk_tokens = 7,
       .most_samples = 2,
       .sliding_window = 8,
       .abort_one_in = 20,
       .prefix_caching = true},
      {.name = "aborts", .num_blocks = 40, .most_samples = 3, .abort_one_in = 5, .prefix_caching = true},
  };
  const scheduler_outcome sum = run_all(shapes, 300);
  CHECK(sum.stats.num_cached_tokens > 5000);
  CHECK(sum.stats.num_preemptions > 100);
  CHECK(sum.stats.num_aborted > 30);
}

TEST_CASE("a sequence that was swapped out and in gives the tokens that it gives alone") {
  const scheduler_shape shapes[] = {
      {.name = "always", .num_host_blocks = 60, .preemption = preemption_mode::swap},
      {.name = "when it pays", .most_samples = 3, .num_host_blocks = 60},
      {.name = "a small host", .most_samples = 3, .num_host_blocks = 12, .preemption = preemption_mode::swap},
      {.name = "with prefixes",
       .num_blocks = 30,
       .most_samples = 3,
       .prefix_caching = true,
       .num_host_blocks = 40,
       .preemption = preemption_mode::swap},
      {.name = "aborts and priorities",
       .most_samples = 3,
       .abort_one_in = 8,
       .prefix_caching = true,
       .num_host_blocks = 40,
       .preemption = preemption_mode::swap,
       .most_priority = 3},
      {.name = "a window",
       .num_blocks = 16,
       .max_chunk_tokens = 7,
       .most_samples = 2,
       .sliding_window = 9,
       .num_host_blocks = 30,
       .preemption = preemption_mode::swap},
      {.name = "copies fail",
       .most_samples = 3,
       .abort_one_in = 20,
       .num_host_blocks = 40,
       .preemption = preemption_mode::swap,
       .fail_one_in = 3},
      {.name = "copies fail, prefixes",
       .num_blocks = 30,
       .most_samples = 2,
       .prefix_caching = true,
       .num_host_blocks = 40,
       .preemption = preemption_mode::swap,
       .fail_one_in = 4},
  };
  const scheduler_outcome sum = run_all(shapes, 200);
  CHECK(sum.stats.num_swap_outs > 300);
  CHECK(sum.stats.num_swap_ins > 200);
  CHECK(sum.stats.num_failed_swaps > 30);
}

TEST_CASE("beams are forked, dropped, preempted and swapped together") {
  const scheduler_shape shapes[] = {
      {.name = "roomy", .num_blocks = 200, .max_running = 16, .most_beams = 5},
      {.name = "tight",
       .num_blocks = 28,
       .max_running = 12,
       .longest_prompt = 14,
       .longest_answer = 16,
       .most_beams = 4},
      {.name = "tight, prefixes",
       .num_blocks = 28,
       .max_running = 12,
       .longest_prompt = 14,
       .longest_answer = 16,
       .most_samples = 3,
       .most_beams = 4,
       .prefix_caching = true},
      {.name = "swapped",
       .num_blocks = 28,
       .max_running = 12,
       .longest_prompt = 14,
       .longest_answer = 16,
       .most_beams = 4,
       .abort_one_in = 30,
       .num_host_blocks = 100,
       .preemption = preemption_mode::swap,
       .fail_one_in = 6},
      {.name = "a window",
       .num_blocks = 28,
       .max_running = 12,
       .longest_answer = 24,
       .most_beams = 4,
       .sliding_window = 9,
       .num_host_blocks = 60,
       .preemption = preemption_mode::swap},
      {.name = "small steps, tight",
       .block_size = 2,
       .num_blocks = 34,
       .max_running = 12,
       .max_tokens_per_step = 5,
       .max_chunk_tokens = 3,
       .longest_prompt = 5,
       .longest_answer = 14,
       .most_beams = 3},
      {.name = "small steps",
       .num_blocks = 40,
       .max_tokens_per_step = 5,
       .longest_prompt = 12,
       .longest_answer = 12,
       .most_beams = 5,
       .abort_one_in = 12},
  };
  const scheduler_outcome sum = run_all(shapes, 200);
  CHECK(sum.stats.num_finished > 1000);
  CHECK(sum.cache.num_forks > 2000);
  CHECK(sum.stats.num_preemptions > 50);
  CHECK(sum.stats.num_swap_outs > 10);
}

TEST_CASE("drafts change no token, and those that fit are kept") {
  const scheduler_shape shapes[] = {
      {.name = "roomy", .num_blocks = 200, .most_drafts = 6},
      {.name = "tight", .most_samples = 2, .most_drafts = 5},
      {.name = "prefixes", .num_blocks = 30, .most_samples = 3, .most_drafts = 5, .prefix_caching = true},
      {.name = "swapped",
       .most_samples = 2,
       .most_drafts = 4,
       .abort_one_in = 25,
       .num_host_blocks = 40,
       .preemption = preemption_mode::swap},
      {.name = "a window", .num_blocks = 16, .max_chunk_tokens = 7, .most_drafts = 4, .sliding_window = 9},
  };
  const scheduler_outcome sum = run_all(shapes, 200);
  CHECK(sum.stats.num_draft_tokens > 3000);
  CHECK(sum.stats.num_accepted_drafts > 1000);
}

TEST_CASE("layer groups give the tokens that each sequence gives alone, whatever any of them lacks") {
  const auto full = [](std::int32_t size, std::int64_t count, std::int64_t host = 0) {
    return group_config{.kind = group_kind::full, .block_size = size, .num_blocks = count, .num_host_blocks = host};
  };
  const auto window = [](std::int32_t size, std::int64_t count, std::int32_t width, std::int64_t host = 0) {
    return group_config{
        .kind = group_kind::window, .block_size = size, .num_blocks = count, .num_host_blocks = host, .window = width};
  };
  const auto state = [](std::int64_t count, std::int32_t interval = 0, std::int32_t drafts = 0, std::int64_t host = 0) {
    return group_config{.kind = group_kind::state,
                        .block_size = 1,
                        .num_blocks = count,
                        .num_host_blocks = host,
                        .snapshot_interval = interval,
                        .num_draft_slots = drafts};
  };
  const auto cross = [](std::int32_t size, std::int64_t count, std::int32_t longest, std::int64_t host = 0) {
    return group_config{.kind = group_kind::cross,
                        .block_size = size,
                        .num_blocks = count,
                        .num_host_blocks = host,
                        .max_tokens = longest};
  };
  std::vector<scheduler_shape> shapes;
  for (const bool caches : {false, true}) {
    for (const std::int32_t depth : {1, 3}) {
      scheduler_shape common;
      common.prefix_caching = caches;
      common.steps_in_flight = depth;
      scheduler_shape one = common;
      one.name = "a window, tight";
      one.most_samples = 2;
      one.max_chunk_tokens = 9;
      one.groups = {full(4, 40), window(2, 26, 7)};
      shapes.push_back(one);
      one = common;
      one.name = "states, few";
      one.most_samples = 3;
      one.groups = {full(4, 60), state(8)};
      shapes.push_back(one);
      one = common;
      one.name = "states, drafts, aborts";
      one.most_drafts = 3;
      one.abort_one_in = 12;
      one.groups = {full(4, 50), state(30, 8, 3), window(4, 30, 9)};
      one.max_chunk_tokens = 12;
      shapes.push_back(one);
      one = common;
      one.name = "swapped, copies fail";
      one.most_samples = 2;
      one.num_host_blocks = 40;
      one.fail_one_in = 5;
      one.preemption = preemption_mode::swap;
      one.max_chunk_tokens = 11;
      one.groups = {full(4, 30, 40), window(4, 16, 10, 30), state(14, 0, 0, 20), cross(2, 20, 6, 20)};
      shapes.push_back(one);
      one = common;
      one.name = "encoders and beams";
      one.longest_prompt = 14;
      one.longest_answer = 16;
      one.most_beams = 3;
      one.max_running = 12;
      one.abort_one_in = 25;
      one.groups = {full(4, 40), cross(4, 9, 12), state(24, 4)};
      shapes.push_back(one);
    }
  }
  const scheduler_outcome sum = run_all(shapes, 150);
  CHECK(sum.stats.num_finished > 2500);
  CHECK(sum.stats.num_preemptions > 300);
  CHECK(sum.stats.num_swap_ins > 100);
  CHECK(sum.stats.num_cached_tokens > 1500);
  CHECK(sum.stats.num_accepted_drafts > 200);
}

TEST_CASE("steps that are scheduled before earlier ones are committed change no token") {
  std::vector<scheduler_shape> shapes;
  for (const std::int32_t depth : {2, 3, 4}) {
    shapes.push_back({.name = "roomy", .num_blocks = 200, .most_samples = 2, .steps_in_flight = depth});
    shapes.push_back({.name = "tight", .most_samples = 2, .steps_in_flight = depth, .most_priority = 2});
    shapes.push_back(
        {.name = "aborts", .num_blocks = 40, .most_samples = 3, .abort_one_in = 6, .steps_in_flight = depth});
    shapes.push_back({.name = "a window",
                      .num_blocks = 16,
                      .max_chunk_tokens = 7,
                      .most_samples = 2,
                      .sliding_window = 9,
                      .abort_one_in = 20,
                      .steps_in_flight = depth});
    shapes.push_back({.name = "prefixes",
                      .num_blocks = 30,
                      .most_samples = 2,
                      .abort_one_in = 20,
                      .prefix_caching = true,
                      .steps_in_flight = depth});
    shapes.push_back({.name = "swapped",
                      .most_samples = 2,
                      .abort_one_in = 20,
                      .num_host_blocks = 40,
                      .preemption = preemption_mode::swap,
                      .steps_in_flight = depth});
    shapes.push_back({.name = "swapped, copies fail",
                      .most_samples = 2,
                      .num_host_blocks = 40,
                      .preemption = preemption_mode::swap,
                      .fail_one_in = 4,
                      .steps_in_flight = depth});
    shapes.push_back({.name = "drafts",
                      .num_blocks = 30,
                      .most_drafts = 4,
                      .abort_one_in = 20,
                      .num_host_blocks = 30,
                      .steps_in_flight = depth});
    shapes.push_back({.name = "everything",
                      .num_blocks = 36,
                      .max_running = 12,
                      .max_chunk_tokens = 9,
                      .longest_prompt = 20,
                      .longest_answer = 24,
                      .most_samples = 3,
                      .most_beams = 4,
                      .most_drafts = 4,
                      .abort_one_in = 15,
                      .prefix_caching = true,
                      .num_host_blocks = 40,
                      .preemption = preemption_mode::swap,
                      .fail_one_in = 5,
                      .steps_in_flight = depth,
                      .most_priority = 3});
  }
  const scheduler_outcome sum = run_all(shapes, 150);
  CHECK(sum.num_late > 20000);
  CHECK(sum.stats.num_preemptions > 500);
  CHECK(sum.stats.num_swap_ins > 200);
  CHECK(sum.stats.num_failed_swaps > 20);
  CHECK(sum.stats.num_aborted > 100);
}

}  // namespace
}  // namespace bifolio::test

// SPDX-License-Identifier: Apache-2.0
// Traces through scheduler and manager, against sums that a person can do.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "cache_only.hpp"
#include "prompt_tokens.hpp"
#include "simulation.hpp"
#include "support/random.hpp"

namespace {

using namespace bifolio::test;
using namespace trace_replay;

struct arrival {
  double ms;
  int input, output;
  std::vector<std::int64_t> ids{};
};

trace trace_of(const std::vector<arrival>& requests) {
  std::ostringstream text;
  for (const arrival& one : requests) {
    text << R"({"timestamp":)" << one.ms << R"(,"input_length":)" << one.input << R"(,"output_length":)" << one.output
         << R"(,"hash_ids":[)";
    for (std::size_t i = 0; i < one.ids.size(); ++i) text << (i > 0 ? "," : "") << one.ids[i];
    text << "]}\n";
  }
  std::istringstream in(text.str());
  return read_trace(in, "synthetic", trace_format::automatic, 0);
}

simulation_result run(const trace& what, const simulation_options& options) {
  progress_bar quiet(false);
  return simulate(what, options, quiet);
}

/// 1 ms a step and 10 µs a token, nothing else.
cost_model simple_costs() {
  return {.per_step = 1000, .per_token = 10, .per_kv_token = 0, .per_score = 0, .per_swapped_token = 0};
}

}  // namespace

TEST_CASE("a request alone takes the sum of its steps") {
  simulation_options options;
  options.num_blocks = 100;
  options.max_tokens_per_step = 64;
  options.costs = simple_costs();
  const simulation_result result = run(trace_of({{500, 100, 3}}), options);
  // 64 tokens, then 36 and the first sample, then a token, then another.
  CHECK(result.num_steps == 4);
  CHECK(result.queueing_ms.max == doctest::Approx(0));
  CHECK(result.time_to_first_token_ms.p50 == doctest::Approx(1.64 + 1.36));
  CHECK(result.time_per_token_ms.p50 == doctest::Approx(1.01));
  CHECK(result.latency_ms.p50 == doctest::Approx(1.64 + 1.36 + 2 * 1.01));
  CHECK(result.simulated_seconds == doctest::Approx(5.02e-3));
  CHECK(result.num_prompt_tokens == 100);
  CHECK(result.num_sampled_tokens == 3);
  CHECK(result.num_computed_tokens == 102);
}

TEST_CASE("the time of the host passes before each step, unless another one is in flight") {
  simulation_options options;
  options.num_blocks = 100;
  options.costs = simple_costs();
  options.costs.of_host = 300;
  const trace what = trace_of({{500, 100, 20}});
  const double steps_ms = 2 + 19 * 1.01;
  CHECK(run(what, options).latency_ms.p50 == doctest::Approx(steps_ms + 20 * 0.3));
  options.steps_in_flight = 2;
  CHECK(run(what, options).latency_ms.p50 == doctest::Approx(steps_ms + 0.3));
}

TEST_CASE("the cost of a step counts reads once a sequence and scores once a pair") {
  bifolio::step_plan plan;
  plan.seqs = {{.query_len = 5, .seq_len = 12}, {.query_len = 1, .seq_len = 30}, {.query_len = 7, .seq_len = 7}};
  plan.num_tokens = 13;
  double scores = 0, reads = 0;
  for (const auto& row : plan.seqs) {
    reads += row.seq_len;
    for (int position = row.seq_len - row.query_len; position < row.seq_len; ++position) scores += position + 1;
  }
  const cost_model costs{
      .per_step = 100000, .per_token = 1000, .per_kv_token = 3, .per_score = 0.5, .per_swapped_token = 7};
  CHECK(step_us(costs, plan, 16) == doctest::Approx(100000 + 13 * 1000 + 3 * reads + 0.5 * scores));
  plan.swap_outs.resize(3);
  plan.swap_ins.resize(2);
  CHECK(step_us(costs, plan, 16) == doctest::Approx(100000 + 13 * 1000 + 3 * reads + 0.5 * scores + 5 * 16 * 7));
  plan.seqs.clear();
  plan.num_tokens = 0;
  CHECK(step_us(costs, plan, 16) == doctest::Approx(5 * 16 * 7));
}

TEST_CASE("with one seat requests are served as by one clerk") {
  INFO(seed_note());
  random_source random(test_seed());
  for (int round = 0; round < 10; ++round) {
    std::vector<arrival> requests;
    double at = 0;
    for (int i = 0; i < 60; ++i) {
      requests.push_back({at, static_cast<int>(random.between(1, 300)), static_cast<int>(random.between(0, 30))});
      at += static_cast<double>(random.between(0, 40));
    }
    const double speed = round % 2 == 0 ? 1 : 2.5;
    simulation_options options;
    options.num_blocks = 64;
    options.max_running = 1;
    options.max_tokens_per_step = 128;
    options.speed = speed;
    options.costs = simple_costs();
    double clerk_free = 0, longest_wait = 0, sum_of_first = 0;
    for (const arrival& one : requests) {
      const double begin = std::max(clerk_free, one.ms / speed);
      const double prefill = std::ceil(one.input / 128.0) + 0.01 * one.input;
      longest_wait = std::max(longest_wait, begin - one.ms / speed);
      sum_of_first += begin + prefill - one.ms / speed;
      clerk_free = begin + prefill + 1.01 * (std::max(one.output, 1) - 1);
    }
    const simulation_result result = run(trace_of(requests), options);
    CHECK(result.num_finished == 60);
    CHECK(result.queueing_ms.max == doctest::Approx(longest_wait));
    CHECK(result.time_to_first_token_ms.mean == doctest::Approx(sum_of_first / 60));
    CHECK(result.simulated_seconds == doctest::Approx(clerk_free / 1e3));
  }
}

TEST_CASE("requests are taken in the order of their times, whatever their order in the file") {
  simulation_options options;
  options.num_blocks = 64;
  options.costs = simple_costs();
  const simulation_result sorted = run(trace_of({{0, 50, 2}, {10, 60, 3}, {20, 70, 4}}), options);
  const simulation_result mixed = run(trace_of({{20, 70, 4}, {0, 50, 2}, {10, 60, 3}}), options);
  CHECK(sorted.latency_ms.mean == mixed.latency_ms.mean);
  CHECK(sorted.simulated_seconds == mixed.simulated_seconds);
}

TEST_CASE("with an unbounded pool every token is computed once, and nobody is preempted") {
  INFO(seed_note());
  random_source random(test_seed());
  std::vector<arrival> requests;
  std::int64_t num_prompt = 0, num_sampled = 0;
  for (int i = 0; i < 200; ++i) {
    requests.push_back({0, static_cast<int>(random.between(1, 500)), static_cast<int>(random.between(1, 100))});
    num_prompt += requests.back().input;
    num_sampled += requests.back().output;
  }
  for (const std::int32_t block_size : {1, 7, 16, 600}) {
    simulation_options options;
    options.block_size = block_size;
    const simulation_result result = run(trace_of(requests), options);
    CAPTURE(block_size);
    CHECK(result.num_finished == 200);
    CHECK(result.preemptions == 0);
    CHECK(result.evictions == 0);
    CHECK(result.num_prompt_tokens == num_prompt);
    CHECK(result.num_sampled_tokens == num_sampled);
    CHECK(result.num_computed_tokens == num_prompt + num_sampled - 200);  // the last token is never computed
  }
}

TEST_CASE("a pool that is too small preempts, and still serves all that fit into it") {
  INFO(seed_note());
  random_source random(test_seed());
  std::vector<arrival> requests;
  std::int64_t num_too_large = 0, num_sampled = 0;
  for (int i = 0; i < 100; ++i) {
    requests.push_back(
        {static_cast<double>(i), static_cast<int>(random.between(1, 350)), static_cast<int>(random.between(50, 150))});
    const bool fits = (requests.back().input + requests.back().output - 1 + 15) / 16 <= 25;
    num_too_large += fits ? 0 : 1;
    num_sampled += fits ? requests.back().output : 0;
  }
  REQUIRE(num_too_large > 0);
  simulation_options options;
  options.num_blocks = 25;
  for (const bool builds : {false, true}) {
    options.build_batches = builds;
    const simulation_result result = run(trace_of(requests), options);
    CHECK(result.num_refused == num_too_large);
    CHECK(result.num_finished == 100 - num_too_large);
    CHECK(result.num_sampled_tokens == num_sampled);
    CHECK(result.preemptions > 0);
    CHECK(result.peak_used_blocks == 25);
  }
}

TEST_CASE("requests far apart find what the cache alone finds, and compute the rest") {
  INFO(seed_note());
  random_source random(test_seed());
  std::vector<arrival> requests;
  for (int i = 0; i < 150; ++i) {
    arrival one{1e5 * i, 0, 1};
    std::int64_t node = 0;
    for (std::int64_t length = random.between(1, 6); length > 0; --length) {
      node = static_cast<std::int64_t>(hash_of(3, node, random.between(1, 2)) >> 2);
      one.ids.push_back(node);
    }
    one.input = static_cast<int>(512 * (static_cast<std::int64_t>(one.ids.size()) - 1) + random.between(1, 511));
    // The id of a partly filled block identifies its length, too.
    one.ids.back() = static_cast<std::int64_t>(hash_of(5, one.ids.back(), one.input) >> 2);
    requests.push_back(one);
  }
  const trace what = trace_of(requests);
  progress_bar quiet(false);
  const cache_only_result alone = replay_cache(what, {.full_blocks_only = true}, quiet);
  REQUIRE(alone.hits > 0);
  simulation_options options;
  options.block_size = 512;
  const simulation_result result = run(what, options);
  CHECK(result.lookups == alone.lookups);
  CHECK(result.hits == alone.hits);
  CHECK(result.evictions == 0);
  CHECK(result.num_finished == 150);
  CHECK(result.num_computed_tokens == result.num_prompt_tokens - 512 * result.hits);
  options.prefix_caching = false;
  const simulation_result without = run(what, options);
  CHECK(without.hits == 0);
  CHECK(without.num_computed_tokens == without.num_prompt_tokens);
  CHECK(without.time_to_first_token_ms.mean > result.time_to_first_token_ms.mean);
}

TEST_CASE("preempting by swap computes nothing again, in one step at a time or several in flight") {
  INFO(seed_note());
  random_source random(test_seed());
  std::vector<arrival> requests;
  std::int64_t num_prompt = 0, num_sampled = 0;
  for (int i = 0; i < 100; ++i) {
    requests.push_back(
        {static_cast<double>(i), static_cast<int>(random.between(1, 100)), static_cast<int>(random.between(50, 150))});
    num_prompt += requests.back().input;
    num_sampled += requests.back().output;
  }
  simulation_options options;
  options.num_blocks = 40;
  options.num_host_blocks = 4000;
  options.prefix_caching = false;
  options.preemption = bifolio::preemption_mode::swap;
  for (const std::int32_t depth : {1, 2, 3}) {
    CAPTURE(depth);
    options.steps_in_flight = depth;
    const simulation_result result = run(trace_of(requests), options);
    CHECK(result.num_finished == 100);
    CHECK(result.num_sampled_tokens == num_sampled);
    CHECK(result.preemptions > 0);
    CHECK(result.num_swapped_out_blocks > 0);
    CHECK(result.num_swapped_in_blocks > 0);
    if (depth == 1) CHECK(result.num_computed_tokens == num_prompt + num_sampled - 100);
    CHECK(result.num_computed_tokens >= num_prompt + num_sampled - 100);
  }
}

TEST_CASE("prompts have as many tokens in common as they have ids in common") {
  const trace what = trace_of({{0, 1200, 1, {5, 6, 7}}, {0, 1100, 1, {5, 6, 8}}, {0, 1400, 1, {5, 6, 7}}});
  const auto first = make_prompt(what, 0, 512), second = make_prompt(what, 1, 512), third = make_prompt(what, 2, 512);
  REQUIRE(first.size() == 1200);
  REQUIRE(second.size() == 1100);
  REQUIRE(third.size() == 1400);
  const auto common = [](const auto& a, const auto& b) {
    return std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin();
  };
  CHECK(common(first, second) == 1024);
  CHECK(common(first, third) == 1200);
  CHECK(std::all_of(first.begin(), first.end(), [](auto token) { return to_index(token) >= 0; }));
  // Tokens after the ids, and all of a trace without ids, belong to one request alone.
  const trace no_ids = trace_of({{0, 700, 1}, {0, 700, 1}, {0, 700, 1, {5}}, {0, 700, 1, {5}}});
  CHECK(common(make_prompt(no_ids, 0, 512), make_prompt(no_ids, 1, 512)) == 0);
  CHECK(common(make_prompt(no_ids, 2, 512), make_prompt(no_ids, 3, 512)) == 512);
}

TEST_CASE("percentiles are values that the wanted share does not exceed") {
  INFO(seed_note());
  random_source random(test_seed());
  for (int round = 0; round < 50; ++round) {
    std::vector<double> values;
    for (std::int64_t i = random.between(1, 300); i > 0; --i) {
      values.push_back(static_cast<double>(random.between(0, 100)));
    }
    const percentiles said = percentiles_of(values);
    const auto smallest_above = [&](int percent) {
      double best = 1e9;
      for (const double candidate : values) {
        const auto below = std::count_if(values.begin(), values.end(), [&](double v) { return v <= candidate; });
        if (100 * below >= percent * static_cast<std::ptrdiff_t>(values.size())) best = std::min(best, candidate);
      }
      return best;
    };
    CHECK(said.p50 == smallest_above(50));
    CHECK(said.p90 == smallest_above(90));
    CHECK(said.p99 == smallest_above(99));
    CHECK(said.max == *std::max_element(values.begin(), values.end()));
  }
  CHECK(percentiles_of({}).p99 == 0);
}

TEST_CASE("the timeline stays small, in order, and keeps both ends") {
  for (const double span : {0.0, 100000.0, 50.0}) {
    timeline line(span);
    for (int i = 0; i < 100000; ++i) {
      if (line.due(i)) line.add({.at = static_cast<double>(i)});
    }
    line.finish({.at = 99999});
    CAPTURE(span);
    const auto& samples = line.samples();
    CHECK(samples.size() <= timeline::max_samples);
    CHECK(samples.size() >= timeline::max_samples / 3);
    CHECK(samples.front().at == 0);
    CHECK(samples.back().at == 99999);
    CHECK(std::is_sorted(samples.begin(), samples.end(), [](auto& a, auto& b) { return a.at < b.at; }));
    double widest = 0;
    for (std::size_t i = 1; i < samples.size(); ++i) widest = std::max(widest, samples[i].at - samples[i - 1].at);
    CHECK(widest < 100000.0 * 4 / timeline::max_samples);
    CHECK(line.thinned(7).size() == 7);
    CHECK(line.thinned(7).back().at == 99999);
  }
}

TEST_CASE("times of day become microseconds since the first request") {
  std::istringstream in(
      "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-02-28 23:59:59.5,1,1\n2024-02-29 00:00:00.0000010,1,1\n"
      "2024-03-01T00:00:00Z,1,1\n2024-03-01 02:00:01+02:00,1,1\n");
  const trace what = read_trace(in, "times", trace_format::automatic, 0);
  REQUIRE(what.requests.size() == 4);
  CHECK(what.requests[0].arrival_us == 0);
  CHECK(what.requests[1].arrival_us == doctest::Approx(500001));
  CHECK(what.requests[2].arrival_us == doctest::Approx(500000 + 86400e6));
  CHECK(what.requests[3].arrival_us == doctest::Approx(1500000 + 86400e6));
}

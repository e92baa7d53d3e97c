// SPDX-License-Identifier: Apache-2.0
// Whole published traces through the whole stack.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <string>

#include "hindsight_oracle.hpp"
#include "simulation.hpp"
#include "support/skip.hpp"

namespace {

using namespace bifolio::test;
using namespace trace_replay;

struct totals {
  std::int64_t prompt = 0;
  std::int64_t sampled = 0;
};

totals totals_of(const trace& what) {
  totals result;
  for (const trace_request& one : what.requests) {
    result.prompt += one.num_input_tokens;
    result.sampled += std::max(one.num_output_tokens, 1);
  }
  return result;
}

void check_served(const trace& what, const simulation_options& options) {
  CAPTURE(options.num_blocks);
  CAPTURE(options.steps_in_flight);
  CAPTURE(options.num_host_blocks);
  progress_bar quiet(false);
  const totals expected = totals_of(what);
  const simulation_result result = simulate(what, options, quiet);
  const auto num_requests = static_cast<std::int64_t>(what.requests.size());
  CHECK(result.num_refused == 0);
  CHECK(result.num_finished == num_requests);
  CHECK(result.num_prompt_tokens == expected.prompt);
  CHECK(result.num_sampled_tokens == expected.sampled);
  CHECK(result.hits <= result.lookups);
  // What was neither computed nor found does not exist; what was both was preempted and computed again.
  CHECK(result.num_computed_tokens + options.block_size * result.hits >=
        expected.prompt + expected.sampled - num_requests);
  if (result.preemptions == 0 && options.steps_in_flight == 1) {
    CHECK(result.num_computed_tokens + options.block_size * result.hits <=
          expected.prompt + expected.sampled - num_requests + num_requests);  // a full hit computes its last token
  }
  CHECK(result.queueing_ms.p50 <= result.time_to_first_token_ms.p50);
  CHECK(result.time_to_first_token_ms.p99 <= result.latency_ms.p99);
}

}  // namespace

TEST_CASE("all of an hour of conversations is served, by pools of several sizes") {
  const std::string path = std::string(BIFOLIO_SHARED_DIR) + "/traces/mooncake_conversation.jsonl";
  if (!std::filesystem::exists(path)) return skip("shared/traces/mooncake_conversation.jsonl is not there");
  const trace what = read_trace_file(path, trace_format::automatic, 0);
  simulation_options options;
  for (const std::int64_t num_blocks : {9000, 50000, 400000}) {
    options.num_blocks = num_blocks;
    for (const std::int32_t depth : {1, 3}) {
      options.steps_in_flight = depth;
      check_served(what, options);
    }
  }
}

TEST_CASE("all of an hour of short conversations is served by a pool that is much too small") {
  const std::string path = std::string(BIFOLIO_SHARED_DIR) + "/traces/azure_conv_2023.csv";
  if (!std::filesystem::exists(path)) return skip("shared/traces/azure_conv_2023.csv is not there");
  const trace what = read_trace_file(path, trace_format::automatic, 0);
  REQUIRE(what.format == trace_format::azure);
  CHECK(what.requests.size() == 19366);
  simulation_options options;
  options.num_blocks = 1000;
  check_served(what, options);
  options.num_host_blocks = 4000;
  for (const auto mode : {bifolio::preemption_mode::swap, bifolio::preemption_mode::automatic}) {
    options.preemption = mode;
    for (const std::int32_t depth : {1, 2}) {
      options.steps_in_flight = depth;
      check_served(what, options);
    }
  }
}

// docs/layer_groups.md has the whole hour.
TEST_CASE("snapshots find 0.95 of what they would if they were placed with hindsight") {
  const std::string path = std::string(BIFOLIO_SHARED_DIR) + "/traces/mooncake_conversation.jsonl";
  if (!std::filesystem::exists(path)) return skip("shared/traces/mooncake_conversation.jsonl is not there");
  const trace what = read_trace_file(path, trace_format::automatic, 4000);
  using bifolio::group_kind;
  std::vector<bifolio::group_config> groups{
      {.kind = group_kind::full, .block_size = 16, .num_blocks = 400000},
      {.kind = group_kind::window, .block_size = 16, .num_blocks = 200000, .window = 1024, .snapshot_interval = 512},
      {.kind = group_kind::state, .block_size = 1, .num_blocks = 4000, .snapshot_interval = 512}};
  simulation_options options;
  options.speed = 0.4;
  progress_bar quiet(false);
  options.groups = {groups[0]};
  const hindsight oracle =
      best_placement(what, simulate(what, options, quiet).first_cached_tokens, options.trace_block_size);
  CHECK(oracle.num_tokens > 0);
  for (const std::int64_t num_states : {0, 4000, 1000}) {
    CAPTURE(num_states);
    options.groups = {groups[0], groups[1]};
    groups[2].num_blocks = num_states;
    if (num_states > 0) options.groups.push_back(groups[2]);
    const simulation_result result = simulate(what, options, quiet);
    std::int64_t found = 0;
    for (const std::int64_t tokens : result.first_cached_tokens) found += tokens;
    MESSAGE(found, " tokens of ", oracle.num_tokens, ", which take ", oracle.num_snapshots, " snapshots");
    CHECK(static_cast<double>(found) >= 0.95 * static_cast<double>(oracle.num_tokens));
    if (num_states > 0) CHECK(oracle.num_snapshots <= groups[2].num_blocks - result.groups[2].peak_used_blocks);
  }
}

TEST_CASE("where no two prompts share anything hindsight finds nothing either") {
  const std::string path = std::string(BIFOLIO_SHARED_DIR) + "/traces/azure_conv_2023.csv";
  if (!std::filesystem::exists(path)) return skip("shared/traces/azure_conv_2023.csv is not there");
  const trace what = read_trace_file(path, trace_format::automatic, 4000);
  simulation_options options;
  options.num_blocks = 50000;
  progress_bar quiet(false);
  const std::vector<std::int64_t> hits = simulate(what, options, quiet).first_cached_tokens;
  CHECK(best_placement(what, hits, options.trace_block_size).num_tokens == 0);
}

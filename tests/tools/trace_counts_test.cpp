// SPDX-License-Identifier: Apache-2.0
// What the cache must find in a published trace of an hour of a chat service (Mooncake, FAST '25, conversation_trace).
#include <doctest/doctest.h>

#include <filesystem>
#include <string>
#include <utility>

#include "cache_only.hpp"
#include "lru_oracle.hpp"
#include "simulation.hpp"
#include "support/skip.hpp"

namespace {

using namespace bifolio::test;
using namespace trace_replay;

const std::string path = std::string(BIFOLIO_SHARED_DIR) + "/traces/mooncake_conversation.jsonl";

}  // namespace

TEST_CASE("the conversation trace has the hits that two other implementations counted") {
  if (!std::filesystem::exists(path)) return skip("shared/traces/mooncake_conversation.jsonl is not there");
  const trace what = read_trace_file(path, trace_format::automatic, 0);
  REQUIRE(what.format == trace_format::mooncake);
  REQUIRE(what.requests.size() == 12031);
  REQUIRE(what.ids_name_prefixes);
  REQUIRE(what.num_distinct_ids == 182790);
  struct expectation {
    std::int64_t num_blocks, hits, hits_of_full_blocks;
  };
  progress_bar quiet(false);
  for (const expectation& one : {expectation{1000, 12847, 12990},
                                 {10000, 61046, 62005},
                                 {50000, 102290, 102724},
                                 {100000, 104924, 104926},
                                 {0, 105710, 105592}}) {
    CAPTURE(one.num_blocks);
    const cache_only_result all = replay_cache(what, {.num_blocks = one.num_blocks}, quiet);
    CHECK(all.lookups == 288500);
    CHECK(all.hits == one.hits);
    CHECK(all.num_refused == 0);
    CHECK(all.evictions + all.cached_blocks == all.lookups - all.hits);
    const cache_only_result full = replay_cache(what, {.num_blocks = one.num_blocks, .full_blocks_only = true}, quiet);
    CHECK(full.lookups == 276491);
    CHECK(full.hits == one.hits_of_full_blocks);
  }
}

TEST_CASE("the conversation trace has the hits of S3-FIFO that another implementation counted") {
  if (!std::filesystem::exists(path)) return skip("shared/traces/mooncake_conversation.jsonl is not there");
  const trace what = read_trace_file(path, trace_format::automatic, 0);
  progress_bar quiet(false);
  // Counted by a program of 60 lines over ordered dictionaries, which knows contents by their ids and predecessors.
  for (const auto& [num_blocks, hits] : {std::pair<std::int64_t, std::int64_t>{1000, 16210},
                                         {5000, 39899},
                                         {10000, 56625},
                                         {20000, 74722},
                                         {50000, 102493},
                                         {100000, 104906}}) {
    CAPTURE(num_blocks);
    CHECK(replay_cache(what, {.num_blocks = num_blocks, .policy = policy_kind::s3_fifo}, quiet).hits == hits);
  }
}

TEST_CASE("beginnings of the conversation trace give what a list and a map give") {
  if (!std::filesystem::exists(path)) return skip("shared/traces/mooncake_conversation.jsonl is not there");
  progress_bar quiet(false);
  for (const std::int64_t num_requests : {1, 100, 2000}) {
    const trace what = read_trace_file(path, trace_format::automatic, num_requests);
    CHECK(static_cast<std::int64_t>(what.requests.size()) == num_requests);
    for (const std::int64_t num_blocks : {20, 300, 5000}) {
      CAPTURE(num_requests);
      CAPTURE(num_blocks);
      lru_oracle oracle(num_blocks);
      for (const trace_request& one : what.requests) oracle.replay(what.ids_of(one));
      const cache_only_result result = replay_cache(what, {.num_blocks = num_blocks}, quiet);
      CHECK(result.hits == oracle.hits);
      CHECK(result.evictions == oracle.evictions);
      CHECK(result.num_refused == oracle.refused);
    }
  }
}

TEST_CASE("the whole stack finds in the conversation trace what the cache alone finds, when requests do not overlap") {
  if (!std::filesystem::exists(path)) return skip("shared/traces/mooncake_conversation.jsonl is not there");
  progress_bar quiet(false);
  trace what = read_trace_file(path, trace_format::automatic, 1500);
  // Nobody has sampled tokens, and blocks as large as the trace's, so that only prompts fill blocks.
  for (trace_request& one : what.requests) one.num_output_tokens = 1;
  const cache_only_result alone = replay_cache(what, {.full_blocks_only = true}, quiet);
  simulation_options options;
  options.block_size = 512;
  options.speed = 1e-6;
  const simulation_result result = simulate(what, options, quiet);
  CHECK(result.num_finished == 1500);
  CHECK(result.lookups == alone.lookups);
  CHECK(result.hits == alone.hits);
  CHECK(result.evictions == 0);
}

// SPDX-License-Identifier: Apache-2.0
// The prefix cache alone on traces, against a list and a map.
#include <doctest/doctest.h>

#include <sstream>

#include "cache_only.hpp"
#include "input_error.hpp"
#include "lru_oracle.hpp"
#include "support/random.hpp"

namespace {

using namespace bifolio::test;
using namespace trace_replay;

trace trace_of(const std::vector<std::vector<std::int64_t>>& requests) {
  std::ostringstream text;
  for (const auto& ids : requests) {
    text << R"({"timestamp":0,"input_length":)" << 512 * ids.size() + 1 << R"(,"output_length":1,"hash_ids":[)";
    for (std::size_t i = 0; i < ids.size(); ++i) text << (i > 0 ? "," : "") << ids[i];
    text << "]}\n";
  }
  std::istringstream in(text.str());
  return read_trace(in, "synthetic", trace_format::automatic, 0);
}

void check_against_oracle(const trace& what, std::int64_t num_blocks) {
  CAPTURE(num_blocks);
  progress_bar quiet(false);
  const cache_only_result result = replay_cache(what, {.num_blocks = num_blocks}, quiet);
  lru_oracle oracle(num_blocks);
  for (const trace_request& one : what.requests) oracle.replay(what.ids_of(one));
  CHECK(result.lookups == oracle.lookups);
  CHECK(result.hits == oracle.hits);
  CHECK(result.evictions == oracle.evictions);
  CHECK(result.num_refused == oracle.refused);
  CHECK(result.cached_blocks == oracle.num_cached());
}

/// Requests that walk down a random tree: an id represents the path to it.
trace random_tree_trace(random_source& random, int num_requests, int branches, int depth) {
  std::vector<std::vector<std::int64_t>> requests;
  for (int i = 0; i < num_requests; ++i) {
    std::vector<std::int64_t> ids;
    std::int64_t node = 0;
    for (std::int64_t length = random.between(1, depth); length > 0; --length) {
      node = static_cast<std::int64_t>(hash_of(7, node, random.between(1, branches)) >> 2);
      ids.push_back(node);
    }
    requests.push_back(ids);
  }
  return trace_of(requests);
}

}  // namespace

TEST_CASE("on traces whose ids name prefixes the cache finds and evicts what a list and a map do") {
  INFO(seed_note());
  random_source random(test_seed());
  for (int round = 0; round < 20; ++round) {
    const trace what = random_tree_trace(random, 300, static_cast<int>(random.between(1, 4)), 12);
    REQUIRE(what.ids_name_prefixes);
    for (const std::int64_t blocks : {1, 5, 12, 13, 40, 100, 5000}) check_against_oracle(what, blocks);
  }
}

TEST_CASE("on traces whose ids identify themselves it does so too") {
  INFO(seed_note());
  random_source random(test_seed());
  for (int round = 0; round < 20; ++round) {
    std::vector<std::vector<std::int64_t>> requests;
    for (int i = 0; i < 300; ++i) {
      std::vector<std::int64_t> ids;
      std::int64_t id = random.between(0, 5);
      for (std::int64_t length = random.between(1, 12); length > 0; --length) {
        ids.push_back(id);
        id += random.between(1, 3);
      }
      requests.push_back(ids);
    }
    const trace what = trace_of(requests);
    REQUIRE(!what.ids_name_prefixes);
    for (const std::int64_t blocks : {1, 5, 12, 13, 40}) check_against_oracle(what, blocks);
  }
}

TEST_CASE("an unbounded pool misses every id once and evicts nothing") {
  random_source random(test_seed());
  const trace what = random_tree_trace(random, 300, 2, 12);
  progress_bar quiet(false);
  const cache_only_result result = replay_cache(what, {}, quiet);
  CHECK(result.evictions == 0);
  CHECK(result.lookups - result.hits == what.num_distinct_ids);
  CHECK(result.cached_blocks == what.num_distinct_ids);
}

TEST_CASE("a pool of any size is possible when the trace cannot fill it") {
  random_source random(test_seed());
  const trace what = random_tree_trace(random, 300, 2, 12);
  progress_bar quiet(false);
  const cache_only_result unbounded = replay_cache(what, {}, quiet);
  const cache_only_result huge = replay_cache(what, {.num_blocks = bifolio::max_num_blocks}, quiet);
  CHECK(huge.num_blocks == bifolio::max_num_blocks);
  CHECK(huge.hits == unbounded.hits);
  CHECK(huge.evictions == 0);
}

TEST_CASE("a damaged trace is read or refused with its line, never anything else") {
  INFO(seed_note());
  random_source random(test_seed());
  const std::string json =
      "{\"timestamp\": 0, \"input_length\": 1500, \"output_length\": 3, \"hash_ids\": [0, 1, 2]}\n"
      "{\"timestamp\": 10, \"input_length\": 1100, \"output_length\": 2, \"hash_ids\": [0, 1, 3]}\n";
  const std::string csv =
      "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59.5000000,374,44\n2023-11-17 00:00:01.25,396,109\n";
  std::int64_t num_read = 0, num_refused = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string text = random.one_in(2) ? json : csv;
    for (std::int64_t edits = random.between(1, 3); edits > 0; --edits) {
      const auto at = static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(text.size()) - 1));
      static constexpr char favourites[] = "0123456789-+.eE,:;\"{}[]\n\r \xff\x00";
      const char c = random.one_in(3) ? static_cast<char>(random.between(0, 255)) : random.pick(favourites);
      switch (random.between(0, 3)) {
        case 0:
          text[at] = c;
          break;
        case 1:
          text.insert(at, static_cast<std::size_t>(random.between(1, 12)), c);
          break;
        case 2:
          text.erase(at, static_cast<std::size_t>(random.between(1, 20)));
          break;
        default:
          text.resize(at + 1);
      }
      if (text.empty()) text.push_back(' ');
    }
    std::istringstream in(text);
    CAPTURE(text);
    try {
      const trace what = read_trace(in, "damaged", trace_format::automatic, 0);
      ++num_read;
      for (const trace_request& one : what.requests) {
        REQUIRE(one.num_input_tokens >= 1);
        REQUIRE(one.num_output_tokens >= 0);
        REQUIRE(one.arrival_us >= 0);
      }
    } catch (const input_error& problem) {
      ++num_refused;
      REQUIRE(std::string(problem.what()).starts_with("damaged:"));
      REQUIRE(std::string(problem.what()).find('\n') == std::string::npos);
    }
  }
  CHECK(num_read > 100);
  CHECK(num_refused > 1000);
}

TEST_CASE("an id that a request holds twice is served") {
  const trace what = trace_of({{1, 1, 2}, {1, 1, 2}, {1, 2}});
  REQUIRE(!what.ids_name_prefixes);
  progress_bar quiet(false);
  const cache_only_result result = replay_cache(what, {}, quiet);
  CHECK(result.lookups == 8);
  CHECK(result.hits == 5);
  CHECK(result.num_refused == 0);
}

TEST_CASE("ids of any size are told apart") {
  const std::int64_t huge = INT64_MAX;
  const trace what = trace_of({{0, huge}, {0, std::int64_t{1} << 31}, {0, std::int64_t{1} << 32}, {0, huge}});
  CHECK(what.num_distinct_ids == 4);
  progress_bar quiet(false);
  CHECK(replay_cache(what, {}, quiet).hits == 4);
}

TEST_CASE("without partly filled blocks only whole ones are looked up") {
  const trace what = trace_of({{1, 2, 3}, {1, 2, 3}});  // 512 · 3 + 1 tokens: the ids are those of full blocks
  std::istringstream partly(R"({"timestamp":0,"input_length":1535,"output_length":1,"hash_ids":[1,2,3]})");
  progress_bar quiet(false);
  CHECK(replay_cache(what, {.full_blocks_only = true}, quiet).lookups == 6);
  CHECK(replay_cache(read_trace(partly, "partly", trace_format::automatic, 0), {.full_blocks_only = true}, quiet)
            .lookups == 2);
}

TEST_CASE("the priority policy keeps the beginnings of prompts when the others have to go") {
  // A system prompt [1, 2], then traffic that does not use it, then the system prompt again.
  std::vector<std::vector<std::int64_t>> requests{{1, 2, 3}};
  for (std::int64_t i = 0; i < 50; ++i) requests.push_back({100 + 10 * i, 101 + 10 * i, 102 + 10 * i, 103 + 10 * i});
  requests.push_back({1, 2, 9});
  const trace what = trace_of(requests);
  progress_bar quiet(false);
  CHECK(replay_cache(what, {.num_blocks = 60}, quiet).hits == 0);
  CHECK(replay_cache(what, {.num_blocks = 60, .policy = policy_kind::priority, .num_kept = 1}, quiet).hits == 1);
}

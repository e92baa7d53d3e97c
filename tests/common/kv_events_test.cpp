// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <bifolio/kv_cache_manager.hpp>
#include <bifolio/kv_events.hpp>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/random.hpp"
#include "support/token_ids.hpp"

namespace bifolio::test {
namespace {

using nlohmann::json;

kv_cache_manager recorded(std::int64_t num_blocks) {
  kv_cache_config config{.block_size = 4, .num_blocks = num_blocks};
  config.prefix.enabled = config.prefix.record_events = config.prefix.record_tokens = true;
  config.prefix.seed = hash_seed{1, 2};
  return kv_cache_manager(config);
}

/// A sequence that computes the whole prompt and ends; false when there is no room.
bool run(kv_cache_manager& manager, std::span<const token_id> prompt) {
  const open_result opened = manager.open(prompt_view{.tokens = prompt}, static_cast<std::int64_t>(prompt.size()));
  if (opened.status != alloc_status::ok) return false;
  manager.commit(opened.seq, prompt.subspan(static_cast<std::size_t>(opened.num_cached_tokens)));
  manager.free(opened.seq);
  return true;
}

json drained(kv_cache_manager& manager, double timestamp = 1.5) {
  std::vector<cache_event> events;
  stored_contents stored;
  manager.drain_events(events, stored);
  std::string batch;
  encode_kv_events(timestamp, events, stored, {.block_size = 4, .medium = "CPU", .data_parallel_rank = 3}, batch);
  return json::from_msgpack(batch);
}

/// What a router keeps: tokens of each block by the tokens before it, as hashes say.
struct listener {
  std::map<std::uint64_t, std::vector<std::int32_t>> prefix_of;  // all tokens up to the block's end

  void read(const json& batch) {
    for (const json& event : batch[1]) {
      if (event[0] == "AllBlocksCleared") prefix_of.clear();
      if (event[0] == "BlockRemoved") {
        for (const json& hash : event[1]) prefix_of.erase(hash.get<std::uint64_t>());
      }
      if (event[0] != "BlockStored") continue;
      std::vector<std::int32_t> prefix;
      if (!event[2].is_null()) {
        const auto parent = prefix_of.find(event[2].get<std::uint64_t>());
        if (parent == prefix_of.end()) continue;
        prefix = parent->second;
      }
      const auto block_size = event[4].get<std::size_t>();
      for (std::size_t i = 0; i < event[1].size(); ++i) {
        for (std::size_t t = 0; t < block_size; ++t) prefix.push_back(event[3][i * block_size + t].get<std::int32_t>());
        prefix_of[event[1][i].get<std::uint64_t>()] = prefix;
      }
    }
  }

  /// Blocks of the longest prefix that it knows.
  [[nodiscard]] std::int64_t match(std::span<const token_id> prompt, std::size_t block_size) const {
    std::int64_t best = 0;
    for (const auto& [hash, prefix] : prefix_of) {
      if (prefix.size() > prompt.size()) continue;
      if (std::memcmp(prefix.data(), prompt.data(), prefix.size() * sizeof(std::int32_t)) != 0) continue;
      best = std::max(best, static_cast<std::int64_t>(prefix.size() / block_size));
    }
    return best;
  }
};

}  // namespace

TEST_CASE("events are batches as routers read them") {
  kv_cache_manager manager = recorded(3);
  REQUIRE(run(manager, to_ids({1, 2, 3, 4, 5, 300, 70000, 8, 9})));
  json batch = drained(manager);
  CHECK(batch.size() == 3);
  CHECK(batch[0] == 1.5);
  CHECK(batch[2] == 3);
  REQUIRE(batch[1].size() == 1);  // two blocks of one chain are one event
  const json first = batch[1][0];
  CHECK(first[0] == "BlockStored");
  CHECK(first[1].size() == 2);
  CHECK(first[2].is_null());
  CHECK(first[3] == json({1, 2, 3, 4, 5, 300, 70000, 8}));
  CHECK(first[4] == 4);
  CHECK(first[5].is_null());
  CHECK(first[6] == "CPU");
  REQUIRE(run(manager, to_ids({1, 2, 3, 4, 6, 6, 6, 6})));
  batch = drained(manager);
  CHECK(batch[1].back()[2] == first[1][0]);  // the parent
  CHECK(drained(manager)[1].empty());
  REQUIRE(run(manager, to_ids({7, 7, 7, 7, 7, 7, 7, 7})));
  batch = drained(manager);
  CHECK(batch[1][0][0] == "BlockRemoved");
  CHECK(batch[1][0][2] == "CPU");
  REQUIRE(manager.reset_prefix_cache());
  CHECK(drained(manager)[1] == json({json({"AllBlocksCleared"})}));
}

TEST_CASE(
    "a hook is told of the events that are drained, in their order and with their tokens; alone nothing is kept") {
  struct record {
    std::vector<cache_event> events;
    stored_contents stored;
  };
  const auto note = [](void* user, const cache_event& event, std::span<const token_id> tokens, bool is_first) {
    record& to = *static_cast<record*>(user);
    to.events.push_back(event);
    if (event.what != cache_event::kind::stored) {
      if (!tokens.empty() || is_first) to.events.clear();  // is noticed below
      return;
    }
    to.stored.tokens.insert(to.stored.tokens.end(), tokens.begin(), tokens.end());
    to.stored.is_first.push_back(is_first ? 1 : 0);
  };
  record told, told_alone;
  kv_cache_config config{.block_size = 4, .num_blocks = 12};
  config.prefix.enabled = config.prefix.record_events = config.prefix.record_tokens = true;
  config.prefix.seed = hash_seed{1, 2};
  config.prefix.hook = {note, &told};
  kv_cache_manager both(config);
  config.prefix.record_events = config.prefix.record_tokens = false;
  config.prefix.hook = {note, &told_alone};
  kv_cache_manager hook_alone(config);
  INFO(seed_note());
  random_source random(test_seed());
  std::vector<cache_event> events;
  stored_contents stored;
  std::size_t num_events = 0;
  for (int round = 0; round < 500; ++round) {
    std::vector<token_id> prompt(static_cast<std::size_t>(random.between(1, 24)));
    for (token_id& token : prompt) token = token_id{static_cast<std::int32_t>(random.between(0, 1))};
    const bool clears = random.one_in(50);
    for (kv_cache_manager* manager : {&both, &hook_alone}) {
      REQUIRE(run(*manager, prompt));
      if (clears) REQUIRE(manager->reset_prefix_cache());
    }
    if (!random.one_in(5)) continue;
    both.drain_events(events, stored);
    num_events += events.size();
    for (const record* each : {&told, &told_alone}) {
      CHECK(each->events == events);
      CHECK(each->stored.tokens == stored.tokens);
      CHECK(each->stored.is_first == stored.is_first);
    }
    told = told_alone = {};
    hook_alone.drain_events(events);
    CHECK(events.empty());
  }
  CHECK(num_events > 300);
  both.drain_events(events);  // a digest counts those that wait
  CHECK(both.digest() == hook_alone.digest());
}

TEST_CASE("a listener knows the match lengths of the prefix cache, also when it begins with a listing") {
  INFO(seed_note());
  random_source random(test_seed());
  kv_cache_manager manager = recorded(40);
  listener from_the_start, late;
  std::vector<block_id> hits(16);
  for (int round = 0; round < 3000; ++round) {
    std::vector<token_id> prompt(static_cast<std::size_t>(random.between(1, 24)));
    for (token_id& token : prompt) token = token_id{static_cast<std::int32_t>(random.between(0, 1))};
    REQUIRE(run(manager, prompt));
    from_the_start.read(drained(manager));
    if (round % 500 == 499) {
      std::vector<cache_event> events{{.what = cache_event::kind::cleared}};
      std::vector<cache_event> listed;
      stored_contents stored;
      manager.prefix()->list_contents(listed, stored);
      events.insert(events.end(), listed.begin(), listed.end());
      std::string batch;
      encode_kv_events(0, events, stored, {.block_size = 4}, batch);
      late.read(json::from_msgpack(batch));
    }
    for (token_id& token : prompt) token = token_id{static_cast<std::int32_t>(random.between(0, 1))};
    const std::int64_t ours = manager.prefix()->match({.tokens = prompt}, hits).num_blocks;
    CHECK(from_the_start.match(prompt, 4) == ours);
    if (round % 500 == 499) CHECK(late.match(prompt, 4) == ours);
  }
}

TEST_CASE("events without their contents are refused") {
  std::vector<cache_event> events{{.what = cache_event::kind::stored, .block = block_id{0}}};
  std::string batch = "as it was";
  CHECK_THROWS_AS(encode_kv_events(0, events, {}, {}, batch), error);
  CHECK(batch == "as it was");
}

}  // namespace bifolio::test

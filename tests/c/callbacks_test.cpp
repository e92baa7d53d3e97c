// SPDX-License-Identifier: Apache-2.0
// What the C interface tells its caller by functions of the caller: events of the prefix cache, and the log.
#include <bifolio/c/bifolio.h>
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "c/structs.hpp"

using namespace bifolio::test;

namespace {

struct told_event {
  bifolio_cache_event event;
  std::vector<bifolio_token> tokens;
  std::int32_t is_first;
};

void note_event(void* user, const bifolio_cache_event* event, const bifolio_token* tokens, std::size_t num_tokens,
                std::int32_t is_first) {
  static_cast<std::vector<told_event>*>(user)->push_back({*event, {tokens, tokens + num_tokens}, is_first});
}

/// A sequence with these tokens, computed and freed.
void run_prompt(bifolio_manager manager, const std::vector<bifolio_token>& tokens) {
  auto prompt = made(bifolio_prompt_init);
  prompt.tokens = tokens.data();
  prompt.num_tokens = tokens.size();
  bifolio_open_result opened{};
  REQUIRE(bifolio_manager_open(manager, &prompt, static_cast<std::int64_t>(tokens.size()), &opened) == BIFOLIO_OK);
  const auto num_cached = static_cast<std::size_t>(opened.num_cached_tokens);
  REQUIRE(bifolio_manager_commit(manager, opened.seq, tokens.data() + num_cached, tokens.size() - num_cached) ==
          BIFOLIO_OK);
  REQUIRE(bifolio_manager_free(manager, opened.seq) == BIFOLIO_OK);
}

}  // namespace

TEST_CASE("a function of the caller is told of events with their tokens when they happen, also by a cache's manager") {
  std::vector<told_event> told;
  auto config = made(bifolio_manager_config_init);
  config.block_size = 2;
  config.num_blocks = 2;
  config.prefix_caching = 1;
  config.on_event = note_event;
  config.on_event_user = &told;
  bifolio_backend backend = nullptr;
  bifolio_cache cache = nullptr;
  bifolio_manager managers[2] = {};
  REQUIRE(bifolio_manager_create(&config, &managers[0]) == BIFOLIO_OK);
  REQUIRE(bifolio_backend_create("cpu", nullptr, &backend) == BIFOLIO_OK);
  auto spec = made(bifolio_attention_spec_init);
  spec.num_q_heads = spec.num_kv_heads = 1;
  spec.qk_head_dim = 4;
  auto model = made(bifolio_cache_config_init);
  model.num_layers = 1;
  model.attention = &spec;
  model.manager = &config;
  REQUIRE(bifolio_cache_create(backend, &model, &cache) == BIFOLIO_OK);
  REQUIRE(bifolio_cache_manager(cache, &managers[1]) == BIFOLIO_OK);
  for (const bifolio_manager manager : managers) {
    told.clear();
    run_prompt(manager, {1, 2, 3, 4});
    REQUIRE(told.size() == 2);
    CHECK(told[0].event.kind == 0);
    CHECK(told[0].tokens == std::vector<bifolio_token>{1, 2});
    CHECK(told[0].is_first == 1);
    CHECK(told[1].tokens == std::vector<bifolio_token>{3, 4});
    CHECK(told[1].is_first == 0);
    CHECK(told[1].event.parent_low == told[0].event.key_low);
    run_prompt(manager, {5, 6});
    REQUIRE(told.size() == 4);
    CHECK(told[2].event.kind == 1);
    CHECK(told[2].tokens.empty());
    CHECK(told[2].event.key_low == told[1].event.key_low);
    CHECK(told[3].tokens == std::vector<bifolio_token>{5, 6});
    CHECK(bifolio_manager_reset_prefix_cache(manager) == BIFOLIO_OK);
    REQUIRE(told.size() == 5);  // one event stands for all blocks
    CHECK(told[4].event.kind == 2);
    const bifolio_cache_event* events = nullptr;
    std::size_t count = 1;
    CHECK(bifolio_manager_drain_events(manager, &events, &count) == BIFOLIO_OK);
    CHECK(count == 0);  // record_events is 0
    CHECK(bifolio_manager_destroy(manager) == BIFOLIO_OK);
  }
  CHECK(bifolio_cache_destroy(cache) == BIFOLIO_OK);
  CHECK(bifolio_backend_destroy(backend) == BIFOLIO_OK);
}

TEST_CASE("a configuration of the version before events could be told is taken, and what follows it is not read") {
  constexpr std::size_t earlier = offsetof(bifolio_manager_config, on_event);
  std::vector<told_event> told;
  bifolio_manager_config config;
  std::memset(static_cast<void*>(&config), 0xff, sizeof config);
  REQUIRE(bifolio_manager_config_init(&config, earlier) == BIFOLIO_OK);
  CHECK(config.size == earlier);
  config.on_event = note_event;  // behind the end of what the caller knows
  config.on_event_user = &told;
  config.num_blocks = 4;
  config.prefix_caching = 1;
  bifolio_manager manager = nullptr;
  REQUIRE(bifolio_manager_create(&config, &manager) == BIFOLIO_OK);
  run_prompt(manager, std::vector<bifolio_token>(16));
  CHECK(told.empty());
  CHECK(bifolio_manager_destroy(manager) == BIFOLIO_OK);
  config.size = earlier + 4;  // half of a pointer
  CHECK(bifolio_manager_create(&config, &manager) == BIFOLIO_INVALID_ARGUMENT);
}

TEST_CASE("what the library says goes to the caller's function, until there is none") {
  std::string said;
  bifolio_set_log([](void* to, std::int32_t, const char* message) { *static_cast<std::string*>(to) += message; },
                  &said);
  bifolio_backend backend = nullptr;
  REQUIRE(bifolio_backend_create("cpu", nullptr, &backend) == BIFOLIO_OK);
  bifolio_set_log(nullptr, nullptr);
  CHECK_MESSAGE(said.find("cpu") != std::string::npos, said);
  said.clear();
  CHECK(bifolio_backend_destroy(backend) == BIFOLIO_OK);
  REQUIRE(bifolio_backend_create("cpu", nullptr, &backend) == BIFOLIO_OK);
  CHECK(said.empty());
  CHECK(bifolio_backend_destroy(backend) == BIFOLIO_OK);
}

// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <bifolio/bifolio.hpp>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

namespace bifolio::test {

TEST_CASE("a traced backend computes the same, and its log has every call in steps, as Chrome's traces are") {
  const auto where = make_backend();
  trace_log log;
  const auto traced = trace_backend(*where, log);
  CHECK(traced->where() == where->where());
  const model_cache_config config{.num_layers = 3,
                                  .attention = {.num_q_heads = 2, .num_kv_heads = 1, .qk_head_dim = 8},
                                  .cache = {.block_size = 4, .num_blocks = 8},
                                  .zero_fill = true};
  model_cache plain(*where, config), cache(*traced, config);
  const std::vector<token_id> tokens{token_id{1}, token_id{2}, token_id{3}};
  std::vector<float> rows(3 * 2 * 8), out(rows.size()), expected(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 7) - 3;
  const auto run = [&](model_cache& of, std::vector<float>& to) {
    const seq_id seq = of.open(tokens).seq;
    for (int repeat = 0; repeat < 2; ++repeat) {
      model_step step = of.begin_step({{seq, tokens}});
      log.set_step(step.plan().step);
      const auto kv = dense_view(static_cast<const float*>(rows.data()), 3, 1, 8);
      const auto q = dense_view(static_cast<const float*>(rows.data()), 3, 2, 8);
      for (std::int32_t layer = 0; layer < 3; ++layer) {
        REQUIRE(step.attend(layer, q, kv, kv, dense_view(to.data(), 3, 2, 8)) == errc::ok);
      }
      step.commit();
    }
  };
  run(plain, expected);
  run(cache, out);
  CHECK(out == expected);

  const nlohmann::json trace = nlohmann::json::parse(log.chrome_json());
  std::multiset<std::string> names;
  for (const nlohmann::json& event : trace["traceEvents"]) {
    names.insert(event["name"]);
    CHECK(event["ph"] == "X");
    CHECK(event["ts"].get<double>() >= 0);
    CHECK(event["dur"].get<double>() >= 0);
    CHECK(event["pid"] == 1);  // there is one process
    CHECK(event["tid"].is_number());
    if (event["name"] == "attention") CHECK(event["args"]["size"] == 3);
  }
  CHECK(names.count("attention") == 6);
  CHECK(names.count("append") == 6);
  CHECK(names.count("plan_attention") == 2);
  CHECK(names.count("clear") == 3);
  CHECK(names.count("step 1") == 1);
  CHECK(names.count("step 2") == 1);
  CHECK(log.num_lost() == 0);
}

TEST_CASE("a log keeps the last calls, and has no room for none") {
  trace_log log(3);
  for (int i = 0; i < 5; ++i) log.add("call", log.now(), i);
  const std::vector<trace_log::entry> kept = log.entries();
  REQUIRE(kept.size() == 3);
  CHECK(kept.front().size == 2);
  CHECK(kept.back().size == 4);
  CHECK(log.num_lost() == 2);
  for (const std::int64_t capacity : {std::int64_t{0}, (std::int64_t{1} << 40) + 1}) {
    try {
      trace_log none(capacity);
      FAIL("a capacity that cannot be was taken");
    } catch (const error& refused) {
      CHECK(refused.code() == errc::invalid_argument);
    }
  }
  CHECK(nlohmann::json::parse(trace_log(1).chrome_json())["traceEvents"].empty());
}

}  // namespace bifolio::test

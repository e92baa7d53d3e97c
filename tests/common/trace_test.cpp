// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/bifolio.hpp>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace bifolio::test {
namespace {

using nlohmann::json;

/// What is wrong with a trace by the description of Chrome's Trace Event Format (the JSON object format, events X and
/// M) and by what viewers need: known fields alone, of their types, spans of a row in one another or apart. Empty when
/// nothing is.
std::string find_trace_problem(const std::string& text) {
  const json trace = json::parse(text, nullptr, false);
  if (!trace.is_object() || trace.size() != 1 || !trace.contains("traceEvents")) return "no object with traceEvents";
  if (!trace["traceEvents"].is_array()) return "traceEvents is no array";
  std::map<std::int64_t, std::vector<std::pair<double, double>>> rows;  // begin and end of spans by tid
  std::set<std::int64_t> titled;
  for (const json& event : trace["traceEvents"]) {
    const auto has = [&](const char* key, auto is) { return event.contains(key) && (event[key].*is)(); };
    if (!event.is_object() || !has("name", &json::is_string) || !has("ph", &json::is_string)) return "no name or phase";
    if (!has("pid", &json::is_number_unsigned) || !has("tid", &json::is_number_unsigned)) return "no pid or tid";
    if (!has("args", &json::is_object)) return "no args";
    const auto tid = event["tid"].get<std::int64_t>();
    if (event["ph"] == "M") {
      if (event.size() != 5 || (event["name"] != "process_name" && event["name"] != "thread_name"))
        return "unknown metadata";
      if (event["args"].size() != 1 || !event["args"]["name"].is_string()) return "a title without a name";
      if (event["name"] == "thread_name" && !titled.insert(tid).second) return "a row with two titles";
      continue;
    }
    if (event["ph"] != "X" || event.size() != 7) return "an event that is neither X nor M, or has other fields";
    if (!has("ts", &json::is_number) || !has("dur", &json::is_number)) return "no ts or dur";
    const double begin = event["ts"], duration = event["dur"];
    if (begin < 0 || duration < 0) return "a negative time";
    if (!titled.contains(tid)) return "a row without a title";
    rows[tid].emplace_back(begin, begin + duration);
  }
  for (auto& [tid, spans] : rows) {
    std::ranges::sort(spans, [](const auto& a, const auto& b) {
      return std::pair(a.first, -a.second) < std::pair(b.first, -b.second);
    });
    std::vector<double> open;  // ends
    for (const auto& [begin, end] : spans) {
      while (!open.empty() && open.back() <= begin + 1e-6) open.pop_back();
      if (!open.empty() && end > open.back() + 1e-6) return "spans of row " + std::to_string(tid) + " overlap";
      open.push_back(end);
    }
  }
  return "";
}

}  // namespace

TEST_CASE("what checks traces finds what viewers would not take") {
  const std::string title = R"({"name":"thread_name","ph":"M","pid":1,"tid":1,"args":{"name":"a"}})";
  const auto span = [](const char* ts, const char* dur) {
    return std::string(R"(,{"name":"a","ph":"X","ts":)") + ts + R"(,"dur":)" + dur + R"(,"pid":1,"tid":1,"args":{}})";
  };
  const auto of = [&](const std::string& spans) { return "{\"traceEvents\":[" + title + spans + "]}"; };
  CHECK(find_trace_problem(of(span("0", "10") + span("2", "3") + span("5", "5") + span("10", "1"))) == "");
  CHECK(find_trace_problem(of(span("0", "10") + span("2", "9"))) == "spans of row 1 overlap");
  for (const std::string& flawed :
       {of(span("0", "-1")), of(span("\"0\"", "1")), of(span("0", "1") + ","), of(title), of(",{}"), std::string("[]"),
        "{\"traceEvents\":[" + span("0", "1").substr(1) + "]}"}) {
    CHECK_MESSAGE(find_trace_problem(flawed) != "", flawed);
  }
}

TEST_CASE(
    "a traced backend computes the same, and its log has every call in steps and layers, as Chrome's traces are") {
  const auto where = make_backend();
  trace_log log;
  const auto traced = trace_backend(*where, log);
  CHECK(traced->where() == where->where());
  CHECK(&where->unwrapped() == where.get());
  CHECK(&trace_backend(*traced, log)->unwrapped() == where.get());
  const model_cache_config config{.num_layers = 3,
                                  .attention = {.num_q_heads = 2, .num_kv_heads = 1, .qk_head_dim = 8},
                                  .cache = {.block_size = 4, .num_blocks = 8},
                                  .zero_fill = true};
  model_cache plain(*where, config), cache(*traced, config);
  const std::vector<std::int32_t> numbers{4, 5, 7}, too_few{1};
  CHECK_THROWS_AS(log.name_layers(cache.engine().layers(), too_few), error);
  log.name_layers(cache.engine().layers(), numbers);
  const std::vector<token_id> tokens{token_id{1}, token_id{2}, token_id{3}};
  std::vector<float> rows(3 * 2 * 8), out(rows.size()), expected(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 7) - 3;
  const auto run = [&](model_cache& of, std::vector<float>& to) {
    const seq_id seq = of.open(tokens).seq;
    for (int repeat = 0; repeat < 2; ++repeat) {
      const std::int64_t since = log.now();
      model_step step = of.begin_step({{seq, tokens}});
      log.set_step(step.plan().step, since);
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

  const std::string text = log.chrome_json();
  CHECK_MESSAGE(find_trace_problem(text) == "", text);
  const json trace = json::parse(text);
  std::multiset<std::string> names, titles;
  std::map<std::pair<int, int>, int> calls;  // of a step and a layer
  for (const json& event : trace["traceEvents"]) {
    if (event["ph"] == "M") {
      titles.insert(event["args"]["name"]);
      continue;
    }
    const std::string name = event["name"];
    names.insert(name);
    CHECK(event["pid"] == 1);  // there is one process
    const json& args = event["args"];
    if (name == "attention") CHECK(args["size"] == 3);
    if (name == "attention" || name == "append") ++calls[{args["step"], args["layer"]}];
    if (name == "plan_attention") CHECK(args["step"] >= 1);  // which begin_step called
    if (name.starts_with("step ")) CHECK(event["tid"] == 1);
    if (name.starts_with("layer ")) CHECK(event["tid"] == 2);
  }
  CHECK(titles == std::multiset<std::string>{"bifolio", "layers", "steps", "thread 1"});
  CHECK(names.count("attention") == 6);
  CHECK(names.count("append") == 6);
  CHECK(names.count("plan_attention") == 2);
  CHECK(names.count("clear") == 3);
  CHECK(names.count("step 1") == 1);
  CHECK(names.count("step 2") == 1);
  for (const int layer : numbers) {
    CHECK(names.count("layer " + std::to_string(layer)) == 2);
    CHECK(calls[{1, layer}] == 2);
    CHECK(calls[{2, layer}] == 2);
  }
  CHECK(log.num_lost() == 0);
}

TEST_CASE("any name, threads at once and steps that overlap make a trace that can be read") {
  trace_log log;
  log.add("a \"name\" of \\ and \n", log.now(), 1);
  const std::int64_t begin = log.now();
  log.set_step(1);
  log.add("first of 1", begin, 0);
  log.set_step(2);
  log.add("first of 2", log.now(), 0);
  std::thread([&] { log.add("elsewhere", log.now(), 0); }).join();
  log.set_step(1);
  log.add("last of 1", log.now(), 0);
  const std::string text = log.chrome_json();
  CHECK_MESSAGE(find_trace_problem(text) == "", text);
  const json trace = json::parse(text);
  std::set<std::string> names;
  for (const json& event : trace["traceEvents"]) names.insert(event["name"]);
  CHECK(names.contains("a \"name\" of \\ and \n"));
  CHECK(names.contains("step 2"));
}

TEST_CASE("a step takes the calls before it that it is told to, and no others") {
  trace_log log(4);
  log.add("too early", log.now(), 0);
  std::int64_t since = log.now();
  while (log.now() == since) since = log.now();
  since = log.now();
  log.add("copies", log.now(), 0);
  log.add("upload", log.now(), 0);
  log.set_step(7, since);
  log.add("attention", log.now(), 0);
  log.set_step(-1);
  std::vector<std::int64_t> steps;
  for (const trace_log::entry& each : log.entries()) steps.push_back(each.step);
  CHECK(steps == std::vector<std::int64_t>{-1, 7, 7, 7});
  log.set_step(8, 0);  // all that are kept
  for (const trace_log::entry& each : log.entries()) CHECK(each.step == 8);
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
  CHECK(find_trace_problem(trace_log(1).chrome_json()) == "");
}

}  // namespace bifolio::test

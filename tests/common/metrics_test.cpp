// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <bifolio/error.hpp>
#include <bifolio/metrics.hpp>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

using namespace bifolio;

namespace {

metrics numbered() {
  metrics all;
  all.prefix.emplace();
  all.scheduler.emplace();
  std::int64_t next = 1;
  const auto fill = [&](auto& stats) {
    auto* const first = reinterpret_cast<std::int64_t*>(&stats);
    for (std::size_t i = 0; i < sizeof stats / sizeof next; ++i) first[i] = next++;
  };
  fill(all.cache);
  fill(*all.prefix);
  fill(*all.scheduler);
  return all;
}

}  // namespace

TEST_CASE("every counter is a sample of Prometheus with help and type, and none has the name or the value of another") {
  const std::vector<metric_label> labels{{"model", "a \"b\" \\ c\nd"}, {"rank", "0"}};
  std::istringstream text(prometheus_text(numbered(), labels));
  const std::regex help("# HELP (bifolio_[a-z_]+) [A-Z].*\\."), type("# TYPE (bifolio_[a-z_]+) (counter|gauge)");
  const std::regex sample("(bifolio_[a-z_]+)\\{model=\"a \\\\\"b\\\\\" \\\\\\\\ c\\\\nd\",rank=\"0\"\\} ([0-9]+)");
  std::set<std::string> names, values;
  std::string line;
  while (std::getline(text, line)) {
    std::smatch of_help, of_type, of_sample;
    REQUIRE_MESSAGE(std::regex_match(line, of_help, help), line);
    const std::string name = of_help[1];
    REQUIRE(std::getline(text, line));
    REQUIRE_MESSAGE(std::regex_match(line, of_type, type), line);
    CHECK(of_type[1] == name);
    const bool ends_in_total = name.size() > 6 && name.substr(name.size() - 6) == "_total";
    CHECK_MESSAGE((of_type[2] == "counter") == ends_in_total, line);
    REQUIRE(std::getline(text, line));
    std::string copy = line;
    REQUIRE_MESSAGE(std::regex_match(copy, of_sample, sample), line);
    CHECK(of_sample[1] == name);
    CHECK_MESSAGE(names.insert(name).second, name);
    CHECK_MESSAGE(values.insert(of_sample[2]).second, line);
  }
  CHECK(names.size() == (sizeof(cache_stats) + sizeof(prefix_stats) + sizeof(scheduler_stats)) / sizeof(std::int64_t));

  // The page names them all.
  std::ifstream page(std::string(BIFOLIO_SOURCE_DIR) + "/docs/metrics.md");
  std::stringstream content;
  content << page.rdbuf();
  for (const std::string& name : names) CHECK_MESSAGE(content.str().find("`" + name + "`") != std::string::npos, name);
}

TEST_CASE("what is not there is left out, and names that are no labels are refused") {
  metrics alone;
  alone.cache.num_blocks = 7;
  const std::string text = prometheus_text(alone);
  CHECK(text.find("\nbifolio_blocks 7\n") != std::string::npos);
  CHECK(text.find("prefix") == std::string::npos);
  CHECK(text.find("steps_total") == std::string::npos);
  CHECK(json_text(alone).find("\"prefix\"") == std::string::npos);
  for (const char* bad : {"", "1a", "a-b", "a~b", "__a", "a b", "ä"}) {
    const metric_label label{bad, "x"};
    try {
      (void)prometheus_text(alone, {&label, 1});
      FAIL_CHECK(bad);
    } catch (const error& refusal) {
      CHECK(refusal.code() == errc::invalid_argument);
    }
  }
}

TEST_CASE("JSON has every counter under the name of its field") {
  const std::string text = json_text(numbered());
  CHECK(text.substr(0, 25) == "{\"cache\":{\"num_blocks\":1,");
  CHECK(text.find("},\"prefix\":{\"num_lookups\":16,") != std::string::npos);
  CHECK(text.find("},\"scheduler\":{\"num_waiting\":23,") != std::string::npos);
  CHECK(text.substr(text.size() - 19) == ",\"num_aborted\":37}}");
}

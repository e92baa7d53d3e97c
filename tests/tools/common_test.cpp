// SPDX-License-Identifier: Apache-2.0
// What the programs share: text that is safe to show, JSON that is not trusted.
#include <doctest/doctest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>

#include "tools/common/escape.hpp"
#include "tools/common/json.hpp"
#include "tools/common/program.hpp"
#include "tools/common/report_compare.hpp"
#include "tools/common/utf8.hpp"
#include "xml_flaw.hpp"

namespace {

using namespace bifolio::test;
using namespace tools;

const std::string euro = "\xe2\x82\xac", grin = "\xf0\x9f\x98\x80";

/// Bytes of all kinds, those that end, begin and break characters among them.
std::string random_bytes(std::mt19937_64& random) {
  const std::string some = "a|\",\\\n\t\x1b\x7f\xc2\x9b\x80\xe2\x82\xac\xff<&";
  std::string text(random() % 40, '\0');
  for (char& c : text) c = random() % 4 == 0 ? static_cast<char>(random()) : some[random() % some.size()];
  return text;
}

bool is_harmless(const std::string& text, const std::string& kept) {
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t length = character_length(std::string_view(text).substr(at));
    const auto first = static_cast<unsigned char>(text[at]);
    if (length == 0) return false;
    if (length == 1 && (first < 0x20 || first == 0x7f) && kept.find(text[at]) == std::string::npos) return false;
    if (first == 0xc2 && static_cast<unsigned char>(text[at + 1]) < 0xa0) return false;
    at += length;
  }
  return true;
}

}  // namespace

TEST_CASE("text is cut between characters") {
  CHECK(complete_utf8("abc") == 3);
  CHECK(complete_utf8("") == 0);
  CHECK(complete_utf8("a" + euro) == 4);
  for (std::size_t length = 1; length < 3; ++length)
    CHECK(complete_utf8(std::string("a").append(euro, 0, length)) == 1);
  for (std::size_t length = 1; length < 4; ++length)
    CHECK(complete_utf8(std::string("a").append(grin, 0, length)) == 1);
  CHECK(complete_utf8("\x80\x80\x80\x80") == 4);  // nothing to wait for
}

TEST_CASE("what is no character or controls a terminal is escaped, in a text and in a line") {
  CHECK(printable_text("") == "");
  CHECK(printable_text("a\n\t" + euro + grin) == "a\n\t" + euro + grin);
  CHECK(printable_line("a\n\t" + euro + grin) == "a\\x0a\\x09" + euro + grin);
  CHECK(printable_line("back\\slash") == "back\\slash");
  for (const auto escape : {printable_text, printable_line}) {
    CHECK(escape("\x1b[31m\x07\r") == "\\x1b[31m\\x07\\x0d");
    CHECK(escape(std::string_view("\0", 1)) == "\\x00");
    CHECK(escape("\x7f") == "\\x7f");
    CHECK(escape("\xc2\x80\xc2\x9f\xc2\xa0") == "\\xc2\\x80\\xc2\\x9f\xc2\xa0");  // C1, and what follows it
    CHECK(escape("\xff") == "\\xff");
    CHECK(escape("\x9b") == "\\x9b");
    CHECK(escape("\xe2\x82") == "\\xe2\\x82");
    CHECK(escape("\xc0\x80") == "\\xc0\\x80");           // overlong
    CHECK(escape("\xed\xa0\x80") == "\\xed\\xa0\\x80");  // a surrogate
    CHECK(escape("\xf4\x90\x80\x80") == "\\xf4\\x90\\x80\\x80");
    const std::string once = escape("\x1b\xff\n\t");
    CHECK(escape(once) == once);
  }
}

TEST_CASE("an excerpt is a line of about sixty bytes and does not cut a character") {
  CHECK(excerpt("short\n") == "short\\x0a");
  CHECK(excerpt(std::string(60, 'x')) == std::string(60, 'x'));
  CHECK(excerpt(std::string(61, 'x')) == std::string(60, 'x') + "...");
  CHECK(excerpt(std::string(59, 'x') + euro) == std::string(59, 'x') + "...");
}

TEST_CASE("cells of tables, SVG and JSON hold any text in one piece") {
  CHECK(md_cell("a|b\nc") == "a\\|b\\x0ac");
  CHECK(csv_cell("plain") == "plain");
  CHECK(csv_cell("a,b") == "\"a,b\"");
  CHECK(csv_cell("say \"a\"") == "\"say \"\"a\"\"\"");
  CHECK(csv_cell("two\nlines\r") == "\"two\nlines\\x0d\"");
  CHECK(csv_cell("=1+1") == "=1+1");
  CHECK(svg_text("<a href=\"x\">&\x1b\n") == "&lt;a href=&quot;x&quot;&gt;&amp;\\x1b\\x0a");
  CHECK(printable_json("\"\x7f\xc2\x9b\xc2\xa0\xe2\x82\xac\"") == "\"\\u007f\\u009b\xc2\xa0\xe2\x82\xac\"");
}

TEST_CASE("no bytes come through as control characters, and none break the form around them") {
  constexpr std::uint64_t seed = 31;
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 5000; ++round) {
    const std::string bytes = random_bytes(random);
    CAPTURE(nlohmann::json(bytes).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace));
    REQUIRE(is_harmless(printable_text(bytes), "\n\t"));
    REQUIRE(is_harmless(printable_line(bytes), ""));
    REQUIRE(is_harmless(excerpt(bytes), ""));
    REQUIRE(is_harmless(csv_cell(bytes), "\n\t"));
    const std::string cell = md_cell(bytes);
    REQUIRE(is_harmless(cell, ""));
    for (std::size_t at = 0; at < cell.size(); ++at) REQUIRE((cell[at] != '|' || (at > 0 && cell[at - 1] == '\\')));
    REQUIRE(xml_flaw("<a b=\"" + svg_text(bytes) + "\">" + svg_text(bytes) + "</a>") == "");
    const std::string json = nlohmann::json(bytes).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
    REQUIRE(is_harmless(printable_json(json), ""));
    REQUIRE(nlohmann::json::parse(printable_json(json)) == nlohmann::json::parse(json));
  }
}

namespace {

/// The sentence with which a text is refused; empty when it is not.
std::string json_problem(const std::string& text) {
  try {
    (void)parse_json(text);
  } catch (const json_error& problem) {
    return problem.what();
  }
  return {};
}

/// A JSON value of every kind, nested at most `depth` deep.
nlohmann::json random_json(std::mt19937_64& random, int depth) {
  const auto text = [&] { return std::string(random() % 6, 'a') + (random() % 2 == 0 ? euro : "\"\\\n"); };
  switch (random() % (depth > 0 ? 8 : 6)) {
    case 0:
      return nullptr;
    case 1:
      return random() % 2 == 0;
    case 2:
      return -static_cast<std::int64_t>(random() >> 1);
    case 3:
      return random();
    case 4:
      return static_cast<double>(random()) * 0x1p-40;
    case 5:
      return text();
    case 6: {
      nlohmann::json list = nlohmann::json::array();
      for (auto count = random() % 5; count > 0; --count) list.push_back(random_json(random, depth - 1));
      return list;
    }
    default: {
      nlohmann::json object = nlohmann::json::object();
      for (auto count = random() % 5; count > 0; --count) object[text()] = random_json(random, depth - 1);
      return object;
    }
  }
}

}  // namespace

TEST_CASE("JSON that is valid and flat enough is read as nlohmann-json reads it") {
  constexpr std::uint64_t seed = 32;
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 2000; ++round) {
    const nlohmann::json value = random_json(random, 6);
    const std::string text = value.dump(round % 3 - 1);
    CAPTURE(text);
    REQUIRE(parse_json(text) == nlohmann::json::parse(text));
    // A byte changed: both read the same, or both refuse.
    std::string changed = text;
    changed[random() % changed.size()] = "{}[],:\"0e-. tn"[random() % 13];
    const nlohmann::json expected = nlohmann::json::parse(changed, nullptr, false);
    if (expected.is_discarded()) {
      REQUIRE(json_problem(changed) != "");
    } else {
      REQUIRE(parse_json(changed) == expected);
    }
  }
  CHECK(parse_json(R"({"a":1,"a":[2]})") == nlohmann::json::parse(R"({"a":1,"a":[2]})"));
}

TEST_CASE("JSON is nested 64 levels deep and no deeper, whatever follows") {
  const auto lists = [](std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  std::string objects = "1";
  for (int i = 0; i < 64; ++i) objects = std::string("{\"a\":").append(objects).append("}");
  CHECK(json_problem(lists(64)) == "");
  CHECK(json_problem(std::string("[").append(lists(63)).append(",").append(lists(63)).append("]")) == "");
  CHECK(json_problem(objects) == "");
  const std::string sentence = "JSON nested deeper than 64 levels";
  CHECK(json_problem(lists(65)) == sentence);
  CHECK(json_problem("[" + objects + "]") == sentence);
  CHECK(json_problem(lists(1000000)) == sentence);
  CHECK(json_problem(std::string(1000000, '[')) == sentence);
  std::string open;
  for (int i = 0; i < 100000; ++i) open += "{\"a\":[";
  CHECK(json_problem(open) == sentence);
}

TEST_CASE("what is no JSON, and a number out of range, are refused with the byte") {
  CHECK(json_problem("") == "not valid JSON at byte 1");
  CHECK(json_problem("[1,]") == "not valid JSON at byte 4");
  CHECK(json_problem("[1] 2") == "not valid JSON at byte 5");
  CHECK(json_problem("[1e999]") == "JSON with a number out of range at byte 6: 1e999");
  CHECK(json_problem("-1e999") == "JSON with a number out of range at byte 6: -1e999");
  CHECK(json_problem("[1e-999,123456789012345678901234567890]") == "");  // rounded, as JSON allows
  CHECK(json_problem(std::string(400, '9') + ".5").ends_with(std::string(60, '9') + "..."));
}

TEST_CASE("an excerpt of a JSON value is short and flat whatever the value is") {
  const auto of = [](const std::string& text) { return json_excerpt(parse_json(text)); };
  CHECK(of("null") == "null");
  CHECK(of("-1.5") == "-1.5");
  CHECK(of("\"a\\u001b\\u009b\\u20ac\"") == "\"a\\u001b\\u009b\\u20ac\"");
  CHECK(of(R"({"b":[1,2],"a":"c"})") == R"({"a":"c","b":[1,2]})");
  CHECK(of("[[[1]]]") == "[[[...]]]");
  CHECK(of("[[[]]]") == "[[[]]]");
  CHECK(of(std::string(64, '[') + std::string(64, ']')) == "[[[...]]]");
  CHECK(of(std::string(1, '"').append(1000000, 'x').append(1, '"')) ==
        std::string(1, '"').append(59, 'x').append("..."));
  std::string many = "[0";
  for (int i = 0; i < 100000; ++i) many += ",0";
  CHECK(of(many + "]") == many.substr(0, 60) + "...");
}

TEST_CASE("a report says the same in every format, and what is constant stands above its table") {
  report said;
  said.fact("cpu", "a \x1b[31m chip");
  for (const std::int64_t batch : {1, 8, 64}) {
    said.add({{"op", std::string("de|code")},
              {"layout", std::string("hnd")},
              {"batch", batch},
              {"us", 0.5 * static_cast<double>(batch)}});
  }
  said.add({{"op", std::string("other")}, {"ns", 3.25}});
  const auto text_in = [&](output_format format) {
    std::ostringstream out;
    said.print(out, format);
    return out.str();
  };
  const std::string md = text_in(output_format::md);
  CHECK(md.find("In all rows: op de|code, layout hnd\n") != md.npos);
  CHECK(md.find("|     8 |   4 |") != md.npos);
  CHECK(md.find("| other | 3.25 |") != md.npos);
  CHECK(md.find('\x1b') == md.npos);
  const std::string csv = text_in(output_format::csv);
  CHECK(csv.find("op,layout,batch,us\nde|code,hnd,1,0.5\n") != csv.npos);
  CHECK(csv.find("\nop,ns\nother,3.25\n") != csv.npos);
  const nlohmann::json whole = nlohmann::json::parse(text_in(output_format::json));
  CHECK(whole["rows"].size() == 4);
  CHECK(whole["rows"][1]["batch"].is_number_integer());
  CHECK(whole["rows"][1]["us"] == 4.0);
  std::istringstream lines(text_in(output_format::jsonl));
  std::string line;
  std::getline(lines, line);
  CHECK(nlohmann::json::parse(line).contains("machine"));
  for (std::size_t i = 0; i < 4; ++i) {
    REQUIRE(std::getline(lines, line));
    CHECK(nlohmann::json::parse(line) == whole["rows"][i]);
  }
  CHECK_THROWS_WITH_AS((void)parse_output_format("xml"), "--format is 'xml', allowed are md, csv, json, jsonl",
                       input_error);
}

TEST_CASE("repeats become medians with their spread, and a report from before stands next to the figures") {
  std::vector<report> runs(3);
  const double figures[] = {12, 10, 11};
  for (std::size_t i = 0; i < 3; ++i) {
    runs[i].add({{"op", std::string("a")}, {"us", figures[i]}, {"gb_s", 100 / figures[i]}});
    if (i > 0) runs[i].add({{"op", std::string("only sometimes")}, {"us", 1.0}, {"gb_s", 1.0}});
  }
  const report merged = median_of(runs);
  REQUIRE(merged.rows().size() == 1);
  CHECK(std::get<double>(merged.rows()[0][1].second) == 11);
  CHECK(merged.rows()[0].back().first == "spread_percent");
  CHECK(std::get<double>(merged.rows()[0].back().second) == doctest::Approx(200.0 / 11));

  std::ostringstream json;
  runs[1].print(json, output_format::json);
  const report next = compared(runs[0], json.str(), "old.json");
  CHECK(std::get<double>(next.rows()[0][3].second) == 10);
  CHECK(std::get<double>(next.rows()[0][4].second) == doctest::Approx(1.2));
  report other;
  other.add({{"op", std::string("b")}, {"us", 1.0}});
  CHECK(std::get<std::string>(compared(other, json.str(), "old.json").rows()[0].back().second).empty());
  for (const char* wrong : {"", "{}", "[1]", "{\"rows\": 3", "{\"row\": []}"}) {
    CAPTURE(wrong);
    CHECK_THROWS_AS((void)compared(other, wrong, "old.json"), input_error);
  }
}

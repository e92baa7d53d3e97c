// SPDX-License-Identifier: Apache-2.0
// What the programs share: text that is safe to show.
#include <doctest/doctest.h>

#include <cstdint>
#include <nlohmann/json.hpp>
#include <random>
#include <string>

#include "tools/common/escape.hpp"
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

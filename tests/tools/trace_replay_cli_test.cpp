// SPDX-License-Identifier: Apache-2.0
// The program itself, run as its users do: options, input, output, exit codes.
#include <doctest/doctest.h>

#include <nlohmann/json.hpp>

#include "support/program_run.hpp"
#include "xml_flaw.hpp"

namespace {

using namespace bifolio::test;
using nlohmann::json;
namespace fs = std::filesystem;

const fs::path scratch = fs::path(BIFOLIO_TEST_SCRATCH_DIR) / "trace_replay_cli";

run_result run(const std::vector<std::string>& arguments) {
  return run_program(BIFOLIO_TRACE_REPLAY_PROGRAM, arguments, scratch);
}

std::string file(const std::string& name, const std::string& text) { return write_file(scratch / name, text).string(); }

constexpr const char* conversation =
    "{\"timestamp\": 0, \"input_length\": 1500, \"output_length\": 3, \"hash_ids\": [0, 1, 2]}\n"
    "{\"timestamp\": 10, \"input_length\": 1100, \"output_length\": 2, \"hash_ids\": [0, 1, 3], \"more\": {\"x\": "
    "[]}}\n"
    "\n"
    "{\"timestamp\": 20.5, \"input_length\": 600, \"output_length\": 9, \"hash_ids\": [7, 18446744073709551615]}\r\n"
    "{\"timestamp\": 30, \"input_length\": 1500, \"output_length\": 3, \"hash_ids\": [0, 1, 2]}";

constexpr const char* table =
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 23:59:59.5000000,374,44\n"
    "2023-11-17T00:00:01.25Z,396,109\r\n"
    "2023-11-17 02:00:02+02:00,10,1";

/// Exit code 2, nothing on stdout, one line on stderr that contains `part`.
void check_refused(const std::vector<std::string>& arguments, const std::string& part) {
  const run_result result = run(arguments);
  CAPTURE(part);
  CAPTURE(result.err);
  CHECK(result.code == 2);
  CHECK(result.out.empty());
  CHECK(result.err.find(part) != std::string::npos);
  CHECK(result.err.rfind("trace_replay: ", 0) == 0);
  CHECK(result.err.find('\n') == result.err.size() - 1);
}

}  // namespace

TEST_CASE("--help lists every option and ends with 0") {
  const run_result result = run({"--help"});
  CHECK(result.code == 0);
  CHECK(result.err.empty());
  for (const char* option : {"FILE",
                             "--format-in",
                             "--steps-in-flight",
                             "--host-us",
                             "--no-progress",
                             "--requests",
                             "--trace-block-size",
                             "--blocks",
                             "--model",
                             "--policy",
                             "--keep-first",
                             "--cache-only",
                             "--full-blocks",
                             "--format",
                             "--plot",
                             "--progress",
                             "--speed",
                             "--block-size",
                             "--no-prefix-caching",
                             "--max-tokens-per-step",
                             "--max-running",
                             "--preemption",
                             "--host-blocks",
                             "--build",
                             "--step-us",
                             "--us-per-token",
                             "--us-per-kv-token",
                             "--us-per-score",
                             "--us-per-swapped-token"}) {
    CAPTURE(option);
    CHECK(result.out.find(option) != std::string::npos);
  }
}

TEST_CASE("a model's layer groups are replayed, and each has its pool and its hits in the report") {
  const std::string trace = file("good.jsonl", conversation);
  const std::string model = file("model.json",
                                 R"({"groups": [{"kind": "full", "num_blocks": 400, "block_size": 16},
                                     {"kind": "window", "num_blocks": 300, "block_size": 16, "window": 512},
                                     {"kind": "state", "num_blocks": 40, "snapshot_interval": 512}]})");
  const run_result result = run({trace, "--model", model, "--format", "json"});
  CAPTURE(result.err);
  REQUIRE(result.code == 0);
  const json said = json::parse(result.out);
  CHECK(said.at("finished") == 4);
  CHECK(said.at("group_0_kind") == "full");
  CHECK(said.at("group_1_blocks") == 300);
  CHECK(said.at("group_2_kind") == "state");
  // Prompts are computed in steps of 512 tokens, so that states are left there: one of them when the second request
  // comes, two of the second's when the fourth does.
  CHECK(said.at("group_2_lookups") == 4);
  CHECK(said.at("group_2_hits") == 2);
  CHECK(said.at("group_0_hits") == 32 + 64);
  CHECK(said.at("group_1_hits") == 32 + 32);
  CHECK(said.at("cached_tokens") == 512 + 1024);
}

TEST_CASE("a model that cannot be used is refused with its file and its group") {
  const std::string trace = file("good.jsonl", conversation);
  const auto refused = [&](const char* text, const char* words) {
    check_refused({trace, "--model", file("bad.json", text)}, words);
  };
  refused("{", "bad.json: it is not valid JSON at byte 2");
  // Neither the depth of a file nor the length of what is in it comes back in a sentence.
  const std::string deep = R"({"groups": [{"kind": )" + std::string(300000, '[') + std::string(300000, ']') + "}]}";
  refused(deep.c_str(), "bad.json: it is JSON nested deeper than 64 levels");
  const std::string wide = R"({"groups": [{"kind": ")" + std::string(5000, 'x') + R"("}]})";
  refused(wide.c_str(), "xxx...; allowed are full, window and state");
  refused("[]", "a model is an object with a list of \"groups\"");
  refused(R"({"groups": [{"num_blocks": 4}]})", "group 0: it is no object with a \"kind\"");
  refused(R"({"groups": [{"kind": "mamba"}]})", "group 0: \"kind\" is \"mamba\"; allowed are full, window and state");
  refused(R"({"groups": [{"kind": "full", "num_blocks": 1e40}]})", "group 0: \"num_blocks\" is 1e+40");
  refused(R"({"groups": [{"kind": "full", "blocks": 4}]})", "group 0: \"blocks\" is no field of a group");
  refused(R"({"groups": [{"kind": "full", "num_blocks": 9}, {"kind": "window", "num_blocks": 9}]})",
          "group 1: window 0 is not between 1 and");
  check_refused({trace, "--model", "/no/such/file.json"}, "/no/such/file.json: the file cannot be read");
  const std::string model = file("model.json", R"({"groups": [{"kind": "full", "num_blocks": 400}]})");
  check_refused({trace, "--model", model, "--cache-only"}, "--model does not go with --cache-only");
  check_refused({trace, "--model", model, "--blocks", "9"}, "leave out --blocks");
}

TEST_CASE("an option that is wrong is refused with the value received and the values allowed") {
  const std::string good = file("good.jsonl", conversation);
  check_refused({good, "--cache-only", "--blocks", "-1"}, "--blocks is '-1', allowed are whole numbers from 0");
  check_refused({good, "--cache-only", "--blocks", "many"}, "--blocks is 'many'");
  check_refused({good, "--cache-only", "--blocks", "99999999999999999999"}, "--blocks is '99999999999999999999'");
  check_refused({good, "--cache-only", "--policy", "fifo"}, "--policy is 'fifo', allowed are lru, priority, s3_fifo");
  check_refused({good, "--cache-only", "--format", "xml"}, "--format is 'xml', allowed are md, csv, json, jsonl");
  check_refused({good, "--cache-only", "--format-in", "xml"},
                "--format-in is 'xml', allowed are auto, azure, mooncake");
  check_refused({good, "--cache-only", "--requests", "-3"}, "--requests is -3, allowed are whole numbers from 0");
  check_refused({good, "--cache-only", "--trace-block-size", "0"}, "--trace-block-size is 0, allowed are");
  check_refused({good, "--cache-only", "--plot", "/no/such/folder/x.svg"}, "/no/such/folder/x.svg: the file cannot be");
  check_refused({good, "--speed", "0"}, "--speed is 0, allowed are numbers from 1e-06");
  check_refused({good, "--step-us", "-1"}, "--step-us is -1, allowed are numbers from 0");
  check_refused({good, "--us-per-token", "nan"}, "--us-per-token is nan");
  check_refused({good, "--block-size", "0"}, "--block-size is 0, allowed are whole numbers from 1");
  check_refused({good, "--max-running", "0"}, "--max-running is 0, allowed are whole numbers from 1");
  check_refused({good, "--max-tokens-per-step", "0"}, "--max-tokens-per-step is 0, allowed are");
  check_refused({good, "--preemption", "hope"}, "--preemption is 'hope', allowed are");
  check_refused({good, "--preemption", "swap"}, "--preemption swap needs --host-blocks of at least 1");
  check_refused({good, "--steps-in-flight", "17"}, "--steps-in-flight is 17, allowed are whole numbers from 1 to 16");
  check_refused({good, "--full-blocks"}, "--full-blocks belongs to --cache-only");
  CHECK(run({good, "--no-such-option"}).code == 2);
  CHECK(run({}).code == 2);
}

TEST_CASE("a trace that cannot be used is refused in one sentence with file and line") {
  const auto refuses = [](const std::string& name, const std::string& text, const std::string& part) {
    const std::string path = file(name, text);
    check_refused({path, "--cache-only"}, path + part);
  };
  const std::string first = R"({"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[1]})"
                            "\n";
  const auto line = [](const std::string& time, const std::string& input, const std::string& output,
                       const std::string& ids) {
    return R"({"timestamp":)" + time + R"(,"input_length":)" + input + R"(,"output_length":)" + output +
           R"(,"hash_ids":)" + ids + "}\n";
  };
  refuses("empty.jsonl", "", ": the trace is empty");
  refuses("blank.jsonl", "\n \n", ": the trace is empty");
  refuses("text.jsonl", "hello\n", ":1: 'hello' is neither a JSON object");
  refuses("cut.jsonl", first + R"({"timestamp":0,"input_l)",
          ":2: '{\"timestamp\":0,\"input_l' is not valid JSON at byte ");
  refuses("list.jsonl", first + "\n[1,2]\n", ":3: '[1,2]' is not a JSON object");
  refuses("missing.jsonl", first + R"({"timestamp":0,"input_length":5,"output_length":1})",
          ":2: the field hash_ids is missing");
  refuses("time.jsonl", line("-1", "5", "1", "[1]"), ":1: timestamp is -1, allowed are");
  refuses("late.jsonl", line("1e300", "5", "1", "[1]"), ":1: timestamp is 1e+300, allowed are");
  refuses("word.jsonl", line("\"now\"", "5", "1", "[1]"), ":1: timestamp is \"now\", allowed are");
  refuses("input0.jsonl", line("0", "0", "1", "[1]"), ":1: input_length is 0, allowed are whole numbers from 1");
  refuses("negative.jsonl", first + line("0", "-5", "1", "[1]"), ":2: input_length is -5, allowed are");
  refuses("fraction.jsonl", line("0", "5.5", "1", "[1]"), ":1: input_length is 5.5, allowed are");
  refuses("large.jsonl", line("0", "5", "99999999999", "[1]"), ":1: output_length is 99999999999, allowed are");
  refuses("huge.jsonl", line("0", "123456789012345678901234567890", "1", "[1]"), ":1: input_length is 1.23456789");
  refuses("ids.jsonl", line("0", "5", "1", "7"), ":1: hash_ids is 7, not a list of integers");
  refuses("id.jsonl", line("0", "5", "1", "[1,-2]"), ":1: hash_ids contains -2, allowed are whole numbers from 0");
  refuses("idx.jsonl", line("0", "5", "1", "[1,18446744073709551616]"), ":1: hash_ids contains 1.8446744073709552e+19");
  refuses("ids2.jsonl", line("0", "5", "1", "[1,null]"), ":1: hash_ids contains null");
  refuses("bytes.jsonl", "{\xff\xfe\n", ":1: ");

  refuses("header.csv", "TIMESTAMP,Context\n", ":1: the header 'TIMESTAMP,Context' has no column ContextTokens");
  const std::string head = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
  refuses("only.csv", head, ": the trace has no requests");
  refuses("columns.csv", head + "2023-11-16 18:15:46,1\n", ":2: 2 columns were found, the header has 3");
  refuses("when.csv", head + "yesterday,1,1\n", ":2: TIMESTAMP is 'yesterday', not a time");
  refuses("month.csv", head + "2023-13-16 18:15:46,1,1\n", ":2: TIMESTAMP is '2023-13-16 18:15:46'");
  refuses("minus.csv", head + "2023-11-16 18:15:46,-1,1\n", ":2: ContextTokens is '-1', allowed are");
  refuses("over.csv", head + "2023-11-16 18:15:46,1,9999999999999999999999\n", ":2: GeneratedTokens is '99999");
  refuses("back.csv", head + "2023-11-16 18:15:46,1,1\n2023-11-16 18:15:45,1,1\n", ":3: TIMESTAMP is before");

  check_refused({(scratch / "absent.jsonl").string(), "--cache-only"}, "absent.jsonl: the file cannot be opened");
  check_refused({scratch.string(), "--cache-only"}, scratch.string());
  check_refused({file("good.csv", table), "--cache-only"}, "the trace has no hash_ids");
  check_refused({file("good.csv", table), "--cache-only", "--format-in", "mooncake"}, "good.csv:1: ");
}

TEST_CASE("a trace whose JSON is nested too deeply or holds a number that no float can hold is refused") {
  const auto line = [](const std::string& time, const std::string& ids) {
    return R"({"timestamp":)" + time + R"(,"input_length":5,"output_length":1,"hash_ids":)" + ids + "}\n";
  };
  const auto nested = [](std::size_t depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  for (const std::size_t depth : {64u, 1000u, 100000u}) {
    CAPTURE(depth);
    check_refused({file("deep.jsonl", line("0", nested(depth))), "--cache-only"},
                  ":1: '{\"timestamp\":0,\"input_length\":5,\"output_length\":1,\"hash_ids\"...' is JSON nested deeper "
                  "than 64 levels");
    check_refused({file("ids.jsonl", line("0", std::string("[").append(nested(depth)).append("]"))), "--cache-only"},
                  "JSON nested deeper than 64 levels");
    check_refused({file("open.jsonl", line("0", std::string(depth, '['))), "--cache-only"}, "nested deeper than 64");
  }
  check_refused({file("deep.jsonl", line("0", nested(63))), "--cache-only"}, ":1: hash_ids contains [[");
  check_refused({file("long.jsonl", line("0", std::string(1, '"').append(100000, 'x').append(1, '"'))), "--cache-only"},
                ":1: hash_ids is \"xxx");
  check_refused(
      {file("number.jsonl", line("1e999", "[]")), "--cache-only"},
      ":1: '{\"timestamp\":1e999,\"input_length\":5,\"output_length\":1,\"hash_...' is JSON with a number out "
      "of range at byte 18: 1e999");
}

TEST_CASE("a request whose tokens do not fit into 32 bits together is refused with its lengths") {
  const std::string path = file("both.jsonl", R"({"timestamp":0,"input_length":1073741824,)"
                                              R"("output_length":1073741824,"hash_ids":[]})");
  for (const char* mode : {"--cache-only", "--no-progress"}) {
    check_refused({path, mode},
                  ":1: input_length and output_length are 1073741824 and 1073741824, allowed are 1073741824 "
                  "tokens together");
  }
  check_refused({file("both.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,1073741824,1\n")},
                ":2: ContextTokens and GeneratedTokens are 1073741824 and 1, allowed are 1073741824 tokens together");
}

TEST_CASE("requests larger than the pool are refused one by one, the last one too, and the replay ends") {
  const std::string small = R"({"timestamp":0,"input_length":100,"output_length":2,"hash_ids":[1]})"
                            "\n";
  const std::string large = R"({"timestamp":9000,"input_length":5000,"output_length":2,"hash_ids":[1,2]})"
                            "\n";
  const auto refused = [&](const std::string& text) {
    const run_result result = run({file("large.jsonl", text), "--blocks", "100", "--format", "json"});
    CAPTURE(result.err);
    REQUIRE(result.code == 0);
    const json said = json::parse(result.out);
    CHECK(said.at("finished").get<int>() + said.at("refused").get<int>() == said.at("requests"));
    return said.at("refused").get<int>();
  };
  CHECK(refused(small + large) == 1);
  CHECK(refused(large) == 1);
  CHECK(refused(large + large) == 2);
  CHECK(refused(small + large + small) == 1);
  CHECK(refused(small) == 0);
  CHECK(refused(small + R"({"timestamp":1,"input_length":1073741824,"output_length":0,"hash_ids":[]})") == 1);
}

TEST_CASE("what cannot be written to stdout ends with 1 and one sentence") {
  const std::string path = file("good.jsonl", conversation);
  const auto check_fails = [&](const std::vector<std::string>& arguments) {
    const run_result result = run_program_on_full_disk(BIFOLIO_TRACE_REPLAY_PROGRAM, arguments, scratch);
    CHECK(result.code == 1);
    CHECK(result.err == "trace_replay: stdout cannot be written: No space left on device\n");
  };
  check_fails({"--help"});
  for (const char* format : {"md", "csv", "json"}) check_fails({path, "--blocks", "500", "--format", format});
}

TEST_CASE("control characters of names and fields are escaped, not sent to the terminal") {
  const std::string evil = "a\x1b[31m\x7f\xc2\x9b\x07\n\xff.jsonl",
                    shown = "a\\x1b[31m\\x7f\\xc2\\x9b\\x07\\x0a\\xff.jsonl";
  check_refused({"/nonexistent/" + evil}, "/nonexistent/" + shown + ": the file cannot be opened");
  check_refused({file("line.jsonl", "\x1b]0;title\x07 \xc2\x9b{}\n")}, "'\\x1b]0;title\\x07 \\xc2\\x9b{}' is neither");
  check_refused({file("field.jsonl", R"({"timestamp":"\u001b[2J\u009b\u007f"})")},
                R"(timestamp is "\u001b[2J\u009b\u007f")");
  check_refused({file("time.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n\x1b[2J,1,1\n")}, R"('\x1b[2J')");
  const run_result unknown = run({"--\x1b[2J"});
  CHECK(unknown.code == 2);
  CHECK(unknown.err.find('\x1b') == std::string::npos);
  for (const char* format : {"md", "csv", "json"}) {
    CAPTURE(format);
    const run_result result = run({file(evil, conversation), "--cache-only", "--format", format});
    REQUIRE(result.code == 0);
    for (const char* raw : {"\x1b", "\x7f", "\xc2\x9b", "\x07"}) CHECK(result.out.find(raw) == std::string::npos);
  }
  const fs::path plot = scratch / "evil.svg";
  CHECK(run({(scratch / evil).string(), "--cache-only", "--plot", plot.string()}).code == 0);
  CHECK(xml_flaw(read_file(plot)) == "");
  CHECK(read_file(plot).find(shown) != std::string::npos);
}

TEST_CASE("a name with the marks of a table stays one cell in Markdown and in CSV") {
  const std::string path = file("a|b,\"c\".jsonl", conversation);
  CHECK(run({path, "--cache-only"}).out.find("| trace | a\\|b,\"c\".jsonl |\n") != std::string::npos);
  CHECK(run({path, "--cache-only", "--format", "csv"}).out.find("cache-only,\"a|b,\"\"c\"\".jsonl\",4,") !=
        std::string::npos);
}

TEST_CASE("the cache alone says hits, lookups, hit rate and evictions as one JSON object") {
  const std::string path = file("good.jsonl", conversation);
  const run_result result = run({path, "--cache-only", "--policy", "lru", "--blocks", "5", "--format", "json"});
  CAPTURE(result.err);
  REQUIRE(result.code == 0);
  CHECK(result.err.empty());
  const json said = json::parse(result.out);
  // [0 1 2] misses; [0 1 3] finds two; [7 …] needs two and evicts the oldest, 2; [0 1 2] finds two and evicts 3.
  CHECK(said.at("lookups") == 11);
  CHECK(said.at("hits") == 4);
  CHECK(said.at("hit_rate").get<double>() == doctest::Approx(4.0 / 11));
  CHECK(said.at("evictions") == 2);
  CHECK(said.at("blocks") == 5);
  CHECK(said.at("requests") == 4);
  CHECK(said.at("timeline").size() == 4);
  CHECK(said.at("timeline").back().at("hits") == 4);
  const json two =
      json::parse(run({path, "--cache-only", "--blocks", "unbounded", "--requests", "2", "--format", "json"}).out);
  CHECK(two.at("requests") == 2);
  CHECK(two.at("lookups") == 6);
  CHECK(two.at("evictions") == 0);
  CHECK(two.at("blocks") == 4);
}

TEST_CASE("a simulation says what happened as one JSON object") {
  for (const std::string& path : {file("good.jsonl", conversation), file("good.csv", table)}) {
    const run_result result = run({path, "--blocks", "500", "--format", "json", "--step-us", "1000"});
    CAPTURE(result.err);
    REQUIRE(result.code == 0);
    CHECK(result.err.empty());
    const json said = json::parse(result.out);
    const bool is_table = path.ends_with(".csv");
    CHECK(said.at("requests") == (is_table ? 3 : 4));
    CHECK(said.at("finished") == said.at("requests"));
    CHECK(said.at("prompt_tokens") == (is_table ? 780 : 4700));
    CHECK(said.at("sampled_tokens") == (is_table ? 154 : 17));
    CHECK(said.at("blocks") == 500);
    for (const char* name :
         {"lookups", "hits", "hit_rate", "evictions", "preemptions", "peak_used_blocks", "simulated_seconds",
          "tokens_per_second", "wall_seconds", "queueing_ms_p50", "queueing_ms_p99", "time_to_first_token_ms_p50",
          "time_to_first_token_ms_p90", "time_to_first_token_ms_p99", "latency_ms_max"}) {
      CAPTURE(name);
      REQUIRE(said.contains(name));
      CHECK(said.at(name).is_number());
    }
    CHECK(said.at("hit_rate").get<double>() <= 1);
    CHECK(said.at("time_to_first_token_ms_p50").get<double>() > 1);
    CHECK(said.at("timeline").size() > 3);
  }
}

TEST_CASE("a simulation gives the same every time") {
  const std::string path = file("good.jsonl", conversation);
  const auto simulated = [&] {
    json said = json::parse(run({path, "--blocks", "120", "--format", "json"}).out);
    said.erase("wall_seconds");
    said.erase("bookkeeping_us_per_step");
    return said;
  };
  CHECK(simulated() == simulated());
}

TEST_CASE("Markdown and CSV hold the same values") {
  const std::string path = file("good.jsonl", conversation);
  const run_result md = run({path, "--cache-only", "--blocks", "5"});
  CHECK(md.code == 0);
  CHECK(md.out.find("| hit rate | 0.363636 |") != std::string::npos);
  const run_result csv = run({path, "--cache-only", "--blocks", "5", "--format", "csv"});
  CHECK(csv.code == 0);
  const std::size_t end = csv.out.find('\n');
  CHECK(csv.out.substr(0, end).find("lookups,hits,hit_rate,evictions") != std::string::npos);
  CHECK(csv.out.find("11,4,0.363636,2") > end);
}

TEST_CASE("the plot is a well-formed SVG document") {
  const std::string path = file("a<b>&\"c\".jsonl", conversation);
  const fs::path plot = scratch / "plot.svg";
  for (const char* mode : {"--cache-only", "--no-progress"}) {
    fs::remove(plot);
    CHECK(run({path, mode, "--blocks", "300", "--plot", plot.string()}).code == 0);
    const std::string svg = read_file(plot);
    CHECK(svg.rfind("<svg", 0) == 0);
    CHECK(xml_flaw(svg) == "");
    CHECK(svg.find("nan") == std::string::npos);
    CHECK(svg.find("hit rate") != std::string::npos);
    CHECK(svg.find("300 blocks") != std::string::npos);
  }
}

TEST_CASE("progress is shown only where it is asked for, and wiped") {
  const std::string path = file("good.jsonl", conversation);
  CHECK(run({path, "--cache-only"}).err.empty());
  std::string many;
  for (int i = 0; i < 200; ++i) many += std::string(conversation) + "\n";
  const run_result result = run({file("many.jsonl", many), "--cache-only", "--progress"});
  CHECK(result.code == 0);
  CHECK(result.err.find(" of 800 requests") != std::string::npos);
  CHECK(result.err.ends_with("\r\x1b[K"));
}

TEST_CASE("the checker of SVG documents notices what is not well-formed") {
  CHECK(xml_flaw("<a b=\"1\"><c/>text</a>") == "");
  for (const char* wrong : {"", "text", "<a>", "<a></b>", "<a b=1/>", "<a b=\"1\" b=\"2\"/>", "<a>&</a>", "<a/><b/>",
                            "<a b=\"1/>", "<a>\x01</a>"}) {
    CAPTURE(wrong);
    CHECK(xml_flaw(wrong) != "");
  }
}

TEST_CASE("a list of pools and policies compares them, as table, curve and page") {
  std::string text;
  for (int i = 0; i < 60; ++i) {
    text += "{\"timestamp\": " + std::to_string(100 * i) +
            ", \"input_length\": 2048, \"output_length\": 20, \"hash_ids\": [" + std::to_string(i % 7) + ", " +
            std::to_string(10 + i % 11) + ", " + std::to_string(100 + i % 5) + ", " + std::to_string(1000 + i) + "]}\n";
  }
  const std::filesystem::path folder = BIFOLIO_TEST_SCRATCH_DIR;
  const std::string trace = write_file(folder / "sweep.jsonl", text).string();
  const std::string html = (folder / "sweep.html").string(), plot = (folder / "sweep.svg").string();
  const run_result cache = run({trace, "--cache-only", "--blocks", "8,16,40,unbounded", "--policy", "lru,s3_fifo",
                                "--format", "jsonl", "--plot", plot, "--html", html});
  CAPTURE(cache.err);
  REQUIRE(cache.code == 0);
  std::istringstream lines(cache.out);
  std::vector<nlohmann::json> rows;
  for (std::string line; std::getline(lines, line);) rows.push_back(nlohmann::json::parse(line));
  REQUIRE(rows.size() == 8);
  CHECK(rows[0]["policy"] == "lru");
  CHECK(rows[7]["policy"] == "s3_fifo");
  CHECK(rows[0]["blocks"] == 8);
  CHECK(rows[3]["hit_rate"].get<double>() > rows[0]["hit_rate"].get<double>());
  CHECK(rows[3]["evictions"] == 0);
  // Each row is what a replay of its own says.
  const run_result alone = run({trace, "--cache-only", "--blocks", "16", "--policy", "s3_fifo", "--format", "json"});
  CHECK(nlohmann::json::parse(alone.out)["hit_rate"] == rows[5]["hit_rate"]);
  CHECK(xml_flaw(read_file(plot)) == "");
  CHECK(read_file(plot).find("prefers-color-scheme:dark") != std::string::npos);
  const std::string page = read_file(html);
  CHECK(page.starts_with("<!doctype html>"));
  CHECK(page.find("s3_fifo") != std::string::npos);
  CHECK(page.find("<script") == std::string::npos);
  CHECK(page.find("src=") == std::string::npos);

  const run_result waits = run({trace, "--blocks", "600,1200", "--plot", plot});
  CAPTURE(waits.err);
  REQUIRE(waits.code == 0);
  CHECK(waits.out.find("first_token_p90_ms") != std::string::npos);
  CHECK(read_file(plot).find("time to first token, ms") != std::string::npos);
  check_refused({trace, "--blocks", "8,,16"}, "--blocks is ''");
  check_refused({trace, "--policy", "lru,mru"}, "--policy is 'mru', allowed are lru, priority, s3_fifo");
}

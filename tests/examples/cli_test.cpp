// SPDX-License-Identifier: Apache-2.0
// The program itself, run as its users do: options, output, exit codes.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/cpu.hpp>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cuda/cuda_llama.hpp"
#include "model_fixtures.hpp"
#include "reference_files.hpp"
#include "support/program_run.hpp"

namespace {

using namespace bifolio::test;
using nlohmann::json;
namespace fs = std::filesystem;

/// On the CPU, whatever devices this machine has, unless the arguments name one.
run_result run(std::vector<std::string> arguments) {
  if (std::find(arguments.begin(), arguments.end(), "--device") == arguments.end()) {
    arguments.insert(arguments.begin(), {"--device", "cpu"});
  }
  return run_program(BIFOLIO_GENERATE_PROGRAM, arguments, scratch_directory() / "cli");
}

std::vector<json> lines(const std::string& text) {
  std::istringstream stream(text);
  std::vector<json> objects;
  for (std::string line; std::getline(stream, line);) objects.push_back(json::parse(line));
  return objects;
}

/// Exit code 2, nothing on stdout, one line on stderr that contains `part`.
void check_refused(const std::vector<std::string>& arguments, const std::string& part) {
  const run_result result = run(arguments);
  CAPTURE(result.err);
  CHECK(result.code == 2);
  CHECK(result.out.empty());
  CHECK(result.err.find(part) != std::string::npos);
  CHECK(result.err.rfind("generate: ") != std::string::npos);
  const std::string last = result.err.substr(result.err.rfind("generate: "));
  CHECK(last.find('\n') == last.size() - 1);
}

std::string tiny() { return tiny_hugging_face("cli_model", 7).string(); }

}  // namespace

TEST_CASE("--help lists every option with its default and ends with 0") {
  const run_result result = run({"--help"});
  CHECK(result.code == 0);
  CHECK(run({"--version"}).out.starts_with("generate of bifolio 0."));
  for (const char* option : {"--prompt TEXT", "--prompt-ids ID,ID,...", "--deterministic", "--json", "--stats"}) {
    CAPTURE(option);
    CHECK(result.out.find(std::string("\n  ") + option) != std::string::npos);
  }
  for (const char* option : {"--model",
                             "--tokenizer",
                             "--prompts-file",
                             "--max-positions",
                             "--temperature",
                             "--top-p",
                             "--seed",
                             "--samples",
                             "--device cpu|cuda[:N]|auto",
                             "--kv-dtype f32|f16|bf16",
                             "--q-dtype f32|f16|bf16",
                             "--layout hnd|nhd|x_split",
                             "--block-size",
                             "--num-blocks",
                             "--cache-mib",
                             "--max-batch-tokens",
                             "--max-batch-seqs",
                             "--prefix-cache on|off",
                             "--host-blocks",
                             "--preemption recompute|swap|automatic",
                             "--threads",
                             "--executor threads|openmp|tbb|serial",
                             "--isa",
                             "--score-file"}) {
    CAPTURE(option);
    const std::size_t at = result.out.find(std::string("\n  ") + option);
    REQUIRE(at != std::string::npos);
    CHECK(result.out.substr(at, result.out.find("\n  --", at + 1) - at).find("(default:") != std::string::npos);
  }
}

TEST_CASE("a model of several layer groups: its pools, a map, codes with scales, a score, and swapped samples") {
  for (const std::string kind : {"gemma3", "gpt_oss", "qwen3_5"}) {
    CAPTURE(kind);
    const std::string model = (fs::path(BIFOLIO_EXAMPLE_FIXTURES) / "models" / kind).string();
    const auto with = [&](const std::vector<std::string>& more) {
      std::vector<std::string> all{"--model",       model, "--prompt-ids",    "0,12,7,8,9,10,11,13,14",
                                   "--temperature", "0",   "--max-positions", "60",
                                   "--block-size",  "4"};
      all.insert(all.end(), more.begin(), more.end());
      const run_result result = run(all);
      CAPTURE(result.err);
      CHECK(result.code == 0);
      return result;
    };
    const run_result plain = with({"--json", "--stats"});
    const bool has_states = kind == "qwen3_5";
    const std::string window = kind == "gemma3" ? "8" : "128";
    const std::string pool = has_states ? " states in " : " blocks of 4 tokens for windows of " + window + " in ";
    CHECK(plain.err.find(pool) != std::string::npos);
    CHECK(plain.err.find(has_states ? "states used at the peak" : "for windows of " + window + "\n") !=
          std::string::npos);
    const std::vector<json> said = lines(plain.out);
    REQUIRE(said.size() == 1);

    const run_result swapped = with(
        {"--json", "--stats", "--samples", "3", "--num-blocks", "19", "--host-blocks", "60", "--preemption", "swap"});
    CHECK(swapped.err.find("blocks swapped out and in     0 and 0") == std::string::npos);
    const std::vector<json> samples = lines(swapped.out);
    REQUIRE(samples.size() == 3);
    for (const json& sample : samples) CHECK(sample == said[0]);

    with({"--map"});
    const fs::path scales = scratch_directory() / ("scales_" + kind + ".json");
    const run_result coded = with({"--json", "--kv-dtype", "i8-head", "--save-scales", scales.string()});
    CHECK(with({"--json", "--kv-dtype", "i8-head", "--scales-file", scales.string()}).out == coded.out);

    const fs::path text = write_file(scratch_directory() / "groups.txt", "In the beginning God created the heaven.");
    const auto score = [&](const char* batch) {
      return run({"--model", model, "--score-file", text.string(), "--block-size", "4", "--max-batch-tokens", batch});
    };
    CHECK(score("3").out == score("256").out);
    CHECK(score("3").out.starts_with("{\"num_ids\": 41"));
  }
}

TEST_CASE("an option that is wrong is refused with the value received and the values allowed") {
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases{
      {{"--max-positions", "0"}, "--max-positions is '0', allowed are whole numbers from 1"},
      {{"--max-positions", "many"}, "--max-positions is 'many'"},
      {{"--max-positions", "99999999999999999999"}, "--max-positions is '99999999999999999999'"},
      {{"--temperature", "-1"}, "--temperature is '-1', allowed are numbers from 0"},
      {{"--temperature", "nan"}, "--temperature is 'nan'"},
      {{"--top-p", "0"}, "--top-p is '0', allowed are numbers above 0 up to 1"},
      {{"--top-p", "1.5"}, "--top-p is '1.5'"},
      {{"--seed", "-3"}, "--seed is '-3'"},
      {{"--samples", "0"}, "--samples is '0'"},
      {{"--device", "gpu"}, "--device is 'gpu', allowed are cpu, cuda, cuda:N and auto"},
      {{"--kv-dtype", "int8"}, "--kv-dtype is 'int8', allowed are f32|f16|bf16"},
      {{"--q-dtype", "fp8"}, "--q-dtype is 'fp8', allowed are f32|f16|bf16"},
      {{"--layout", "dnh"}, "--layout is 'dnh', allowed are hnd|nhd|x_split"},
      {{"--block-size", "0"}, "--block-size is '0'"},
      {{"--num-blocks", "-1"}, "--num-blocks is '-1'"},
      {{"--threads", "x"}, "--threads is 'x'"},
      {{"--executor", "gcc"}, "--executor is 'gcc', allowed are threads|openmp|tbb|serial"},
      {{"--executor", "serial", "--threads", "3"}, "--threads is 3, but --executor serial has one"},
      {{"--isa", "sse"}, "--isa is 'sse', allowed are baseline|avx2|"},
      {{"--model", ""}, "--model is empty"},
      {{"--unknown"}, "--unknown"},
      {{"--prompt"}, "--prompt"},
      {{"--prompt-ids", ""}, "--prompt-ids is '', allowed are whole numbers from 0 on with commas between them"},
      {{"--prompt-ids", "1,,2"}, "--prompt-ids is '1,,2'"},
      {{"--prompt-ids", "1, 2"}, "--prompt-ids is '1, 2'"},
      {{"--prompt-ids", "-1"}, "--prompt-ids is '-1'"},
      {{"--prompt-ids", "3,99999999999"}, "--prompt-ids is '3,99999999999'"},
      {{"stray"}, "stray"},
  };
  for (const auto& [arguments, part] : cases) check_refused(arguments, part);
}

TEST_CASE("what only the model or the machine can refuse is refused as well") {
  check_refused({"--model", tiny(), "--max-positions", "65"}, "--max-positions is 65, allowed are 1 to 64");
  check_refused({"--model", tiny(), "--prompt", std::string(64, 'x')},
                "prompt 1 of 64 bytes has at least 65 tokens, the model takes at most 64");
  check_refused({"--model", tiny(), "--prompt-ids", "1,256"}, "prompt 1 has the token id 256, allowed are 0 to 255");
  std::string many = "1";
  for (int i = 0; i < 64; ++i) many += ",1";
  check_refused({"--model", tiny(), "--prompt-ids", many}, "prompt 1 has 65 tokens, the model takes at most 64");
  check_refused({"--model", tiny(), "--num-blocks", "2"}, "can never fit into the pool of 2 blocks");
  check_refused({"--model", tiny(), "--device", "cuda:99"}, "cuda:99");
  check_refused({"--model", "/nonexistent/model"}, "no such file");
  check_refused({"--model", tiny(), "--prompts-file", "/nonexistent/prompts"}, "no such file");
  check_refused({"--model", tiny(), "--tokenizer", tiny() + "/config.json"}, "config.json");
}

TEST_CASE("--device cuda without a GPU says so, and --device auto then takes the CPU") {
  const std::string problem = generate::find_cuda_problem();
  if (problem.empty()) return;  // there is one: cuda_model_test.cpp
  check_refused({"--model", tiny(), "--device", "cuda"}, "--device is 'cuda', but " + problem);
  const run_result result = run({"--model", tiny(), "--device", "auto", "--json"});
  CHECK(result.code == 0);
  CHECK(result.err.find("on cpu: ") != std::string::npos);
  CHECK(result.out == run({"--model", tiny(), "--json"}).out);
}

TEST_CASE("broken model files end with 2 and one sentence, and print nothing") {
  const fs::path file = scratch_directory() / "broken.bin";
  const std::string whole = tiny_llama2c(7);
  for (const std::size_t length : {std::size_t{0}, std::size_t{20}, std::size_t{28}, whole.size() - 1}) {
    std::ofstream(file, std::ios::binary) << whole.substr(0, length);
    check_refused({"--model", file.string()}, std::to_string(length));
  }
  const fs::path directory =
      tiny_hugging_face("cli_broken", 7, [](json& header) { header.erase("model.norm.weight"); });
  check_refused({"--model", directory.string()}, "\"model.norm.weight\" is missing");
}

TEST_CASE("weights that are not numbers are reported as damaged") {
  std::string bytes = tiny_llama2c(7);
  for (std::size_t i = 28; i < bytes.size(); ++i) bytes[i] = '\xff';
  const fs::path model = scratch_directory() / "nan.bin", tokenizer = scratch_directory() / "nan.tok";
  std::ofstream(model, std::ios::binary) << bytes;
  std::ofstream(tokenizer, std::ios::binary) << tiny_tokenizer(300);
  check_refused({"--model", model.string(), "--tokenizer", tokenizer.string(), "--json"}, "its weights are damaged");
}

TEST_CASE("--json prints one valid object a line for each sequence in order, and nothing else") {
  const std::vector<std::string> prompts{"one", "", "\xff\xfe no text", "{}", "two \"quoted\"\n"};
  std::vector<std::string> arguments{"--model", tiny(), "--json", "--samples", "2", "--temperature", "1.5"};
  for (const std::string& prompt : prompts) arguments.insert(arguments.end(), {"--prompt", prompt});
  const run_result result = run(arguments);
  CHECK(result.code == 0);
  const std::vector<json> objects = lines(result.out);
  REQUIRE(objects.size() == 2 * prompts.size());
  for (std::size_t i = 0; i < objects.size(); ++i) {
    const json& object = objects[i];
    std::vector<std::string> keys;
    for (const auto& item : object.items()) keys.push_back(item.key());
    CHECK(keys == std::vector<std::string>{"ended_by", "output_ids", "prompt", "prompt_ids", "text"});
    const std::string& prompt = prompts[i / 2];
    if (prompt.find('\xff') == std::string::npos) CHECK(object["prompt"] == prompt);
    REQUIRE(object["prompt_ids"].size() == prompt.size() + 1);
    CHECK(object["prompt_ids"][0] == 0);
    CHECK(object["output_ids"].size() > 0);
    const bool stopped = object["output_ids"].back() == 0;
    CHECK(object["ended_by"] == (stopped ? "bos" : "steps"));
    if (!stopped) CHECK(object["prompt_ids"].size() + object["output_ids"].size() == 64 + 1);
    CHECK(object["text"].is_string());
  }
  CHECK(objects[0]["output_ids"] != objects[1]["output_ids"]);
}

TEST_CASE("the same options give the same output; the seed, and nothing else, changes it") {
  const std::vector<std::string> base{"--model", tiny(),     "--json", "--temperature", "1.2", "--prompt",
                                      "a",       "--prompt", "bc"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), base.begin(), base.end());
    const run_result result = run(more);
    CHECK(result.code == 0);
    return result.out;
  };
  const std::string expected = with({});
  CHECK(with({}) == expected);
  CHECK(with({"--threads", "2"}) == expected);
  CHECK(with({"--num-blocks", "6"}) == expected);
  CHECK(with({"--max-batch-tokens", "3"}) == expected);
  CHECK(with({"--seed", "2"}) != expected);
}

TEST_CASE("the table says tokens a second, blocks, bytes, copies and preemptions") {
  const run_result text = run({"--model", tiny(), "--prompt", "ab", "--samples", "3", "--temperature", "1"});
  CHECK(text.code == 0);
  CHECK(text.out.find("--- 1 of 1, sample 2 of 3 ---\nab") != std::string::npos);
  for (const char* row :
       {"prefill", "decode", "tokens/s", "blocks used at the peak", "bytes of KV held", "contiguous, maximum length",
        "contiguous, true length", "copy-on-write copies", "preemptions"}) {
    CAPTURE(row);
    CHECK(text.err.find(row) != std::string::npos);
  }
  CHECK(text.err.find("time in attention") == std::string::npos);
  CHECK(run({"--model", tiny(), "--stats"}).err.find("time in attention") != std::string::npos);
  const run_result quiet = run({"--model", tiny(), "--json"});
  CHECK(quiet.err.find("preemptions") == std::string::npos);
  const run_result told = run({"--model", tiny(), "--json", "--stats"});
  CHECK(told.err.find("preemptions") != std::string::npos);
  CHECK(told.out == quiet.out);
}

TEST_CASE("conversations on one shared prompt take a third of what contiguous caches of their true lengths take") {
  const std::string demo = std::string(BIFOLIO_GENERATE_DEMO) + "/";
  const fs::path log = scratch_directory() / "pool.jsonl";
  const run_result result =
      run({"--shared-prompt", demo + "shared_prompt.txt", "--prompts-file", demo + "conversations.jsonl", "--samples",
           "2", "--num-blocks", "320", "--temperature", "0", "--map", "--events", log.string()});
  CAPTURE(result.err);
  REQUIRE(result.code == 0);
  for (const std::string row : {"maximum", "true"}) {
    const std::size_t at = result.err.find("contiguous, " + row);
    REQUIRE(at != std::string::npos);
    const std::size_t end = result.err.find(" times as much", at);
    CHECK(std::stod(result.err.substr(result.err.rfind(' ', end - 1), end)) >= 3.0);
  }
  // The map at its fullest, then a line for each of the 24 sequences.
  CHECK(result.out.find("device, 320 blocks of 16 tokens") != std::string::npos);
  CHECK(result.out.find("     0 ++++") != std::string::npos);
  std::size_t num_lines = 0;
  for (std::size_t at = 0; (at = result.out.find("\n =  ", at)) != std::string::npos; ++at) ++num_lines;
  CHECK(num_lines == 24);
  // The log begins with the pool and ends with all sequences gone.
  const std::vector<json> events = lines(read_file(log));
  REQUIRE(events.size() > 100);
  CHECK(events.front()["device"] == 320);
  CHECK(events.back()["running"] == "");
  CHECK(events[events.size() / 2]["running"] != "");
}

TEST_CASE("a line of a prompts file may say how long its continuations are") {
  const fs::path file = scratch_directory() / "lengths.jsonl";
  std::ofstream(file) << "{\"prompt\": \"ab\", \"max_new_tokens\": 3}\n\"cd\"\n";
  const std::vector<json> out =
      lines(run({"--json", "--temperature", "0", "--max-positions", "12", "--prompts-file", file.string()}).out);
  REQUIRE(out.size() == 2);
  CHECK(out[0]["output_ids"].size() == 3);
  CHECK(out[1]["output_ids"].size() == 12 - 3 + 1);
  for (const char* line : {"{\"prompt\": 1}", "{\"max_new_tokens\": 1}", "{\"prompt\": \"a\", \"max_new_tokens\": 0}",
                           "{\"prompt\": \"a\", \"other\": 1}", "[]", "7"}) {
    CAPTURE(line);
    std::ofstream(file) << line << '\n';
    check_refused({"--prompts-file", file.string()}, "line 1 is neither a JSON string nor an object with");
  }
}

TEST_CASE("prompts come from files: a line each, or a JSON string each") {
  const fs::path plain = scratch_directory() / "prompts.txt", strings = scratch_directory() / "prompts.jsonl";
  std::ofstream(plain) << "first\r\n\n\"second\"\n";
  std::ofstream(strings) << "\"a\\nb\"\n\"\"\n";
  const std::vector<json> a =
      lines(run({"--model", tiny(), "--json", "--prompts-file", plain.string(), "--prompt", "x"}).out);
  REQUIRE(a.size() == 3);
  CHECK(a[0]["prompt"] == "x");
  CHECK(a[1]["prompt"] == "first");
  CHECK(a[2]["prompt"] == "\"second\"");
  const std::vector<json> b = lines(run({"--model", tiny(), "--json", "--prompts-file", strings.string()}).out);
  REQUIRE(b.size() == 2);
  CHECK(b[0]["prompt"] == "a\nb");
  CHECK(b[1]["prompt"] == "");
  std::ofstream(strings) << "not JSON\n";
  check_refused({"--model", tiny(), "--prompts-file", strings.string()}, "line 1 is neither a JSON string nor");
  std::ofstream(plain) << "\n\n";
  check_refused({"--model", tiny(), "--prompts-file", plain.string()}, "there is no prompt in it");
}

TEST_CASE("--prompt-ids are fed as they are, after the texts") {
  const std::vector<std::string> base{"--model", tiny(), "--json", "--temperature", "0", "--prompt", "ab"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), base.begin(), base.end());
    return lines(run(more).out);
  };
  const std::vector<json> got = with({"--prompt-ids", "0,97,98", "--prompt-ids", "97"});
  REQUIRE(got.size() == 3);
  CHECK(got[1]["prompt_ids"] == json{0, 97, 98});
  CHECK(got[1]["prompt"] == "ab");
  CHECK(got[1] == got[0]);
  CHECK(got[2]["prompt_ids"] == json{97});
  CHECK(lines(run({"--model", tiny(), "--json", "--prompt-ids", "5"}).out).size() == 1);
}

TEST_CASE("--stop ends a text before itself, whatever form it is written in") {
  const std::vector<std::string> common{"--prompt", "Psalm 151\n1 ", "--max-positions", "120", "--samples", "3"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), common.begin(), common.end());
    return run(more);
  };
  const std::vector<json> whole = lines(with({"--json"}).out), cut = lines(with({"--json", "--stop", "LORD"}).out);
  REQUIRE(whole.size() == 3);
  REQUIRE(cut.size() == 3);
  int num_cut = 0;
  for (std::size_t i = 0; i < 3; ++i) {
    CAPTURE(i);
    const std::string text = whole[i]["text"];
    const std::size_t at = text.find("LORD", 12);
    CHECK(cut[i]["text"] == text.substr(0, at));
    if (at == std::string::npos) continue;
    CHECK(cut[i]["ended_by"] == "stopped");
    CHECK(cut[i]["output_ids"].size() < whole[i]["output_ids"].size());
    ++num_cut;
  }
  CHECK(num_cut > 0);
  CHECK(with({"--stop", "LORD"}).out.find("LORD") == std::string::npos);
  CHECK(with({"--lines", "--stop", "LORD"}).out.find("LORD") == std::string::npos);
  check_refused({"--stop", ""}, "--stop is empty");
}

TEST_CASE("--chat puts a prompt into the form of a chat") {
  const std::vector<json> said =
      lines(run({"--json", "--chat", "--model", tiny(), "--prompt", "hello", "--max-positions", "40"}).out);
  REQUIRE(said.size() == 1);
  CHECK(said[0]["prompt"] == "user: hello\nassistant: ");  // no marks among the bytes
}

TEST_CASE("a text that the limit of positions cuts ends with a whole word") {
  // The bundled model writes English words. The same text, cut at every place of some words.
  const auto text_of = [](int max_positions, bool as_json) {
    std::vector<std::string> arguments{
        "--temperature", "0", "--prompt", "Psalm 1", "--max-positions", std::to_string(max_positions)};
    if (as_json) arguments.push_back("--json");
    return run(arguments).out;
  };
  const std::string all = lines(text_of(80, true))[0]["text"].get<std::string>() + " ";
  const std::string head = "--- 1 of 1 ---\n", tail = " ...\n\n";
  int num_dropped = 0;
  for (int positions = 24; positions < 40; ++positions) {
    const std::string shown = text_of(positions, false);
    CAPTURE(shown);
    REQUIRE(shown.starts_with(head));
    REQUIRE(shown.ends_with(tail));
    const std::string text = shown.substr(head.size(), shown.size() - head.size() - tail.size());
    REQUIRE(all.starts_with(text));
    const bool ends_a_word = std::string(" \n").find(all[text.size()]) != std::string::npos;
    CHECK((ends_a_word || std::string(".,;:!?").find(text.back()) != std::string::npos));
    // JSON is what the model said, to the byte.
    const std::string exact = lines(text_of(positions, true))[0]["text"];
    CHECK(all.starts_with(exact));
    CHECK(exact.starts_with(text));
    num_dropped += exact.size() > text.size() ? 1 : 0;
  }
  CHECK(num_dropped > 0);
}

TEST_CASE("what cannot be written to stdout ends with 1 and one sentence") {
  const fs::path text = scratch_directory() / "scored.txt";
  std::ofstream(text) << "some words";
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"--help"},
        {"--model", tiny(), "--device", "cpu"},
        {"--model", tiny(), "--device", "cpu", "--json"},
        {"--model", tiny(), "--device", "cpu", "--score-file", text.string()}}) {
    CAPTURE(arguments.back());
    const run_result result =
        run_program_on_full_disk(BIFOLIO_GENERATE_PROGRAM, arguments, scratch_directory() / "cli");
    CHECK(result.code == 1);
    CHECK(result.err.ends_with("generate: stdout cannot be written: No space left on device\n"));
  }
}

TEST_CASE("a stderr that takes nothing does not end the program") {
  const fs::path folder = scratch_directory() / "cli";
  const std::vector<std::string> arguments{"--model", tiny(), "--device", "cpu", "--prompt", "ab"};
  CHECK(exit_code_of(BIFOLIO_GENERATE_PROGRAM, arguments, folder / "out", "/dev/full") == 0);
  CHECK(read_file(folder / "out").rfind("--- 1 of 1 ---\nab", 0) == 0);
  CHECK(exit_code_of(BIFOLIO_GENERATE_PROGRAM, {"--no-such-option"}, folder / "out", "/dev/full") == 2);
}

TEST_CASE("control characters of paths, tensors and models are escaped, not sent to the terminal") {
  const std::string evil = "a\x1b[31m\x7f\xc2\x9b\x07\n\xff", shown = "a\\x1b[31m\\x7f\\xc2\\x9b\\x07\\x0a\\xff";
  const auto is_clean = [](const std::string& text) {
    for (const char* raw : {"\x1b", "\x7f", "\xc2\x9b", "\x07", "\xff"}) {
      if (text.find(raw) != std::string::npos) return false;
    }
    return true;
  };
  check_refused({"--model", "/nonexistent/" + evil}, "/nonexistent/" + shown + ": there is no such file");
  check_refused({"--" + evil}, shown);
  check_refused({"--top-p", evil}, "--top-p is '" + shown + "'");
  const fs::path directory = tiny_hugging_face(evil, 7);
  const run_result text = run({"--model", directory.string(), "--prompt", evil, "--temperature", "2"});
  REQUIRE(text.code == 0);
  CHECK(text.err.find(shown) != std::string::npos);
  CHECK(is_clean(text.err));
  CHECK(text.out.find("a\\x1b[31m\\x7f\\xc2\\x9b\\x07\n\\xff") != std::string::npos);  // a text keeps its lines
  CHECK(is_clean(text.out));
  const run_result objects = run({"--model", directory.string(), "--prompt", evil, "--temperature", "2", "--json"});
  REQUIRE(objects.code == 0);
  CHECK(is_clean(objects.out));
  CHECK(lines(objects.out)[0]["prompt"].get<std::string>().rfind("a\x1b[31m\x7f\xc2\x9b\x07\n", 0) == 0);
  const fs::path lying = tiny_hugging_face("cli_lying", 7, [&](json& header) {
    header["a\x1b[31m\x7f\xc2\x9b"] = {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {0, 1}}};
  });
  check_refused({"--model", lying.string()}, "tensor \"a\\x1b[31m\\x7f\\xc2\\x9b\" of dtype F32");
}

TEST_CASE("model files with JSON nested too deeply or a number out of range end with 2 and one sentence") {
  const fs::path directory = tiny_hugging_face("cli_deep", 7);
  const auto config = [&](const std::string& member) {
    std::ofstream(directory / "config.json") << "{\"hidden_size\": " << member << "}";
    return std::vector<std::string>{"--model", directory.string()};
  };
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  check_refused(config(deep), "config.json: JSON nested deeper than 64 levels");
  check_refused(config("1e999"), "config.json: JSON with a number out of range at byte 21: 1e999");
  check_refused(config(std::string(60, '[') + std::string(60, ']')), "\"hidden_size\" is [[");
}

TEST_CASE("static scales of a calibration are kept in a file and give the same text from there") {
  const std::string file = (scratch_directory() / "cli_scales.json").string();
  const std::vector<std::string> asked = {"--model",         tiny(), "--prompt",     "a calibration",
                                          "--temperature",   "0",    "--k-dtype",    "e4m3-head",
                                          "--v-dtype",       "i8",   "--block-size", "4",
                                          "--max-positions", "30"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), asked.begin(), asked.end());
    return run(more);
  };
  const run_result saved = with({"--save-scales", file});
  REQUIRE_MESSAGE(saved.code == 0, saved.err);
  std::ifstream from(file);
  const json scales = json::parse(from);
  CHECK(scales["k"]["code"] == "e4m3-head");
  CHECK(scales["k"]["scales"].size() == 2);     // layers
  CHECK(scales["k"]["scales"][1].size() == 2);  // KV heads
  CHECK(scales["v"]["code"] == "i8");
  CHECK(scales["v"]["scales"][1].size() == 1);
  CHECK(with({"--scales-file", file}).out == saved.out);
  // They are used: with others the cache holds other numbers, and the file that comes out is the one that went in.
  json others = scales;
  for (json& layer : others["k"]["scales"]) layer = {0.5, 0.25};
  std::ofstream(file) << others.dump();
  const std::string again = (scratch_directory() / "cli_scales_again.json").string();
  CHECK(with({"--scales-file", file, "--save-scales", again}).code == 0);
  std::ifstream kept(again);
  CHECK(json::parse(kept) == others);

  const auto refused = [&](const char* pointer, const json& value, const std::string& part) {
    json spoilt = scales;
    spoilt[json::json_pointer(pointer)] = value;
    std::ofstream(file) << spoilt.dump();
    const run_result result = with({"--scales-file", file});
    CAPTURE(result.err);
    CHECK(result.code == 2);
    CHECK(result.out.empty());
    CHECK(result.err.find(part) != std::string::npos);
  };
  refused("/k", nullptr, "\"k\" is missing");
  refused("/k", json{{"code", "e4m3-head"}}, "\"k.scales\" is missing, allowed is a list of 2 layers of 2 scales");
  refused("/k/code", "e4m3", "\"k.code\" is \"e4m3\", allowed is 'e4m3-head', which the cache has");
  refused("/k/scales/1", json::array({1.0}), "allowed is a list of 2 layers of 2 scales");
  refused("/v/scales", json::array({json::array({1.0})}), "allowed is a list of 2 layers of 1 scale");
  for (const json& bad : {json(0), json(-1), json(1e31), json(1e-31), json("1"), json(nullptr)}) {
    refused("/v/scales/0/0", bad, "allowed is a list for each layer of numbers from 2^-100 to 2^100");
  }
}

TEST_CASE("a text to be scored that the model cannot take whole is refused, or cut where --max-positions says so") {
  const fs::path text = scratch_directory() / "scored.txt";
  std::ofstream(text) << std::string(100, 'x');
  check_refused({"--model", tiny(), "--score-file", text.string()},
                "scored.txt: the text of 100 bytes has at least 101 tokens, the model takes at most 64; "
                "--max-positions 64 scores its beginning alone");
  const run_result cut = run({"--model", tiny(), "--score-file", text.string(), "--max-positions", "64"});
  CHECK(cut.code == 0);
  CHECK(lines(cut.out)[0]["num_ids"] == 64);
  std::ofstream(text) << std::string(63, 'x');
  const run_result whole = run({"--model", tiny(), "--score-file", text.string()});
  CHECK(whole.code == 0);
  CHECK(whole.out == cut.out);
}

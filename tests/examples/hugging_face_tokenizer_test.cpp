// SPDX-License-Identifier: Apache-2.0
// tokenizer.json files of every kind against the ids of the `tokenizers` package (tokenizer_files/, made by
// tiny_tokenizers.py). frameworks_test.py compares them on many more strings.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "loaded_model.hpp"
#include "pre_tokenizer.hpp"
#include "reference_files.hpp"
#include "support/program_run.hpp"
#include "support/sanitized.hpp"
#include "support/token_ids.hpp"
#include "tokenizer.hpp"
#include "unicode.hpp"

namespace {

using namespace bifolio::test;
using bifolio::token_id;
using generate::split_rule;
using nlohmann::json;
namespace fs = std::filesystem;

constexpr std::int32_t vocab_size = 700;

fs::path folder() { return fs::path(BIFOLIO_EXAMPLE_FIXTURES) / "tokenizer_files"; }

std::unique_ptr<generate::tokenizer> load(const std::string& kind) {
  return generate::load_hugging_face_tokenizer(folder() / (kind + ".json"), vocab_size);
}

std::vector<std::string> parts(split_rule rule, std::string_view text) {
  std::vector<std::string> result;
  for (const std::string_view part : generate::split(rule, text)) result.emplace_back(part);
  return result;
}

}  // namespace

TEST_CASE("a tokenizer.json of every kind gives the ids of the tokenizers package") {
  const json expected = json::parse(std::ifstream(folder() / "expected.json"));
  const json& texts = expected.at("strings");
  REQUIRE(texts.size() >= 200);
  REQUIRE(expected.at("ids").size() == 8);
  for (const auto& item : expected.at("ids").items()) {
    const std::string& kind = item.key();
    const json& rows = item.value();
    CAPTURE(kind);
    const auto tokens = load(kind);
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const auto text = texts[i].get<std::string>();
      CAPTURE(text);
      const std::vector<token_id> ids = tokens->encode(text);
      CHECK(ids == to_ids(rows[i].get<std::vector<std::int32_t>>()));
      CHECK(tokens->min_num_ids(text.size()) <= ids.size());
    }
  }
}

TEST_CASE("byte-level ids decode to the very text, byte by byte, whatever the bytes are") {
  std::string text = " It's 12345 na\u00EFve \u4F60\u597D <mask> ";
  for (int byte = 255; byte > 0; --byte) text += static_cast<char>(byte);
  for (const char* kind : {"gpt2", "llama3"}) {
    CAPTURE(kind);
    const auto tokens = load(kind);
    CHECK(tokens->decode_all(tokens->encode(text)) == text);
  }
  for (const char* kind : {"llama2", "mistral", "gemma"}) {  // the others put "▁" where a text has a space
    CAPTURE(kind);
    const auto tokens = load(kind);
    CHECK(tokens->decode_all(tokens->encode("12 \u4F60\u597D \xff\x80 x")) == "12 \u4F60\u597D \xff\x80 x");
  }
}

TEST_CASE("a text is split as the published expressions split it") {
  using texts = std::vector<std::string>;
  const std::string text = "I'LL say 12345  x\n\n  y'\u017F \u00BDa";
  CHECK(parts(split_rule::gpt2, text) ==
        texts{"I", "'", "LL", " say", " 12345", " ", " x", "\n\n ", " y", "'", "\u017F", " \u00BD", "a"});
  CHECK(parts(split_rule::llama3, text) ==
        texts{"I", "'LL", " say", " ", "123", "45", " ", " x", "\n\n", " ", " y", "'\u017F", " ", "\u00BD", "a"});
  CHECK(parts(split_rule::qwen2, text) == texts{"I", "'LL", " say", " ", "1", "2", "3", "4", "5", " ", " x", "\n\n",
                                                " ", " y", "'\u017F", " ", "\u00BD", "a"});
  CHECK(parts(split_rule::llama3, "{};\r\n\t x  ") == texts{"{};\r\n", "\t", " x", "  "});
  CHECK(parts(split_rule::digits, "a12b") == texts{"a", "1", "2", "b"});
  CHECK_FALSE(generate::rule_of_pattern(R"(\w+)"));
}

TEST_CASE("normalization form C composes, orders marks and leaves bytes alone that are no text") {
  CHECK(generate::to_nfc("cafe\u0301") == "caf\u00E9");
  CHECK(generate::to_nfc("a\u0301\u0323") == "\u1EA1\u0301");
  CHECK(generate::to_nfc("\u1112\u1161\u11AB") == "\uD55C");
  CHECK(generate::to_nfc("\u212B\u2126") == "\u00C5\u03A9");
  CHECK(generate::to_nfc("\u0958") == "\u0915\u093C");  // excluded from composition
  CHECK(generate::to_nfc("e\xff\u0301\xcc") == "e\xff\u0301\xcc");
}

TEST_CASE("megabytes of spaces are encoded in far fewer steps than the square of their number") {
  // Minutes for as many steps as their square.
  constexpr std::size_t num_spaces = (std::size_t{1} << 22) / sanitized_stride(16);
  for (const char* kind : {"llama2", "tinyllama"}) {  // which replace spaces before and while they split
    CAPTURE(kind);
    const auto tokens = load(kind);
    const std::string text(num_spaces, ' ');
    const std::vector<token_id> ids = tokens->encode(text);
    CHECK(ids.size() >= tokens->min_num_ids(num_spaces));
    CHECK(tokens->decode_all(ids).ends_with(text.substr(1)));
  }
}

TEST_CASE("a text of characters without a token, where nothing stands for the unknown, has no ids and may have none") {
  json file = json::parse(std::ifstream(folder() / "llama2.json"));
  file["model"]["vocab"] = {{"<unk>", 0}, {"a", 1}};
  file["model"]["merges"] = json::array();
  file["model"].erase("unk_token");
  for (const char* key : {"added_tokens", "normalizer", "pre_tokenizer", "decoder", "post_processor"}) file.erase(key);
  file["added_tokens"] = json::array();
  const fs::path path = scratch_directory() / "no_unknown.json";
  write_file(path, file.dump());
  const auto tokens = generate::load_hugging_face_tokenizer(path, 2);
  CHECK(tokens->encode("\u00E9\u00E8").empty());
  CHECK(tokens->min_num_ids(4) == 0);
}

TEST_CASE("the tokenizer.json next to a checkpoint is its tokenizer, unless another is named") {
  const fs::path directory = scratch_directory() / "with_tokenizer";
  fs::create_directories(directory);
  const fs::path model = fs::path(BIFOLIO_EXAMPLE_FIXTURES) / "models" / "llama3";
  for (const char* file : {"config.json", "model.safetensors"}) {
    fs::copy_file(model / file, directory / file, fs::copy_options::overwrite_existing);
  }
  // The model has 256 tokens: a tokenizer of single bytes.
  json bytes = json::parse(std::ifstream(folder() / "gpt2.json"));
  json vocab = json::object();
  for (const auto& [piece, id] : bytes["model"]["vocab"].items()) {
    if (id > 0 && id <= 256) vocab[piece] = id.get<int>() - 1;
  }
  REQUIRE(vocab.size() == 256);
  bytes["model"]["vocab"] = vocab;
  bytes["model"]["merges"] = json::array();
  bytes["added_tokens"] = json::array();
  write_file(directory / "tokenizer.json", bytes.dump());
  const auto loaded = generate::load_model(directory, {});
  CHECK(loaded.tokens->encode("ab") == std::vector<token_id>{token_id{64}, token_id{65}});
  CHECK(loaded.tokens->encode("").empty());
  CHECK(loaded.tokens->min_num_ids(0) == 0);
  CHECK(generate::load_model(model, directory / "tokenizer.json").tokens->encode("ab").size() == 2);
  CHECK(generate::load_model(model, {}).tokens->encode("ab").size() == 3);  // plain bytes after the first id
}

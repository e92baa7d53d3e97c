// SPDX-License-Identifier: Apache-2.0
// One model in its many files: shards, other dtypes, a classifier of its own. All give the same logits.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "generation_fixture.hpp"
#include "input_error.hpp"
#include "model_fixtures.hpp"
#include "reference_files.hpp"
#include "support/program_run.hpp"

namespace {

using namespace bifolio::test;
using bifolio::token_id;
using nlohmann::json;
namespace fs = std::filesystem;

struct tensors {
  json header;
  std::string data;
};

tensors read_tensors(const fs::path& path) {
  const std::string bytes = read_file(path);
  std::uint64_t size = 0;
  std::memcpy(&size, bytes.data(), sizeof(size));
  return {json::parse(bytes.substr(sizeof(size), size)), bytes.substr(sizeof(size) + size)};
}

void write_tensors(const fs::path& path, const tensors& what) {
  const std::string text = what.header.dump();
  const std::uint64_t size = text.size();
  std::string prefix(sizeof(size), '\0');
  std::memcpy(prefix.data(), &size, sizeof(size));
  std::ofstream(path, std::ios::binary) << prefix << text << what.data;
}

/// The tensors that `keep` names, in another dtype. Every weight of the fixture is exact in all three.
template <class Storage, class Keep>
tensors converted(const tensors& from, const char* type_name, Keep keep) {
  tensors to{json::object(), {}};
  for (const auto& [name, entry] : from.header.items()) {
    if (name == "__metadata__" || !keep(name)) continue;
    const std::vector<std::size_t> range = entry.at("data_offsets");
    const std::size_t begin = to.data.size();
    for (std::size_t at = range[0]; at < range[1]; at += 2) {
      bifolio::bfloat16 narrow;
      std::memcpy(&narrow.bits, from.data.data() + at, 2);
      const Storage value = bifolio::from_float<Storage>(bifolio::to_float(narrow));
      to.data.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
    to.header[name] = {{"dtype", type_name}, {"shape", entry.at("shape")}, {"data_offsets", {begin, to.data.size()}}};
  }
  return to;
}

std::vector<std::vector<float>> logits_of(const generate::checkpoint& model) {
  std::vector<token_id> ids;
  for (std::int32_t i = 0; i < 30; ++i) ids.push_back(token_id{i * 37 % 256});
  return paged_logits(model, ids, 8);
}

constexpr auto everything = [](const std::string&) { return true; };

}  // namespace

TEST_CASE("a checkpoint in bf16, f16 or f32, as a directory or named by its file, is the same model") {
  const fs::path directory = tiny_hugging_face("dtypes", 9);
  const auto expected = logits_of(generate::load_hugging_face(directory));
  CHECK(logits_of(generate::load_hugging_face(directory / "model.safetensors")) == expected);
  const tensors original = read_tensors(directory / "model.safetensors");
  write_tensors(directory / "model.safetensors", converted<bifolio::float16>(original, "F16", everything));
  CHECK(logits_of(generate::load_hugging_face(directory)) == expected);
  write_tensors(directory / "model.safetensors", converted<float>(original, "F32", everything));
  CHECK(logits_of(generate::load_hugging_face(directory)) == expected);
}

TEST_CASE("a checkpoint in two shards of different dtypes is the same model, and a lost shard is missed") {
  const fs::path directory = tiny_hugging_face("shards", 9);
  const auto expected = logits_of(generate::load_hugging_face(directory));
  const tensors original = read_tensors(directory / "model.safetensors");
  const auto is_first = [](const std::string& name) { return name.find("layers.1") == std::string::npos; };
  write_tensors(directory / "a.safetensors", converted<bifolio::bfloat16>(original, "BF16", is_first));
  write_tensors(directory / "b.safetensors",
                converted<float>(original, "F32", [&](const std::string& name) { return !is_first(name); }));
  fs::remove(directory / "model.safetensors");
  json index = {{"weight_map", json::object()}};
  for (const auto& [name, entry] : original.header.items()) {
    if (name != "__metadata__") index["weight_map"][name] = is_first(name) ? "a.safetensors" : "b.safetensors";
  }
  std::ofstream(directory / "model.safetensors.index.json") << index.dump();
  CHECK(logits_of(generate::load_hugging_face(directory)) == expected);
  fs::remove(directory / "b.safetensors");
  CHECK_THROWS_WITH_AS(static_cast<void>(generate::load_hugging_face(directory)), doctest::Contains("b.safetensors"),
                       generate::input_error);
  std::ofstream(directory / "model.safetensors.index.json") << R"({"weight_map": {"x": "../a.safetensors"}})";
  CHECK_THROWS_AS(static_cast<void>(generate::load_hugging_face(directory)), generate::input_error);
}

TEST_CASE("a classifier of its own that repeats the embedding gives the tied model's logits, and another does not") {
  const std::string tied = tiny_llama2c(4);
  std::string untied = tied;
  constexpr std::size_t header = 28, table = 300 * 16 * sizeof(float);
  const std::int32_t vocab = -300;
  std::memcpy(untied.data() + 5 * sizeof(vocab), &vocab, sizeof(vocab));
  untied += tied.substr(header, table);
  const auto load = [](const std::string& bytes) {
    const fs::path path = scratch_directory() / "classifier.bin";
    std::ofstream(path, std::ios::binary) << bytes;
    return logits_of(generate::load_llama2c(path));
  };
  CHECK(load(untied) == load(tied));
  untied.replace(untied.size() - table, 4, std::string("\0\0\x80\x3f", 4));  // 1.0f
  CHECK(load(untied) != load(tied));
}

TEST_CASE("every id of a list in eos_token_id ends a sequence, and what is null is absent") {
  const fs::path directory = tiny_hugging_face("stops", 9);
  const json good = json::parse(std::ifstream(directory / "config.json"));
  const auto load = [&](const json& ids) {
    json config = good;
    config["eos_token_id"] = ids;
    std::ofstream(directory / "config.json") << config.dump();
    return generate::load_hugging_face(directory);
  };
  const auto stops = [&](const json& ids) { return load(ids).config.eos_ids; };
  using ids = std::vector<std::int32_t>;
  CHECK(stops(7) == ids{7});
  CHECK(stops({7}) == ids{7});
  CHECK(stops({7, 9, 7}) == ids{7, 9, 7});
  CHECK(stops({nullptr, 9}) == ids{9});
  CHECK(stops(nullptr).empty());  // as in transformers: nothing ends a text
  CHECK(stops(json::array()).empty());
  CHECK(stops({nullptr}).empty());
  json without = good;
  without.erase("eos_token_id");
  std::ofstream(directory / "config.json") << without.dump();
  CHECK(generate::load_hugging_face(directory).config.eos_ids == ids{2});  // the architecture's default

  // Greedy text of a model without end; then each of its ids in turn ends it, alone or listed after others.
  generation_setup setup;
  setup.max_positions = 40;
  const std::vector<std::vector<token_id>> prompt{{token_id{0}, token_id{97}}};
  const auto continued = [&](const json& list) { return continue_prompts(load(list), prompt, setup); };
  const generation_result endless = continued(255);
  REQUIRE(endless.ended_by[0] == "steps");
  const std::vector<token_id>& all = endless.outputs[0];
  const token_id stop = all[all.size() / 2];
  const std::vector<token_id> expected(all.begin(), std::find(all.begin(), all.end(), stop) + 1);
  for (const json& list : {json(to_index(stop)), json({255, to_index(stop)}), json({to_index(stop), 255})}) {
    CAPTURE(list.dump());
    const generation_result ended = continued(list);
    CHECK(ended.outputs[0] == expected);
    CHECK(ended.ended_by[0] == "eos");
  }
  json config = good;
  config["bos_token_id"] = to_index(stop);
  config["eos_token_id"] = {255, to_index(stop)};
  std::ofstream(directory / "config.json") << config.dump();
  CHECK(continue_prompts(generate::load_hugging_face(directory), prompt, setup).ended_by[0] == "bos");
}

TEST_CASE("rotary positions of the type default are rotary positions without scaling") {
  const fs::path directory = tiny_hugging_face("rope_default", 9);
  const json good = json::parse(std::ifstream(directory / "config.json"));
  const auto expected = logits_of(generate::load_hugging_face(directory));
  for (const json& scaling : {json({{"rope_type", "default"}}), json({{"type", "default"}}), json(nullptr)}) {
    CAPTURE(scaling.dump());
    json config = good;
    config["rope_scaling"] = scaling;
    std::ofstream(directory / "config.json") << config.dump();
    CHECK(logits_of(generate::load_hugging_face(directory)) == expected);
  }
}

// SPDX-License-Identifier: Apache-2.0
// Files that are not what they claim: each is refused by one sentence, with an input_error, and never crashes.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "checkpoint.hpp"
#include "generation_fixture.hpp"
#include "input_error.hpp"
#include "loaded_model.hpp"
#include "model_fixtures.hpp"
#include "reference_files.hpp"
#include "support/program_run.hpp"
#include "tokenizer.hpp"

namespace {

using namespace bifolio::test;
namespace fs = std::filesystem;

/// The sentence with which `load` refuses; a failed check when it does not, or when it is not one line.
std::string refusal(const std::function<void()>& load) {
  try {
    load();
  } catch (const generate::input_error& problem) {
    const std::string sentence = problem.what();
    CHECK(sentence.size() > 20);
    CHECK(sentence.size() < 1000);
    CHECK(sentence.find('\n') == std::string::npos);
    return sentence;
  }
  FAIL_CHECK("it was accepted");
  return {};
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

fs::path write(const std::string& name, const std::string& bytes) {
  return write_file(scratch_directory() / name, bytes);
}

std::string with_header(std::array<std::int32_t, 7> header, std::size_t more_bytes) {
  std::string bytes(sizeof(header) + more_bytes, '\0');
  std::memcpy(bytes.data(), header.data(), sizeof(header));
  return bytes;
}

void write_config(const fs::path& directory, const nlohmann::json& config) {
  std::ofstream(directory / "config.json") << config.dump();
}

}  // namespace

TEST_CASE("a llama2.c file cut at any length is refused, and so is one with a byte too many") {
  const std::string whole = tiny_llama2c(7);
  const auto load = [](const std::string& bytes) {
    return refusal([&] { static_cast<void>(generate::load_llama2c(write("cut.bin", bytes))); });
  };
  static_cast<void>(generate::load_llama2c(write("whole.bin", whole)));
  for (std::size_t length = 0; length < whole.size(); length += length < 64 ? 1 : 997) {
    CAPTURE(length);
    const std::string sentence = load(whole.substr(0, length));
    CHECK(contains(sentence, std::to_string(length)));  // the real size is named
  }
  CHECK(contains(load(whole + '\0'), std::to_string(whole.size() + 1)));
}

TEST_CASE("a llama2.c header with impossible, negative or overflowing sizes is refused by name") {
  using header = std::array<std::int32_t, 7>;
  const header good{16, 32, 2, 4, 2, 300, 32};
  const auto load = [](const header& h) {
    return refusal([&] { static_cast<void>(generate::load_llama2c(write("header.bin", with_header(h, 4096)))); });
  };
  for (std::size_t field = 0; field < good.size(); ++field) {
    for (const std::int32_t value : {0, -1, INT32_MIN, INT32_MIN + 1, INT32_MAX, 1 << 30, 65536, 3}) {
      header h = good;
      h[field] = value;
      CAPTURE(field);
      CAPTURE(value);
      static_cast<void>(load(h));
    }
  }
  CHECK(contains(load({1 << 20, 1 << 20, 4096, 1 << 10, 1 << 10, 1 << 24, 1 << 26}), "needs"));
  CHECK(contains(load({0x7fffffff, 0x7fffffff, 0x7fffffff, 1, 1, 0x7fffffff, 0x7fffffff}), "allowed are 1 to"));
  CHECK(contains(load({16, 32, 2, 0, 2, 300, 32}), "query heads is 0"));
  CHECK(contains(load({16, 32, 2, 3, 1, 300, 32}), "not a multiple"));
  CHECK(contains(load({16, 32, 2, 16, 1, 300, 32}), "even"));
  CHECK(contains(load({16, 32, 2, 4, 3, 300, 32}), "shared evenly"));
}

TEST_CASE("a negative vocabulary in a llama2.c header means a classifier of its own, at the end of the file") {
  const auto tied = generate::load_llama2c(write("tied.bin", tiny_llama2c(7)));
  CHECK(tied.config.tied_classifier);
  const auto untied = generate::load_llama2c(write("untied.bin", tiny_llama2c(7, true)));
  CHECK_FALSE(untied.config.tied_classifier);
  CHECK(untied.config.vocab_size == tied.config.vocab_size);
  CHECK(untied.classifier.num_outputs() == untied.config.vocab_size);
}

TEST_CASE("random bytes are refused as a llama2.c model, a safetensors file and a tokenizer") {
  constexpr std::uint64_t seed = 20;
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 200; ++round) {
    std::string bytes(random() % 2000, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    static_cast<void>(refusal([&] { static_cast<void>(generate::load_llama2c(write("random.bin", bytes))); }));
    static_cast<void>(
        refusal([&] { static_cast<void>(generate::load_bpe_tokenizer(write("random.tok", bytes), 300)); }));
    const fs::path directory = tiny_hugging_face("random", 7);
    std::ofstream(directory / "model.safetensors", std::ios::binary) << bytes;
    static_cast<void>(refusal([&] { static_cast<void>(generate::load_hugging_face(directory)); }));
  }
}

TEST_CASE("a model file with a few bytes changed runs, or is refused; it does nothing else") {
  constexpr std::uint64_t seed = 21;
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  const fs::path directory = tiny_hugging_face("changed", 7);
  const std::string tensors = read_file(directory / "model.safetensors"), floats = tiny_llama2c(7);
  const auto changed = [&](std::string bytes) {
    const std::size_t within = random() % 2 == 0 ? std::min<std::size_t>(bytes.size(), 64) : bytes.size();
    for (int i = 0; i < 3; ++i) bytes[random() % within] = static_cast<char>(random());
    return bytes;
  };
  int num_run = 0, num_refused = 0;
  const auto try_it = [&](const auto& load) {
    try {
      const generate::checkpoint model = load();
      generation_setup setup;
      setup.max_positions = std::min(8, model.config.max_positions);
      static_cast<void>(continue_prompts(model, {{bifolio::token_id{1}, bifolio::token_id{2}}}, setup));
      ++num_run;
    } catch (const generate::input_error&) {
      ++num_refused;
    }
  };
  for (int round = 0; round < 200; ++round) {
    std::ofstream(directory / "model.safetensors", std::ios::binary) << changed(tensors);
    try_it([&] { return generate::load_hugging_face(directory); });
    try_it([&] { return generate::load_llama2c(write("changed.bin", changed(floats))); });
  }
  CHECK(num_run > 0);
  CHECK(num_refused > 0);
}

TEST_CASE("a tokenizer file cut anywhere, with a negative length, or of another model is refused") {
  const std::string whole = tiny_tokenizer(300);
  const auto load = [](const std::string& bytes, std::int32_t vocab_size) {
    return refusal([&] { static_cast<void>(generate::load_bpe_tokenizer(write("cut.tok", bytes), vocab_size)); });
  };
  static_cast<void>(generate::load_bpe_tokenizer(write("whole.tok", whole), 300));
  for (std::size_t length = 0; length < whole.size(); length += 7) {
    CAPTURE(length);
    static_cast<void>(load(whole.substr(0, length), 300));
  }
  CHECK(contains(load(whole, 299), "another model"));
  CHECK(contains(load(whole, 301), "300 of the model's 301"));
  CHECK(contains(load(whole, 100), "no room"));
  for (const std::int32_t length : {-1, INT32_MIN, INT32_MAX, 1 << 20}) {
    std::string bytes = whole;
    std::memcpy(bytes.data() + 8, &length, sizeof(length));  // of token 0
    CHECK(contains(load(bytes, 300), "token 0 claims"));
  }
}

TEST_CASE("a safetensors file cut anywhere is refused") {
  const fs::path directory = tiny_hugging_face("cut_tensors", 7);
  static_cast<void>(generate::load_hugging_face(directory));
  const std::string whole = read_file(directory / "model.safetensors");
  for (std::size_t length = 0; length < whole.size(); length += length < 3000 ? 61 : 499) {
    CAPTURE(length);
    std::ofstream(directory / "model.safetensors", std::ios::binary) << whole.substr(0, length);
    static_cast<void>(refusal([&] { static_cast<void>(generate::load_hugging_face(directory)); }));
  }
}

TEST_CASE("a safetensors header that lies about a tensor is refused by the tensor's name") {
  using nlohmann::json;
  const std::string name = "model.layers.1.mlp.down_proj.weight";
  const auto load = [&](const std::function<void(json&)>& change) {
    const fs::path directory = tiny_hugging_face("lying", 7, change);
    return refusal([&] { static_cast<void>(generate::load_hugging_face(directory)); });
  };
  CHECK(contains(load([&](json& h) { h.erase(name); }), "\"" + name + "\" is missing"));
  CHECK(contains(load([&](json& h) { h[name]["dtype"] = "I64"; }), "dtype I64, allowed are F32, F16 and BF16"));
  CHECK(contains(load([&](json& h) { h[name]["dtype"] = "F32"; }), "which is not its size"));
  CHECK(contains(load([&](json& h) { h[name].erase("dtype"); }), "has no dtype"));
  CHECK(contains(load([&](json& h) { h[name]["dtype"] = 5; }), "has no dtype"));
  CHECK(contains(load([&](json& h) { h[name] = "text"; }), name));
  CHECK(contains(load([&](json& h) { h[name]["shape"] = {32, 16}; }), "has shape [32, 16]"));
  CHECK(contains(load([&](json& h) { h[name]["shape"] = {-16, -32}; }), "has -16 in \"shape\""));
  CHECK(contains(load([&](json& h) { h[name]["shape"] = {1ull << 62, 1ull << 62}; }), "which is not its size"));
  CHECK(contains(load([&](json& h) { h[name]["shape"] = {1e300}; }), "in \"shape\""));
  CHECK(contains(load([&](json& h) { h[name]["shape"] = {UINT64_MAX, 2}; }), "in \"shape\""));
  CHECK(contains(load([&](json& h) { h[name]["shape"] = "16"; }), "no usable list \"shape\""));
  CHECK(contains(load([&](json& h) { h[name].erase("data_offsets"); }), "no usable list \"data_offsets\""));
  CHECK(contains(load([&](json& h) { h[name]["data_offsets"] = {1024, 0}; }), "is at bytes [1024, 0]"));
  CHECK(contains(load([&](json& h) { h[name]["data_offsets"] = {1ull << 60, (1ull << 60) + 1024}; }), "is at bytes"));
  CHECK(contains(load([&](json& h) { h[name]["data_offsets"] = {0}; }), "is at bytes [0]"));
  CHECK(contains(load([](json& h) { h = json::array(); }), "not a JSON object"));
}

TEST_CASE("safetensors whose tensors share bytes are refused by the names of two") {
  using nlohmann::json;
  const std::string first = "model.layers.0.mlp.down_proj.weight", second = "model.layers.1.mlp.down_proj.weight";
  const auto load = [&](const std::function<void(json&)>& change) {
    const fs::path directory = tiny_hugging_face("sharing", 7, change);
    return refusal([&] { static_cast<void>(generate::load_hugging_face(directory)); });
  };
  const auto check_both_named = [&](const std::string& sentence) {
    CHECK(contains(sentence, first));
    CHECK(contains(sentence, second));
    CHECK(contains(sentence, "share bytes"));
  };
  check_both_named(load([&](json& h) { h[second]["data_offsets"] = h[first]["data_offsets"]; }));
  check_both_named(load([&](json& h) {
    for (json& offset : h[second]["data_offsets"] = h[first]["data_offsets"]) offset = offset.get<int>() + 2;
  }));
  // A tensor that nothing loads, of a dtype that nothing reads, may not be there either.
  CHECK(contains(load([&](json& h) {
                   h["x"] = {{"dtype", "I64"}, {"shape", {1}}, {"data_offsets", {8, 16}}};
                 }),
                 "\"x\""));
  CHECK(contains(load([&](json& h) {
                   h["x"] = {{"dtype", "I64"}, {"shape", {1}}, {"data_offsets", {0, 1ull << 40}}};
                 }),
                 "is at bytes"));
  // An empty one shares none.
  const fs::path directory = tiny_hugging_face("sharing", 7, [](json& h) {
    h["x"] = {{"dtype", "F32"}, {"shape", {0}}, {"data_offsets", {8, 8}}};
  });
  static_cast<void>(generate::load_hugging_face(directory));
}

TEST_CASE("a safetensors header that is not JSON, or longer than the file, is refused") {
  const auto load = [](const std::string& bytes) {
    const fs::path directory = tiny_hugging_face("not_json", 7);
    std::ofstream(directory / "model.safetensors", std::ios::binary) << bytes;
    return refusal([&] { static_cast<void>(generate::load_hugging_face(directory)); });
  };
  const auto sized = [](std::uint64_t size, const std::string& text) {
    std::string bytes(sizeof(size), '\0');
    std::memcpy(bytes.data(), &size, sizeof(size));
    return bytes + text;
  };
  CHECK(contains(load(sized(3, "{{{")), "not valid JSON at byte"));
  CHECK(contains(load(sized(4, "\xff\xfe{}")), "not valid JSON at byte"));
  CHECK(contains(load(sized(100, "{}")), "not a safetensors file"));
  CHECK(contains(load(sized(UINT64_MAX, "{}")), "not a safetensors file"));
  CHECK(contains(load(sized(0, "")), "not valid JSON"));
  CHECK(contains(load(sized(2, "{}")), "is missing"));
  CHECK(contains(load(sized(200000, std::string(200000, '['))), "its header is JSON nested deeper than 64 levels"));
  const std::string deep = R"({"t":{"dtype":"F32","shape":[)" + std::string(100000, '[') + std::string(100000, ']') +
                           R"(],"data_offsets":[0,0]}})";
  CHECK(contains(load(sized(deep.size(), deep)), "its header is JSON nested deeper than 64 levels"));
  const std::string large = R"({"t":{"dtype":"F32","shape":[1e999],"data_offsets":[0,0]}})";
  CHECK(contains(load(sized(large.size(), large)), "its header is JSON with a number out of range at byte 34: 1e999"));
}

TEST_CASE("a config.json that is broken, incomplete or of another architecture is refused by the setting's name") {
  using nlohmann::json;
  const fs::path directory = tiny_hugging_face("config", 7);
  const json good = json::parse(std::ifstream(directory / "config.json"));
  const auto load = [&](const std::function<void(json&)>& change) {
    json config = good;
    change(config);
    write_config(directory, config);
    return refusal([&] { static_cast<void>(generate::load_hugging_face(directory)); });
  };
  for (const char* key : {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
                          "max_position_embeddings"}) {
    CAPTURE(key);
    CHECK(contains(load([&](json& c) { c.erase(key); }), std::string("\"") + key + "\" is missing"));
    CHECK(contains(load([&](json& c) { c[key] = "many"; }), key));
    CHECK(contains(load([&](json& c) { c[key] = 1.5; }), key));
    CHECK(contains(load([&](json& c) { c[key] = 1ull << 40; }), key));
    CHECK(contains(load([&](json& c) { c[key] = UINT64_MAX; }), key));
    static_cast<void>(load([&](json& c) { c[key] = 0; }));
    static_cast<void>(load([&](json& c) { c[key] = -8; }));
    static_cast<void>(load([&](json& c) { c[key] = INT32_MAX; }));
    static_cast<void>(load([&](json& c) { c[key] = INT32_MIN; }));
  }
  CHECK(contains(load([](json& c) { c["model_type"] = "gpt2"; }), "\"model_type\" is \"gpt2\""));
  CHECK(contains(load([](json& c) { c["model_type"] = "gemma3"; }),
                 "allowed is one of \"llama\", \"mistral\", \"qwen2\", \"qwen3\", \"gemma2\", \"gemma3_text\", "
                 "\"gpt_oss\", \"qwen3_5_text\""));
  const auto scaled = [&](const json& scaling) { return load([&](json& c) { c["rope_scaling"] = scaling; }); };
  CHECK(contains(scaled({{"type", "linear"}}), "\"rope_scaling.factor\" is missing"));
  CHECK(contains(scaled({{"type", "linear"}, {"factor", -2}}), "the factor of the rotary scaling is -2"));
  CHECK(contains(scaled({{"rope_type", "longrope"}, {"factor", 4.0}}),
                 R"("rope_scaling.rope_type" is "longrope", allowed is "default", "linear", "llama3" or "yarn")"));
  const auto yarn = [&](const char* key, const json& value) {
    json scaling{{"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32}};
    scaling[key] = value;
    return scaled(scaling);
  };
  CHECK(contains(yarn("original_max_position_embeddings", nullptr), "original_max_position_embeddings\" is missing"));
  CHECK(contains(yarn("original_max_position_embeddings", 0), "positions before the rotary scaling is 0"));
  CHECK(contains(yarn("beta_fast", 0), "beta_fast of the rotary scaling is 0"));
  CHECK(contains(yarn("mscale", 1.0), "mscale"));
  const json llama3{{"rope_type", "llama3"},
                    {"factor", 8.0},
                    {"low_freq_factor", 1.0},
                    {"high_freq_factor", 4.0},
                    {"original_max_position_embeddings", 8192}};
  for (const auto& item : llama3.items()) {
    const std::string& key = item.key();
    CAPTURE(key);
    if (key == "rope_type") continue;
    json broken = llama3;
    broken.erase(key);
    CHECK(contains(scaled(broken), "\"rope_scaling." + key + "\" is missing"));
    broken[key] = 0;
    CHECK(contains(scaled(broken), "rotary scaling is 0"));
    broken[key] = "x";
    CHECK(contains(scaled(broken), "\"rope_scaling." + key + "\" is \"x\""));
  }
  CHECK(contains(load([](json& c) { c["rope_parameters"] = 5; }), "\"rope_parameters\" is 5, allowed is an object"));
  CHECK(contains(load([](json& c) {
                   c["rope_parameters"] = {{"full_attention", json::object()}};
                 }),
                 "\"rope_parameters.sliding_attention\" is missing"));
  CHECK(contains(load([](json& c) { c["partial_rotary_factor"] = 0.5; }), "\"partial_rotary_factor\" is 0.5"));
  CHECK(contains(load([](json& c) { c["quantization_config"] = {{"bits", 4}}; }), "\"quantization_config\" is"));
  CHECK(contains(load([](json& c) { c["mlp_bias"] = true; }), "\"mlp_bias\" is true, allowed is false"));
  CHECK(contains(load([](json& c) { c["layer_types"] = {"full_attention"}; }), "a list of 2 types"));
  CHECK(contains(load([](json& c) { c["layer_types"] = {"full_attention", "linear_attention"}; }), "layer_types"));
  CHECK(contains(load([](json& c) { c["layer_types"] = {1, 2}; }), "layer_types"));
  // Settings of one architecture alone; what is missing has its default.
  const auto of = [&](const char* type, const char* key, const json& value) {
    return load([&](json& c) { c["model_type"] = type, c[key] = value; });
  };
  CHECK(contains(of("gpt_oss", "num_local_experts", 0), "num_local_experts"));
  CHECK(
      contains(of("gpt_oss", "num_experts", 0), "\"num_local_experts\" is missing, allowed is a whole number from 1"));
  CHECK(contains(of("gpt_oss", "num_experts_per_tok", 129), "the number of experts of a token is 129"));
  CHECK(contains(of("gpt_oss", "swiglu_limit", 0), "the limit of the experts' gate is 0"));
  CHECK(contains(of("qwen3_5_text", "linear_num_key_heads", 0), "the number of key heads of recurrent layers is 0"));
  CHECK(contains(of("qwen3_5_text", "linear_num_key_heads", 5), "cannot share 5 key heads evenly"));
  CHECK(contains(of("qwen3_5_text", "linear_conv_kernel_dim", 1 << 20), "the kernel size of recurrent layers"));
  CHECK(contains(of("qwen3_5_text", "linear_value_head_dim", INT32_MAX), "the value dimension of recurrent layers"));
  CHECK(contains(of("qwen3_5_text", "partial_rotary_factor", 1.5), "partial_rotary_factor"));
  CHECK(
      contains(of("qwen3_5_text", "head_dim", 4), "\"partial_rotary_factor\" is missing, allowed is a part of a head"));
  CHECK(contains(of("qwen3_5_text", "full_attention_interval", 0), "full_attention_interval"));
  CHECK(contains(of("qwen3_5_text", "layer_types", {"full_attention", "sliding_attention"}), "\"linear_attention\""));
  CHECK(contains(of("qwen3_5_text", "layer_types", {"linear_attention", "linear_attention"}),
                 "all layers are recurrent"));
  const auto windowed = [&](const char* type, const json& window) {
    return load([&](json& c) {
      c["model_type"] = type;
      c["sliding_window"] = window;
    });
  };
  CHECK(contains(windowed("mistral", 0), "\"sliding_window\" is 0, allowed is null or a whole number from 1 on"));
  CHECK(contains(windowed("mistral", -5), "\"sliding_window\" is -5"));
  CHECK(contains(windowed("mistral", "all"), "\"sliding_window\" is \"all\""));
  CHECK(contains(windowed("mistral", INT32_MAX), "the sliding window is 2147483647"));
  const auto gemma = [&](const char* key, const json& value) {
    return load([&](json& c) {
      c["model_type"] = "gemma2";
      c[key] = value;
    });
  };
  CHECK(contains(gemma("query_pre_attn_scalar", 0), "\"query_pre_attn_scalar\" is 0, allowed is a number above 0"));
  CHECK(contains(gemma("attn_logit_softcapping", -1), "the soft cap of attention is -1"));
  CHECK(contains(gemma("final_logit_softcapping", "x"), "\"final_logit_softcapping\" is \"x\""));
  CHECK(contains(gemma("hidden_activation", "gelu"), "\"hidden_activation\" is \"gelu\", allowed is \"silu\" or"));
  CHECK(contains(gemma("sliding_window_pattern", 0), "\"sliding_window_pattern\" is 0"));
  CHECK(contains(gemma("use_bidirectional_attention", true), "\"use_bidirectional_attention\" is true"));
  CHECK(contains(load([](json& c) { c["rope_scaling"] = {{"rope_type", "llama3"}}; }), "rope_scaling"));
  CHECK(contains(load([](json& c) { c["rope_scaling"] = {{"factor", 2}}; }), "rope_scaling"));
  CHECK(contains(load([](json& c) { c["rope_scaling"] = "default"; }), "rope_scaling"));
  CHECK(contains(load([](json& c) { c["hidden_act"] = "gelu"; }), "hidden_act"));
  CHECK(contains(load([](json& c) { c["attention_bias"] = true; }), "q_proj.bias\" is missing"));
  CHECK(contains(load([](json& c) { c["tie_word_embeddings"] = 1; }), "tie_word_embeddings"));
  CHECK(contains(load([](json& c) { c["rope_theta"] = 0; }), "rotary base"));
  CHECK(contains(load([](json& c) { c["rope_theta"] = -1e30; }), "rotary base"));
  CHECK(contains(load([](json& c) { c["rms_norm_eps"] = -1; }), "epsilon"));
  CHECK(contains(load([](json& c) { c["bos_token_id"] = 256; }), "special token 256"));
  CHECK(contains(load([](json& c) { c["eos_token_id"] = {1ull << 40}; }), "\"eos_token_id\" is"));
  CHECK(contains(load([](json& c) { c["eos_token_id"] = {1, 256}; }), "special token 256"));
  CHECK(contains(load([](json& c) { c["eos_token_id"] = {1, "2"}; }), "\"eos_token_id\" is [1,\"2\"]"));
  CHECK(contains(load([](json& c) { c["eos_token_id"] = {1, -2}; }), "special token -2"));
  CHECK(contains(load([](json& c) { c["bos_token_id"] = {1, 2}; }), "\"bos_token_id\" is [1,2]"));
  CHECK(contains(load([](json& c) { c["rms_norm_eps"] = 1e300; }), "\"rms_norm_eps\" is 1e+300"));
  CHECK(contains(load([](json& c) { c["num_key_value_heads"] = 3; }), "shared evenly"));
  CHECK(contains(load([](json& c) { c["hidden_size"] = 24; }), "shape"));
  CHECK(contains(load([](json& c) { c["tie_word_embeddings"] = false; }), "\"lm_head.weight\" is missing"));
  CHECK(contains(load([](json& c) { c = json::array(); }), "not a JSON object"));
  std::ofstream(directory / "config.json") << "{\"hidden_size\": ";
  CHECK(contains(refusal([&] { static_cast<void>(generate::load_hugging_face(directory)); }), "not valid JSON"));
  fs::remove(directory / "config.json");
  CHECK(contains(refusal([&] { static_cast<void>(generate::load_hugging_face(directory)); }), "no such file"));
}

TEST_CASE("a number that no float can hold is refused as such, wherever it is in a JSON file") {
  const fs::path directory = tiny_hugging_face("range", 7);
  const auto load = [&](const std::string& config) {
    std::ofstream(directory / "config.json") << config;
    return refusal([&] { static_cast<void>(generate::load_hugging_face(directory)); });
  };
  for (const char* number : {"1e999", "-1e999", "123456e4000"}) {
    CAPTURE(number);
    CHECK(
        contains(load(std::string(R"({"rms_norm_eps":)") + number + "}"), "JSON with a number out of range at byte "));
    CHECK(contains(load(std::string(R"({"x":[{"y":)") + number + "}]}"), number));
  }
  fs::remove(directory / "model.safetensors");
  static_cast<void>(tiny_hugging_face("range", 7));
  fs::remove(directory / "model.safetensors");
  std::ofstream(directory / "model.safetensors.index.json") << R"({"weight_map":{"x":1e999}})";
  CHECK(contains(refusal([&] { static_cast<void>(generate::load_hugging_face(directory)); }), "out of range"));
  fs::remove(directory / "model.safetensors.index.json");
}

TEST_CASE("an index of shards whose files are no plain names is refused with an excerpt") {
  const fs::path directory = tiny_hugging_face("shard_names", 7);
  fs::remove(directory / "model.safetensors");
  const auto load = [&](const nlohmann::json& file) {
    std::ofstream(directory / "model.safetensors.index.json") << nlohmann::json{{"weight_map", {{"x", file}}}}.dump();
    return refusal([&] { static_cast<void>(generate::load_hugging_face(directory)); });
  };
  CHECK(contains(load("../a.safetensors"), "a shard is named by \"../a.safetensors\", allowed are plain file names"));
  CHECK(contains(load("/a.safetensors"), "a shard is named by"));
  CHECK(contains(load(5), "a shard is named by 5"));
  CHECK(contains(load(std::string(1 << 20, 'a')), "a shard is named by \"aaa"));
  CHECK(contains(load("absent.safetensors"), "there is no such file"));
}

TEST_CASE("a tokenizer.json that is broken, or of a kind that there is no code for, is refused by the setting's name") {
  using nlohmann::json;
  const fs::path folder = fs::path(BIFOLIO_EXAMPLE_FIXTURES) / "tokenizer_files";
  const auto load_text = [](const std::string& text, std::int32_t vocab_size = 700) {
    const fs::path path = write("broken_tokenizer.json", text);
    return refusal([&] { static_cast<void>(generate::load_hugging_face_tokenizer(path, vocab_size)); });
  };
  const auto changed = [&](const char* kind, const std::function<void(json&)>& change) {
    json file = json::parse(std::ifstream(folder / (std::string(kind) + ".json")));
    change(file);
    return load_text(file.dump());
  };
  const std::string whole = read_file(folder / "gpt2.json");
  CHECK(contains(load_text(whole, 300), "allowed are 0 to 299, as the model's vocabulary has 300"));
  for (std::size_t length = 0; length + 2 < whole.size(); length += 499)
    static_cast<void>(load_text(whole.substr(0, length)));
  CHECK(contains(load_text("[]"), "not a JSON object"));
  CHECK(contains(load_text("{}"), "\"model\" is missing"));
  CHECK(contains(load_text(std::string(100, '[')), "nested deeper"));

  CHECK(contains(changed("gpt2", [](json& f) { f["model"]["type"] = "Unigram"; }),
                 "\"model.type\" is \"Unigram\", allowed is \"BPE\""));
  CHECK(contains(changed("gpt2", [](json& f) { f["model"].erase("vocab"); }), "\"model.vocab\" is missing"));
  CHECK(contains(changed("gpt2", [](json& f) { f["model"]["vocab"] = {"a"}; }), "\"model.vocab\" is [\"a\"]"));
  for (const json& id : {json(-1), json(1ull << 40), json("x"), json(1.5), json(nullptr)}) {
    CAPTURE(id.dump());
    CHECK(
        contains(changed("gpt2", [&](json& f) { f["model"]["vocab"]["a"] = id; }), "the id of \"a\" is " + id.dump()));
    CHECK(contains(changed("gpt2", [&](json& f) { f["added_tokens"][0]["id"] = id; }), "added_tokens[0].id\""));
  }
  for (const json& merge : {json("a"), json("a b c"), json({"a"}), json({"a", 5}), json("a \u4F60"), json(7)}) {
    CAPTURE(merge.dump());
    CHECK(contains(changed("gpt2", [&](json& f) { f["model"]["merges"][3] = merge; }), "merge 3 is "));
  }
  CHECK(
      contains(changed("gpt2", [](json& f) { f["model"]["merges"] = 5; }), "\"model.merges\" is 5, allowed is a list"));
  CHECK(contains(changed("gpt2", [](json& f) { f["model"]["dropout"] = 0.1; }), "\"model.dropout\" is 0.1"));
  CHECK(contains(changed("gpt2", [](json& f) { f["model"]["end_of_word_suffix"] = "</w>"; }), "end_of_word_suffix"));
  CHECK(contains(changed("llama2", [](json& f) { f["model"]["unk_token"] = "none"; }),
                 "\"model.unk_token\" is \"none\""));

  CHECK(contains(changed("llama3", [](json& f) { f["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "x+"; }),
                 "\"pretokenizers[0].pattern.Regex\" is \"x+\", allowed is the expression of GPT-2, Llama 3 or Qwen2"));
  CHECK(contains(changed("llama3", [](json& f) { f["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"; }),
                 "behavior\" is \"Removed\""));
  CHECK(contains(changed("gpt2", [](json& f) { f["pre_tokenizer"]["type"] = "BertPreTokenizer"; }),
                 "\"pre_tokenizer.type\" is \"BertPreTokenizer\", allowed is a pre-tokenizer of"));
  CHECK(contains(changed("gpt2", [](json& f) { f["pre_tokenizer"] = "ByteLevel"; }), "\"pre_tokenizer\" is"));
  CHECK(contains(changed("gpt2",
                         [](json& f) {
                           f["pre_tokenizer"] = {{"type", "Digits"}};
                         }),
                 "individual_digits\" is missing, allowed is true"));
  CHECK(contains(changed("gpt2", [](json& f) { f["decoder"] = nullptr; }), "allowed are both or none"));
  CHECK(contains(changed("gpt2", [](json& f) { f["decoder"]["type"] = "WordPiece"; }), "\"decoder.type\" is"));
  CHECK(contains(changed("qwen2", [](json& f) { f["normalizer"]["type"] = "NFKC"; }),
                 "\"normalizer.type\" is \"NFKC\", allowed is a normalizer of"));
  CHECK(contains(changed("gemma", [](json& f) { f["normalizer"]["pattern"] = {{"String", ""}}; }), "not empty"));
  CHECK(contains(changed("tinyllama", [](json& f) { f["pre_tokenizer"]["replacement"] = "_"; }), "replacement\" is"));
  CHECK(contains(changed("tinyllama", [](json& f) { f["pre_tokenizer"]["prepend_scheme"] = "last"; }), "\"last\""));
  CHECK(contains(changed("llama2", [](json& f) { f["post_processor"]["type"] = "BertProcessing"; }), "BertProcessing"));
  CHECK(contains(changed("llama2",
                         [](json& f) {
                           json& single = f["post_processor"]["single"];
                           single.push_back(single[0]);
                         }),
                 "tokens and then the text, none after it"));
  CHECK(contains(changed("llama2", [](json& f) { f["post_processor"]["special_tokens"] = json::object(); }),
                 "special_tokens.<s>\" is missing"));
  CHECK(contains(changed("llama2", [](json& f) { f["post_processor"]["special_tokens"]["<s>"]["ids"] = {700}; }),
                 "ids\""));
  CHECK(contains(changed("gpt2", [](json& f) { f["added_tokens"][0]["lstrip"] = true; }), "lstrip\" is true"));
  CHECK(contains(changed("gpt2", [](json& f) { f["added_tokens"][0]["content"] = ""; }), "content\" is \"\""));
  CHECK(contains(changed("gpt2", [](json& f) { f["added_tokens"][0] = 3; }), "added_tokens[0]"));
}

TEST_CASE("a tokenizer.json with a few bytes changed encodes and decodes, or is refused; it does nothing else") {
  constexpr std::uint64_t seed = 22;
  CAPTURE(seed);
  std::mt19937_64 random(seed);
  int num_run = 0, num_refused = 0;
  for (const char* kind : {"llama3", "qwen2", "llama2", "mistral", "tinyllama"}) {
    const std::string whole =
        read_file(fs::path(BIFOLIO_EXAMPLE_FIXTURES) / "tokenizer_files" / (std::string(kind) + ".json"));
    for (int round = 0; round < 60; ++round) {
      std::string bytes = whole;
      for (int i = 0; i < 2; ++i) bytes[random() % bytes.size()] = static_cast<char>(' ' + random() % 95);
      try {
        const auto tokens = generate::load_hugging_face_tokenizer(write("changed_tokenizer.json", bytes), 700);
        const auto ids = tokens->encode("Some text, <s> 12 \xff caf\u00e9\n");
        CHECK(tokens->decode_all(ids).size() < 1000);
        ++num_run;
      } catch (const generate::input_error&) {
        ++num_refused;
      }
    }
  }
  CHECK(num_run > 0);
  CHECK(num_refused > 0);
}

TEST_CASE("a path that does not exist, a directory for a file and a missing tokenizer are refused") {
  const auto load = [](const fs::path& model, const fs::path& tokenizer = {}) {
    return refusal([&] { static_cast<void>(generate::load_model(model, tokenizer)); });
  };
  CHECK(contains(load(scratch_directory() / "nothing.bin"), "no such file"));
  CHECK(contains(load(scratch_directory() / "nothing"), "no such file"));
  fs::create_directories(scratch_directory() / "folder.bin");
  CHECK(contains(load(scratch_directory() / "folder.bin"), "not a regular file"));
  const fs::path model = write("plain.bin", tiny_llama2c(7));
  CHECK(contains(load(model), "needs --tokenizer"));
  CHECK(contains(load(model, scratch_directory() / "nothing.tok"), "no such file"));
}

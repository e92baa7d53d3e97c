// SPDX-License-Identifier: Apache-2.0
// Every architecture that generate runs: tiny random checkpoints against what transformers says with them (models/,
// made by tiny_models.py), and the config.json of real models.
#include "model_kinds.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "cache_shape.hpp"
#include "checkpoint.hpp"
#include "generation_fixture.hpp"
#include "hugging_face_config.hpp"
#include "reference_files.hpp"
#include "support/program_run.hpp"

namespace {

using namespace bifolio::test;
using bifolio::token_id;
using generate::checkpoint;
using generate::layer_weights;
using nlohmann::json;
namespace fs = std::filesystem;

generate::hugging_face_config read_config(const json& config) {
  const fs::path path = write_file(scratch_directory() / "kinds" / "config.json", config.dump());
  return generate::read_hugging_face_config(path);
}

/// The kind of each layer, as its window.
std::vector<std::int32_t> windows_of(const generate::model_config& c) {
  std::vector<std::int32_t> windows;
  for (std::int32_t l = 0; l < c.num_layers; ++l) windows.push_back(c.kinds[c.kind_of(l)].window);
  return windows;
}

}  // namespace

TEST_CASE(
    "a checkpoint of every architecture continues prompts as transformers does, in one batch and when preempted") {
  for (const std::string kind : model_kinds) {
    CAPTURE(kind);
    const model_fixture f(kind);
    std::vector<std::vector<token_id>> prompts;
    for (const json& row : f.expected.at("rows")) prompts.push_back(ids_in(row, "prompt_ids"));
    generation_setup setup;
    setup.max_positions = f.expected.at("max_positions");
    setup.block_size = 4;
    for (const bool scarce : {false, true}) {
      if (scarce) setup.num_blocks = bifolio::blocks_for(setup.max_positions, setup.block_size) + 6;
      const generation_result got = continue_prompts(f.model, prompts, setup);
      for (std::size_t i = 0; i < prompts.size(); ++i) {
        CHECK(got.outputs[i] == ids_in(f.expected.at("rows")[i], "output_ids"));
      }
      const bool slides = kind == "mistral";  // its texts never fill a pool: all of it is windows
      CHECK((got.stats.schedule.num_preemptions > 0) == (scarce && !slides));
    }
  }
}

TEST_CASE("a checkpoint of every architecture gives transformers' logits") {
  for (const std::string kind : model_kinds) {
    CAPTURE(kind);
    const model_fixture f(kind);
    const double worst = worst_logit(f.model, f.expected);
    MESSAGE(kind << ": largest difference of a logit " << worst);
    CHECK(worst > 0);  // something was compared
    CHECK(worst < 2e-4);
  }
}

TEST_CASE("what an architecture adds to Llama matters: without any of it the logits are others") {
  const auto check_matters = [](const std::string& kind, const char* what, const auto& leave_out) {
    CAPTURE(kind);
    CAPTURE(what);
    model_fixture f(kind);
    leave_out(f.model);
    CHECK(worst_logit(f.model, f.expected) > 1e-2);
  };
  const auto of_layers = [](std::vector<float> layer_weights::*member) {
    return [member](checkpoint& model) {
      for (layer_weights& layer : model.layers) (layer.*member).clear();
    };
  };
  const auto without_windows = [](checkpoint& model) {
    for (generate::layer_kind& kind : model.config.kinds) kind.window = 0;
  };
  const auto with_wider_windows = [](checkpoint& model) {
    for (generate::layer_kind& kind : model.config.kinds) kind.window += kind.window > 0 ? 1 : 0;
  };
  check_matters("llama3", "the scaling of rotary positions",
                [](checkpoint& model) { model.config.kinds[0].rope.scaling = generate::rope_scaling::none; });
  check_matters("llama3", "its blending",
                [](checkpoint& model) { model.config.kinds[0].rope.scaling = generate::rope_scaling::linear; });
  for (const std::string kind : {"mistral", "gemma2", "gemma3", "gpt_oss"}) {
    check_matters(kind, "the window", without_windows);
    check_matters(kind, "the window's last position", with_wider_windows);
  }
  check_matters("qwen2", "the biases", of_layers(&layer_weights::qkv_bias));
  check_matters("qwen3", "the norm of queries", of_layers(&layer_weights::q_norm));
  check_matters("qwen3", "the norm of keys", of_layers(&layer_weights::k_norm));
  check_matters("gemma2", "attention's norm", of_layers(&layer_weights::attention_post_norm));
  check_matters("gemma2", "the MLP's norm", of_layers(&layer_weights::mlp_post_norm));
  check_matters("gemma2", "attention's soft cap", [](checkpoint& m) { m.config.attention_soft_cap = 0; });
  check_matters("gemma2", "the logits' soft cap", [](checkpoint& m) { m.config.logits_soft_cap = 0; });
  check_matters("gemma2", "attention's divisor", [](checkpoint& m) { m.config.attention_divisor = 0; });
  check_matters("gemma2", "the embedding's factor", [](checkpoint& m) { m.config.embedding_scale = 1; });
  check_matters("gemma2", "its activation", [](checkpoint& m) { m.config.gate = generate::activation::silu; });
  check_matters("gemma3", "the rotary base of windowed layers", [](checkpoint& m) {
    for (generate::layer_kind& kind : m.config.kinds) kind.rope.theta = 1e6f;
  });
}

TEST_CASE("what gpt-oss and Qwen3.5 add to Llama matters: without any of it the logits are others") {
  const auto worst_without = [](const std::string& kind, const auto& leave_out) {
    model_fixture f(kind);
    leave_out(f.model);
    for (layer_weights& layer : f.model.layers) leave_out(layer);
    return worst_logit(f.model, f.expected);
  };
  const auto check = [&](const std::string& kind, const std::string& what, const auto& leave_out) {
    CAPTURE(kind);
    CAPTURE(what);
    CHECK(worst_without(kind, leave_out) > 1e-2);
  };
  // Of the model, or of each layer.
  const auto of_model = [](const auto& change) {
    return [change](auto& part) {
      if constexpr (std::is_same_v<std::decay_t<decltype(part)>, checkpoint>) change(part);
    };
  };
  const auto of_layers = [](const auto& change) {
    return [change](auto& part) {
      if constexpr (std::is_same_v<std::decay_t<decltype(part)>, layer_weights>) change(part);
    };
  };
  const auto clear = [](std::vector<float>& values) { std::fill(values.begin(), values.end(), 0.0f); };
  check("gpt_oss", "the sinks", of_layers([](layer_weights& layer) { layer.sinks.clear(); }));
  check("gpt_oss", "the second expert", of_model([](checkpoint& m) { m.config.experts.num_active = 1; }));
  check("gpt_oss", "the gain of the gate", of_model([](checkpoint& m) { m.config.experts.gate_gain = 1; }));
  check("gpt_oss", "the router's biases", of_layers([&](layer_weights& l) { clear(l.experts.router_bias); }));
  check("gpt_oss", "the experts' biases", of_layers([&](layer_weights& layer) {
          for (generate::expert_weights& expert : layer.experts.experts) clear(expert.down_bias);
        }));
  const auto of_ropes = [&](const auto& change) {
    return of_model([change](checkpoint& model) {
      for (generate::layer_kind& kind : model.config.kinds) change(kind.rope);
    });
  };
  check("gpt_oss", "the ramp", of_ropes([](generate::rope_config& r) { r.scaling = generate::rope_scaling::linear; }));
  check("gpt_oss", "its end", of_ropes([](generate::rope_config& rope) { rope.beta_slow = 0.1f; }));
  check("gpt_oss", "attention's factor", of_ropes([](generate::rope_config& rope) { rope.attention_factor = 1; }));
  check("qwen3_5", "the dims that are not rotated", of_model([](checkpoint& m) { m.config.rotary_dim = 0; }));
  check("qwen3_5", "the convolution", of_layers([&](layer_weights& layer) {
          std::vector<float>& kernel = layer.recurrence.conv;
          for (std::size_t i = 0; i < kernel.size(); ++i) kernel[i] = i % 3 == 2 ? kernel[i] : 0;
        }));
  check("qwen3_5", "how fast memories fade", of_layers([&](layer_weights& l) { clear(l.recurrence.decay_log); }));
  check("qwen3_5", "the bias of that", of_layers([&](layer_weights& l) { clear(l.recurrence.decay_bias); }));
}

TEST_CASE(
    "models of several layer groups say the same found in the cache, preempted, swapped, forked and in one group") {
  for (const std::string kind : grouped_model_kinds) {
    CAPTURE(kind);
    const model_fixture f(kind);
    // The fixture's, and some that begin like its longest one.
    std::vector<std::vector<token_id>> prompts;
    for (const json& row : f.expected.at("rows")) prompts.push_back(ids_in(row, "prompt_ids"));
    const std::vector<token_id> longest = prompts.back();
    for (std::int32_t i = 0; i < 3; ++i) {
      prompts.push_back(longest);
      for (std::int32_t k = 0; k <= 4 * i; ++k) prompts.back().push_back(token_id{(7 * i + 5 * k) % 250 + 1});
    }
    generation_setup plain;
    plain.max_positions = f.expected.at("max_positions");
    plain.block_size = 4;
    const generation_result greedy = continue_prompts(f.model, prompts, plain);
    for (std::size_t i = 0; i < f.expected.at("rows").size(); ++i) {
      CHECK(greedy.outputs[i] == ids_in(f.expected.at("rows")[i], "output_ids"));
    }
    REQUIRE(greedy.stats.more_groups.size() == 1);
    if (kind != "qwen3_5") {  // a window keeps less than all
      CHECK(greedy.stats.more_groups[0].peak_used_blocks < greedy.stats.cache.peak_used_blocks);
    }

    for (const std::int32_t samples : {1, 3}) {
      CAPTURE(samples);
      generation_setup drawn = plain;  // sampling compares all bits of the logits
      drawn.how = {1.2f, 0.98f};
      drawn.num_samples = samples;
      const generation_result expected = continue_prompts(f.model, prompts, drawn);
      const auto check_same = [&](const std::string& name, const generation_setup& setup) {
        CAPTURE(name);
        const generation_result got = continue_prompts(f.model, prompts, setup);
        CHECK(got.outputs == expected.outputs);
        return got.stats;
      };
      generation_setup setup = drawn;
      setup.keeps_all = true;
      CHECK(check_same("all tokens kept", setup).more_groups.size() == (kind == "qwen3_5" ? 1 : 0));
      setup = drawn;
      setup.max_batch_tokens = 7;
      check_same("in chunks", setup);
      setup = drawn;
      setup.prefix_caching = true;
      setup.max_batch_seqs = samples;  // one prompt after another
      const generate::generation_stats found = check_same("prefixes found", setup);
      CHECK(found.schedule.num_cached_tokens >= 3 * (static_cast<std::int64_t>(longest.size()) - 8));
      setup = drawn;
      setup.num_blocks = bifolio::blocks_for(setup.max_positions, setup.block_size) + 8;
      CHECK(check_same("preempted", setup).schedule.num_preemptions > 0);
      setup.num_host_blocks = 400;
      const generate::generation_stats swapped = check_same("swapped", setup);
      CHECK(swapped.schedule.num_swap_ins > 0);
      CHECK(swapped.more_groups[0].num_swapped_in_blocks > 0);
      setup.prefix_caching = true;
      setup.max_batch_tokens = 9;
      check_same("swapped, found and in chunks", setup);
    }
  }
}

TEST_CASE("layers are kept in groups by what they keep; one kind of layers is one group") {
  const auto groups_of = [](const std::string& kind, bool keeps_all) {
    const model_fixture f(kind);
    generate::cache_shape shape{.block_size = 4, .num_blocks = 100, .keeps_all = keeps_all};
    const generate::cache_load load{.max_positions = 64, .step_tokens = 8};
    return generate::cache_config(f.model.config, bifolio::dtype::f32, shape, load);
  };
  CHECK(groups_of("llama3", false).groups.empty());
  CHECK(groups_of("mistral", false).groups.empty());
  CHECK(groups_of("mistral", false).cache.sliding_window == 8);  // one pool, which slides
  CHECK(groups_of("mistral", true).cache.sliding_window == 0);
  CHECK(groups_of("gemma2", true).groups.empty());
  const bifolio::model_cache_config gemma3 = groups_of("gemma3", false);
  REQUIRE(gemma3.groups.size() == 2);
  CHECK(gemma3.groups[0].layers == std::vector<std::int32_t>{2});
  CHECK(gemma3.groups[1].layers == std::vector<std::int32_t>{0, 1, 3});
  CHECK(gemma3.cache.groups[1].window == 8);
  // Of 100 blocks there is room for 6.25 texts of 64 tokens, which hold 5 blocks each in the window.
  CHECK(gemma3.cache.groups[1].num_blocks == 34);
  const bifolio::model_cache_config hybrid = groups_of("qwen3_5", false);
  REQUIRE(hybrid.groups.size() == 2);
  CHECK(hybrid.groups[1].state_bytes == 4 * (2 * 32 + 4 * 4 * 4));
  CHECK(hybrid.cache.groups[1].kind == bifolio::group_kind::state);
}

// Of the published files: what of it is read.
TEST_CASE("config.json of Llama 3.2, Mistral, Qwen2.5, Qwen3, Gemma 2 and Gemma 3 as they are published") {
  using generate::rope_scaling;
  const auto llama = read_config(json::parse(R"({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
      "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
      "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
      "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
      "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "attention_bias": false, "mlp_bias": false,
      "tie_word_embeddings": true, "hidden_act": "silu", "bos_token_id": 128000,
      "eos_token_id": [128001, 128008, 128009], "pretraining_tp": 1})"));
  REQUIRE(llama.model.kinds.size() == 1);
  const generate::rope_config& rope = llama.model.kinds[0].rope;
  CHECK(rope == generate::rope_config{500000.0f, rope_scaling::llama3, 32.0f, 1.0f, 4.0f, 8192});
  CHECK(llama.model.eos_ids == std::vector<std::int32_t>{128001, 128008, 128009});
  const auto frequencies = rotary_frequencies(rope, 64);
  CHECK(frequencies.front() == 1.0f);                                                   // kept
  CHECK(frequencies.back() == doctest::Approx(std::pow(500000.0, -62.0 / 64) / 32.0));  // stretched

  const auto mistral = read_config(json::parse(R"({"model_type": "mistral", "hidden_size": 4096,
      "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
      "vocab_size": 32000, "max_position_embeddings": 32768, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
      "sliding_window": 4096, "tie_word_embeddings": false, "hidden_act": "silu", "bos_token_id": 1,
      "eos_token_id": 2})"));
  CHECK(windows_of(mistral.model) == std::vector<std::int32_t>(32, 4096));
  CHECK(mistral.model.head_dim == 128);

  const auto qwen2 = read_config(json::parse(R"({"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
      "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
      "max_position_embeddings": 32768, "max_window_layers": 21, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
      "sliding_window": 32768, "use_sliding_window": false, "use_mrope": false, "tie_word_embeddings": true,
      "hidden_act": "silu", "bos_token_id": 151643, "eos_token_id": 151645})"));
  CHECK(qwen2.tensors.qkv_bias);
  CHECK_FALSE(qwen2.tensors.attention_out_bias);
  CHECK(windows_of(qwen2.model) == std::vector<std::int32_t>(24, 0));

  const auto qwen3 = read_config(json::parse(R"({"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
      "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
      "vocab_size": 151936, "max_position_embeddings": 40960, "max_window_layers": 28, "rms_norm_eps": 1e-06,
      "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "use_sliding_window": false,
      "attention_bias": false, "tie_word_embeddings": true, "hidden_act": "silu", "bos_token_id": null,
      "eos_token_id": 151645})"));
  CHECK(qwen3.tensors.qk_norm);
  CHECK(qwen3.model.q_dim() == 2048);
  CHECK(qwen3.model.bos_id == -1);

  const auto gemma2 = read_config(json::parse(R"({"model_type": "gemma2", "hidden_size": 2304,
      "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
      "head_dim": 256, "vocab_size": 256000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-06,
      "rope_theta": 10000.0, "sliding_window": 4096, "query_pre_attn_scalar": 256, "attn_logit_softcapping": 50.0,
      "final_logit_softcapping": 30.0, "attention_bias": false, "hidden_act": "gelu_pytorch_tanh",
      "hidden_activation": "gelu_pytorch_tanh", "bos_token_id": 2, "eos_token_id": 1})"));
  CHECK(gemma2.model.tied_classifier);
  CHECK(gemma2.model.embedding_scale == 48.0f);
  CHECK(gemma2.model.attention_soft_cap == 50.0f);
  CHECK(gemma2.model.logits_soft_cap == 30.0f);
  CHECK(gemma2.model.kinds.size() == 2);
  CHECK(windows_of(gemma2.model)[0] == 4096);
  CHECK(windows_of(gemma2.model)[1] == 0);

  const auto gemma3 = read_config(json::parse(R"({"model_type": "gemma3_text", "hidden_size": 1152,
      "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
      "head_dim": 256, "vocab_size": 262144, "max_position_embeddings": 32768, "rms_norm_eps": 1e-06,
      "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": null, "sliding_window": 512,
      "sliding_window_pattern": 6, "query_pre_attn_scalar": 256, "attn_logit_softcapping": null,
      "final_logit_softcapping": null, "attention_bias": false, "hidden_activation": "gelu_pytorch_tanh",
      "bos_token_id": 2, "eos_token_id": 1})"));
  const std::vector<std::int32_t> windows = windows_of(gemma3.model);
  CHECK(std::vector<std::int32_t>(windows.begin(), windows.begin() + 7) ==
        std::vector<std::int32_t>{512, 512, 512, 512, 512, 0, 512});
  CHECK(gemma3.model.attention_soft_cap == 0.0f);
  REQUIRE(gemma3.model.kinds.size() == 2);
  CHECK(gemma3.model.kinds[0].rope.theta == 1e4f);
  CHECK(gemma3.model.kinds[1].rope.theta == 1e6f);
}

TEST_CASE("config.json of gpt-oss as it is published, and of Qwen3.5's text model") {
  const auto oss = read_config(json::parse(R"({"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
      "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
      "vocab_size": 201088, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "sliding_window": 128,
      "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "initial_context_length": 4096,
      "rope_theta": 150000, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
      "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false}, "attention_bias": true,
      "tie_word_embeddings": false, "hidden_act": "silu", "swiglu_limit": 7.0, "eos_token_id": 200002,
      "pad_token_id": 199999})"));
  CHECK(oss.tensors.sinks);
  CHECK(oss.tensors.qkv_bias);
  CHECK(oss.model.experts.count == 32);
  CHECK(windows_of(oss.model)[0] == 128);
  CHECK(windows_of(oss.model)[1] == 0);
  const generate::rope_config& rope = oss.model.kinds[0].rope;
  CHECK(rope.theta == 150000.0f);
  CHECK(rope.attention_factor == doctest::Approx(0.1 * std::log(32.0) + 1));
  const auto frequencies = rotary_frequencies(rope, 64);
  CHECK(frequencies.front() == 1.0f);
  CHECK(frequencies.back() == doctest::Approx(std::pow(150000.0, -62.0 / 64) / 32));

  const auto qwen = read_config(json::parse(R"({"model_type": "qwen3_5_text", "hidden_size": 1024,
      "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
      "head_dim": 256, "vocab_size": 248320, "max_position_embeddings": 262144, "rms_norm_eps": 1e-06,
      "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
      "linear_num_value_heads": 16, "linear_value_head_dim": 128, "full_attention_interval": 4,
      "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10], "rope_type": "default",
      "rope_theta": 10000000, "partial_rotary_factor": 0.25}, "tie_word_embeddings": true, "hidden_act": "silu",
      "eos_token_id": 248044})"));
  CHECK(qwen.model.rotary_dim == 64);
  CHECK(qwen.model.gates_attention);
  CHECK(qwen.model.qkv_dim() == 2 * 2048 + 2 * 512);
  for (std::int32_t l = 0; l < 8; ++l) CHECK(qwen.model.kinds[qwen.model.kind_of(l)].is_recurrent == (l % 4 != 3));
  CHECK(qwen.model.recurrence.memory_size() == 16 * 128 * 128);
}

TEST_CASE("generation_config.json says what ends a text, where it is there") {
  const fs::path from = fs::path(BIFOLIO_EXAMPLE_FIXTURES) / "models" / "gemma2";
  const fs::path directory = scratch_directory() / "generation_config";
  fs::create_directories(directory);
  for (const char* file : {"config.json", "model.safetensors"}) {
    fs::copy_file(from / file, directory / file, fs::copy_options::overwrite_existing);
  }
  fs::remove(directory / "generation_config.json");
  using ids = std::vector<std::int32_t>;
  CHECK(generate::load_hugging_face(directory).config.eos_ids == ids{255});
  write_file(directory / "generation_config.json", R"({"eos_token_id": [1, 107]})");
  CHECK(generate::load_hugging_face(directory).config.eos_ids == ids{1, 107});
  write_file(directory / "generation_config.json", R"({"temperature": 0.6})");
  CHECK(generate::load_hugging_face(directory).config.eos_ids == ids{255});
}

// SPDX-License-Identifier: Apache-2.0
// The models on a GPU say what they say on the CPU, in every setting of the cache, and no sequence sees its neighbours.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

#include "cuda/cuda_llama.hpp"
#include "generation_fixture.hpp"
#include "loaded_model.hpp"
#include "model_fixtures.hpp"
#include "reference_files.hpp"
#include "support/skip.hpp"
#include "support/token_ids.hpp"

namespace {

using namespace bifolio::test;
using bifolio::dtype;
using bifolio::layout_kind;
using bifolio::token_id;

using prompt_list = std::vector<std::vector<token_id>>;

/// True where there is nothing to test on, which is then said.
bool nothing_to_run_on() {
  const std::string problem = generate::find_cuda_problem();
  if (problem.empty()) return false;
  skip(problem);
  return true;
}

generation_setup on_cuda(generation_setup setup) {
  setup.device = "cuda";
  return setup;
}

std::vector<std::pair<const char*, generation_setup>> settings_of(const generation_setup& plain) {
  std::vector<std::pair<const char*, generation_setup>> settings;
  const auto with = [&](const char* name, auto change) { change(settings.emplace_back(name, plain).second); };
  with("as it is", [](generation_setup&) {});
  with("nhd, blocks of 5", [](generation_setup& s) { s.layout = layout_kind::nhd, s.block_size = 5; });
  with("x_split", [](generation_setup& s) { s.layout = layout_kind::x_split; });
  with("7 tokens a step", [](generation_setup& s) { s.max_batch_tokens = 7; });
  with("3 sequences a step", [](generation_setup& s) { s.max_batch_seqs = 3; });
  with("3 samples", [](generation_setup& s) { s.num_samples = 3; });
  with("a pool that preempts",
       [](generation_setup& s) { s.num_blocks = bifolio::blocks_for(s.max_positions, s.block_size) + 8; });
  return settings;
}

/// Greedy ids in f32 are `expected` in every setting; in the narrow types they are the CPU's.
void check_greedy(const generate::checkpoint& weights, const prompt_list& prompts, const prompt_list& expected,
                  const generation_setup& plain) {
  for (const auto& named : settings_of(plain)) {
    CAPTURE(named.first);
    const generation_setup& setup = named.second;
    const generation_result got = continue_prompts(weights, prompts, on_cuda(setup));
    REQUIRE(got.outputs.size() == expected.size() * static_cast<std::size_t>(setup.num_samples));
    for (std::size_t i = 0; i < got.outputs.size(); ++i) {
      CAPTURE(i);
      CHECK(got.outputs[i] == expected[i / static_cast<std::size_t>(setup.num_samples)]);
    }
    if (setup.num_blocks < plain.num_blocks) CHECK(got.stats.schedule.num_preemptions > 0);
    if (setup.num_samples > 1) CHECK(got.stats.cache.num_copied_blocks > 0);
    CHECK(got.stats.attention_seconds > 0);
  }
  for (const dtype narrow : {dtype::f16, dtype::bf16}) {
    CAPTURE(std::string(to_string(narrow)));
    generation_setup setup = plain;
    setup.kv_type = narrow;
    setup.num_threads = 0;
    CHECK(continue_prompts(weights, prompts, on_cuda(setup)).outputs ==
          continue_prompts(weights, prompts, setup).outputs);
  }
}

/// Logits after every token of a text.
void check_logits(const generate::checkpoint& weights, const std::vector<token_id>& ids) {
  const auto expected = paged_logits(weights, ids, 64);
  const auto got = paged_logits(weights, ids, 64, "cuda");
  double worst = 0;
  REQUIRE(got.size() == expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    for (std::size_t j = 0; j < got[i].size(); ++j) {
      const double difference = std::abs(static_cast<double>(got[i][j]) - static_cast<double>(expected[i][j]));
      worst = std::isnan(difference) ? HUGE_VAL : std::max(worst, difference);
    }
  }
  MESSAGE("largest difference of a logit between the CPU and CUDA " << worst);
  CHECK(worst > 0);  // two devices were compared, not one with itself
  CHECK(worst < 2e-4);
}

void check_likelihoods(const generate::checkpoint& weights, const std::vector<token_id>& ids, double expected) {
  const auto mean_nll = [&](dtype kv_type) {
    generation_setup setup;
    setup.kv_type = kv_type;
    return score_text(weights, ids, on_cuda(setup), 128).mean_nll;
  };
  const double f32 = mean_nll(dtype::f32);
  CHECK(std::abs(f32 - expected) < 1e-5);
  for (const dtype narrow : {dtype::f16, dtype::bf16}) {
    const double moved = mean_nll(narrow) - f32;
    CHECK(moved != 0);  // the narrow types are in use
    CHECK(std::abs(moved) <= 2e-3);
  }
}

void check_reference_model(const char* name) {
  if (nothing_to_run_on()) return;
  const auto reference = find_reference_model(name);
  if (!reference) return skip("the folder of the reference models is absent");
  const auto weights = generate::load_llama2c(reference->weights);
  prompt_list prompts, expected;
  for (const reference_row& row : reference->rows) {
    prompts.push_back(to_ids(row.prompt_ids));
    expected.push_back(to_ids(row.output_ids));
  }
  check_greedy(weights, prompts, expected, {});
  for (const reference_nll& text : reference->texts) {
    check_logits(weights, to_ids(text.ids));
    check_likelihoods(weights, to_ids(text.ids), text.mean);
  }
}

}  // namespace

TEST_CASE("the bundled model says the same on CUDA as on the CPU and as its reference") {
  if (nothing_to_run_on()) return;
  const auto model = generate::load_model(generate::find_bundled_model(), {});
  const auto reference = nlohmann::json::parse(std::ifstream(generate::find_bundled_model() / "reference.json"));
  prompt_list prompts, expected;
  for (const auto& row : reference.at("greedy")) {
    prompts.push_back(to_ids(row.at("prompt_ids").get<std::vector<std::int32_t>>()));
    expected.push_back(to_ids(row.at("output_ids").get<std::vector<std::int32_t>>()));
  }
  generation_setup setup;
  setup.max_positions = 300;  // the reference stops there
  check_greedy(model.weights, prompts, expected, setup);

  const auto& text = reference.at("teacher_forced");
  const auto ids = to_ids(text.at("ids").get<std::vector<std::int32_t>>());
  check_logits(model.weights, ids);
  check_likelihoods(model.weights, ids, text.at("mean_nll").get<double>());
}

TEST_CASE("stories260K says the same on CUDA as its reference") { check_reference_model("stories260K"); }

TEST_CASE("stories15M says the same on CUDA as its reference") { check_reference_model("stories15M"); }

TEST_CASE("on CUDA a sequence samples the same text alone, in company and in a batch of another size") {
  if (nothing_to_run_on()) return;
  const auto weights = generate::load_hugging_face(tiny_hugging_face("cuda_isolation", 11));
  prompt_list prompts;
  for (std::int32_t p = 0; p < 40; ++p) {
    prompts.emplace_back();
    for (std::int32_t i = 0; i <= p; ++i) prompts.back().push_back(token_id{(p * 37 + i * 11) % 255 + 1});
  }
  generation_setup setup = on_cuda({});
  setup.max_positions = 64;
  setup.how = {1.5f, 0.98f};
  setup.seed = 77;
  const generation_result together = continue_prompts(weights, prompts, setup);
  setup.max_batch_seqs = 3;
  CHECK(continue_prompts(weights, prompts, setup).outputs == together.outputs);
  const generation_result alone = continue_prompts(weights, {prompts[0]}, setup);
  CHECK(alone.outputs[0] == together.outputs[0]);  // the same number, and so the same random numbers
}

TEST_CASE("on CUDA the logits of a step have the same bits for a token alone and at any place of a full batch") {
  if (nothing_to_run_on()) return;
  const auto model = generate::load_model(generate::find_bundled_model(), {});
  const auto lanes = generate::make_lanes(1);
  const auto placed = generate::place_model("cuda", model.weights, *lanes);
  // Attention that sees nothing else: what is compared are the model's own layers.
  class own_value final : public generate::attention_layer {
   public:
    own_value(bifolio::backend& where, bifolio::stream_ref stream) : where_(where), stream_(stream) {}
    void run(std::int32_t, const bifolio::const_tensor_view& q, const bifolio::const_tensor_view&,
             const bifolio::const_tensor_view&, const bifolio::tensor_view& out) override {
      const auto width = static_cast<std::size_t>(out.token_stride);
      std::vector<float> rows(width * static_cast<std::size_t>(out.num_tokens));
      for (std::int64_t t = 0; t < q.num_tokens; ++t) {
        REQUIRE(where_.download(rows.data() + static_cast<std::size_t>(t) * width,
                                static_cast<const float*>(q.data) + t * q.token_stride, width * sizeof(float),
                                stream_) == bifolio::errc::ok);
      }
      REQUIRE(where_.synchronize(stream_) == bifolio::errc::ok);
      REQUIRE(where_.upload(out.data, rows.data(), rows.size() * sizeof(float), stream_) == bifolio::errc::ok);
      REQUIRE(where_.synchronize(stream_) == bifolio::errc::ok);
    }

   private:
    bifolio::backend& where_;
    bifolio::stream_ref stream_;
  } attention(*placed.where, placed.runner->stream());

  const auto vocab = static_cast<std::size_t>(model.weights.config.vocab_size);
  const auto logits_of = [&](std::int32_t num_tokens, std::int32_t place) {
    std::vector<token_id> tokens;
    std::vector<std::int32_t> positions, rows;
    for (std::int32_t i = 0; i < num_tokens; ++i) {
      tokens.push_back(token_id{i == place ? 97 : (i * 31) % 255});
      positions.push_back(i == place ? 42 : i);
      rows.push_back(i);
    }
    const auto all = placed.runner->forward(tokens, positions, rows, attention);
    const auto row = all.subspan(static_cast<std::size_t>(place) * vocab, vocab);
    return std::vector<float>(row.begin(), row.end());
  };
  const std::vector<float> alone = logits_of(1, 0);
  for (const auto& batch :
       std::vector<std::pair<std::int32_t, std::int32_t>>{{2, 1}, {31, 17}, {32, 31}, {33, 32}, {200, 3}, {200, 77}}) {
    CAPTURE(batch.first);   // tokens
    CAPTURE(batch.second);  // the place among them
    CHECK(std::memcmp(logits_of(batch.first, batch.second).data(), alone.data(), vocab * sizeof(float)) == 0);
  }
}

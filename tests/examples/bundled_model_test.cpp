// SPDX-License-Identifier: Apache-2.0
// The model that is committed with examples/generate, against what Hugging Face's implementation gives for it in
// float64 (model/reference.json, made by tools/train).
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "generation_fixture.hpp"
#include "loaded_model.hpp"
#include "support/token_ids.hpp"

namespace {

using namespace bifolio::test;
using bifolio::token_id;
using nlohmann::json;

struct bundled {
  generate::loaded_model model = generate::load_model(generate::find_bundled_model(), {});
  json reference = json::parse(std::ifstream(generate::find_bundled_model() / "reference.json"));
};

/// Reads rows[i][key] as ids.
std::vector<std::vector<token_id>> ids_of(const json& rows, const char* key) {
  std::vector<std::vector<token_id>> result;
  for (const json& row : rows) result.push_back(to_ids(row.at(key).get<std::vector<std::int32_t>>()));
  return result;
}

void check_greedy(const bundled& b, const generation_result& got) {
  const json& rows = b.reference.at("greedy");
  REQUIRE(!rows.empty());
  const auto expected = ids_of(rows, "output_ids");
  for (std::size_t i = 0; i < expected.size(); ++i) {
    CAPTURE(rows[i].at("name").get<std::string>());
    CHECK(got.outputs[i] == expected[i]);
    CHECK(got.ended_by[i] == (expected[i].back() == token_id{0} ? "bos" : "steps"));
  }
}

/// The reference stops after as many positions.
generation_setup reference_setup() {
  generation_setup setup;
  setup.max_positions = 300;
  return setup;
}

}  // namespace

TEST_CASE("the bundled model encodes prompts as the reference does") {
  const bundled b;
  for (const json& row : b.reference.at("greedy")) {
    CHECK(b.model.tokens->encode(row.at("prompt").get<std::string>()) ==
          to_ids(row.at("prompt_ids").get<std::vector<std::int32_t>>()));
  }
  const json& text = b.reference.at("teacher_forced");
  CHECK(b.model.tokens->encode(text.at("text").get<std::string>()) ==
        to_ids(text.at("ids").get<std::vector<std::int32_t>>()));
}

TEST_CASE("the bundled model continues all prompts of the reference in one batch as Hugging Face's code does") {
  const bundled b;
  const auto prompts = ids_of(b.reference.at("greedy"), "prompt_ids");
  check_greedy(b, continue_prompts(b.model.weights, prompts, reference_setup()));
}

TEST_CASE("the bundled model says the same from a pool that preempts, in other blocks and another layout") {
  const bundled b;
  const auto prompts = ids_of(b.reference.at("greedy"), "prompt_ids");
  generation_setup setup = reference_setup();
  setup.block_size = 32;
  setup.num_blocks = bifolio::blocks_for(setup.max_positions, setup.block_size) * 4;
  setup.layout = bifolio::layout_kind::nhd;
  const generation_result got = continue_prompts(b.model.weights, prompts, setup);
  check_greedy(b, got);
  CHECK(got.stats.schedule.num_preemptions > 0);
}

TEST_CASE("the bundled model's logits through the paged cache are those of Hugging Face's code") {
  const bundled b;
  double worst = 0;
  const auto compare = [&](const std::vector<token_id>& fed, const json& positions) {
    const auto logits = paged_logits(b.model.weights, fed, 100);
    for (const json& at : positions) {
      for (const json& pair : at.at("top")) {
        const float got = logits[at.at("position").get<std::size_t>()][pair[0].get<std::size_t>()];
        worst = std::max(worst, std::abs(static_cast<double>(got) - pair[1].get<double>()));
      }
    }
  };
  for (const json& row : b.reference.at("greedy")) {
    auto ids = to_ids(row.at("prompt_ids").get<std::vector<std::int32_t>>());
    const auto outputs = to_ids(row.at("output_ids").get<std::vector<std::int32_t>>());
    ids.insert(ids.end(), outputs.begin(), outputs.end() - 1);
    compare(ids, row.at("top_logits"));
  }
  const json& text = b.reference.at("teacher_forced");
  compare(to_ids(text.at("ids").get<std::vector<std::int32_t>>()), text.at("top_logits"));
  MESSAGE("largest difference of a logit " << worst);
  CHECK(worst > 0);  // something was compared
  CHECK(worst < 2e-4);
}

TEST_CASE("the bundled model finds a text it has not seen as probable as the reference says") {
  const bundled b;
  const json& text = b.reference.at("teacher_forced");
  const auto ids = to_ids(text.at("ids").get<std::vector<std::int32_t>>());
  const auto scored = [&](bifolio::dtype kv_type, bifolio::dtype query_type = bifolio::dtype::f32) {
    generation_setup setup;
    setup.kv_type = kv_type;
    setup.query_type = query_type;
    return score_text(b.model.weights, ids, setup, 128);
  };
  const generate::score f32 = scored(bifolio::dtype::f32);
  const auto expected = text.at("nll").get<std::vector<double>>();
  REQUIRE(f32.nll.size() == expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) CHECK(std::abs(f32.nll[i] - expected[i]) < 2e-4);
  CHECK(std::abs(f32.mean_nll - text.at("mean_nll").get<double>()) < 1e-5);
  CHECK(f32.mean_nll / std::log(2.0) <= 1.9);  // bits per byte
  for (const auto narrow : {bifolio::dtype::f16, bifolio::dtype::bf16}) {
    const double moved = scored(narrow).mean_nll - f32.mean_nll;
    MESSAGE("mean nll " << f32.mean_nll << ", moved by " << moved << " with KV in " << std::string(to_string(narrow)));
    CHECK(std::abs(moved) <= 2e-3);
    const double all_narrow = scored(narrow, narrow).mean_nll;
    CHECK(all_narrow != f32.mean_nll + moved);  // queries are rounded too
    CHECK(std::abs(all_narrow - f32.mean_nll) <= nll_bound);
  }
}

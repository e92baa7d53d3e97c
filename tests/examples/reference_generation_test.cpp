// SPDX-License-Identifier: Apache-2.0
// Real models through the paged cache against the outputs of their reference program: all rows of a model in one
// continuous batch.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>

#include "checkpoint.hpp"
#include "generation_fixture.hpp"
#include "reference_files.hpp"
#include "support/skip.hpp"
#include "support/token_ids.hpp"

namespace {

using namespace bifolio::test;
using bifolio::dtype;
using bifolio::layout_kind;
using bifolio::token_id;

constexpr const char* absent = "the folder of the reference models is absent";

std::vector<std::vector<token_id>> prompts_of(const reference_model& reference) {
  std::vector<std::vector<token_id>> prompts;
  for (const reference_row& row : reference.rows) prompts.push_back(to_ids(row.prompt_ids));
  return prompts;
}

void check_outputs(const reference_model& reference, const generation_result& result, std::size_t num_samples = 1) {
  REQUIRE(result.outputs.size() == reference.rows.size() * num_samples);
  for (std::size_t i = 0; i < result.outputs.size(); ++i) {
    const reference_row& row = reference.rows[i / num_samples];
    CAPTURE(row.id);
    CHECK(result.outputs[i] == to_ids(row.output_ids));
    CHECK(result.ended_by[i] == row.ended_by);
  }
}

void check_logits(const char* name) {
  const auto reference = find_reference_model(name);
  if (!reference) return skip(absent);
  const auto weights = generate::load_llama2c(reference->weights);
  double worst = 0;
  for (const reference_row& row : reference->rows) {
    std::vector<token_id> ids = to_ids(row.prompt_ids);
    const std::vector<token_id> outputs = to_ids(row.output_ids);
    ids.insert(ids.end(), outputs.begin(), outputs.end() - 1);
    const auto logits = paged_logits(weights, ids, 48);
    for (const reference_logits& expected : reference->logits) {
      if (expected.id != row.id) continue;
      for (const auto& [id, logit] : expected.largest) {
        const float got = logits[static_cast<std::size_t>(expected.position)][static_cast<std::size_t>(id)];
        worst = std::max(worst, std::abs(static_cast<double>(got) - logit));
      }
    }
  }
  MESSAGE(std::string(name) << ": largest difference of a logit " << worst);
  CHECK(worst > 0);  // something was compared
  CHECK(worst < 2e-4);
}

double mean_nll(const generate::checkpoint& weights, const std::vector<token_id>& ids, dtype kv_type,
                std::int32_t chunk = 64, layout_kind layout = layout_kind::hnd, std::int32_t block_size = 16) {
  generation_setup setup;
  setup.kv_type = kv_type;
  setup.layout = layout;
  setup.block_size = block_size;
  return score_text(weights, ids, setup, chunk).mean_nll;
}

void check_likelihoods(const char* name) {
  const auto reference = find_reference_model(name);
  if (!reference) return skip(absent);
  const auto weights = generate::load_llama2c(reference->weights);
  REQUIRE(!reference->texts.empty());
  for (const reference_nll& text : reference->texts) {
    const auto ids = to_ids(text.ids);
    const double f32 = mean_nll(weights, ids, dtype::f32);
    CHECK(std::abs(f32 - text.mean) < 1e-5);
    CHECK(mean_nll(weights, ids, dtype::f32, 17) == f32);  // chunking changes no bit
    CHECK(std::abs(mean_nll(weights, ids, dtype::f32, 64, layout_kind::x_split, 5) - text.mean) < 1e-5);
    const double f16 = mean_nll(weights, ids, dtype::f16);
    const double bf16 = mean_nll(weights, ids, dtype::bf16);
    MESSAGE(std::string(name) << ": mean nll " << f32 << ", moved by " << f16 - f32 << " with f16 and " << bf16 - f32
                              << " with bf16 KV");
    CHECK(std::abs(f16 - f32) <= 2e-3);
    CHECK(std::abs(bf16 - f32) <= 2e-3);
    CHECK(f16 != f32);  // the narrow types are in use
    CHECK(bf16 != f32);
  }
}

}  // namespace

TEST_CASE("stories260K: every row of the reference comes out of one continuous batch, in every setting of the cache") {
  const auto reference = find_reference_model("stories260K");
  if (!reference) return skip(absent);
  const auto weights = generate::load_llama2c(reference->weights);
  const auto prompts = prompts_of(*reference);

  std::vector<std::pair<const char*, generation_setup>> setups;
  const auto with = [&](const char* name, auto change) {
    change(setups.emplace_back(name, generation_setup{}).second);
  };
  with("as it is", [](generation_setup&) {});
  with("blocks of 1", [](generation_setup& s) { s.block_size = 1; });
  with("blocks of 5", [](generation_setup& s) { s.block_size = 5; });
  with("blocks of 128", [](generation_setup& s) { s.block_size = 128; });
  with("nhd", [](generation_setup& s) { s.layout = layout_kind::nhd; });
  with("x_split", [](generation_setup& s) { s.layout = layout_kind::x_split; });
  with("2 threads", [](generation_setup& s) { s.num_threads = 2; });
  with("7 tokens a step", [](generation_setup& s) { s.max_batch_tokens = 7; });
  with("1 token a step", [](generation_setup& s) { s.max_batch_tokens = 1; });
  with("2 sequences a step", [](generation_setup& s) { s.max_batch_seqs = 2; });
  for (const auto& named : setups) {
    CAPTURE(named.first);
    check_outputs(*reference, continue_prompts(weights, prompts, named.second));
  }
}

TEST_CASE("stories260K: a pool that is too small for all preempts, and the text is the same") {
  const auto reference = find_reference_model("stories260K");
  if (!reference) return skip(absent);
  const auto weights = generate::load_llama2c(reference->weights);
  for (const std::int32_t block_size : {16, 5}) {
    generation_setup setup;
    setup.block_size = block_size;
    setup.num_blocks = bifolio::blocks_for(setup.max_positions, block_size) + 8;  // one sequence and a bit
    const generation_result result = continue_prompts(weights, prompts_of(*reference), setup);
    check_outputs(*reference, result);
    CHECK(result.stats.schedule.num_preemptions > 0);
    CHECK(result.stats.cache.peak_used_blocks <= setup.num_blocks);
    CHECK(result.stats.cache.num_used_blocks == 0);
  }
}

TEST_CASE("stories260K: greedy samples of a prompt are all the reference's, share its blocks and copy on write") {
  const auto reference = find_reference_model("stories260K");
  if (!reference) return skip(absent);
  const auto weights = generate::load_llama2c(reference->weights);
  generation_setup setup;
  setup.num_samples = 3;
  const generation_result result = continue_prompts(weights, prompts_of(*reference), setup);
  check_outputs(*reference, result, 3);
  CHECK(result.stats.cache.num_forks == 2 * static_cast<std::int64_t>(reference->rows.size()));
  CHECK(result.stats.cache.num_copied_blocks > 0);
  CHECK(result.stats.record.peak_table_entries > result.stats.cache.peak_used_blocks);
}

TEST_CASE("stories15M: every row of the reference comes out of one continuous batch, roomy or with preemptions") {
  const auto reference = find_reference_model("stories15M");
  if (!reference) return skip(absent);
  const auto weights = generate::load_llama2c(reference->weights);
  const auto prompts = prompts_of(*reference);
  generation_setup setup;
  check_outputs(*reference, continue_prompts(weights, prompts, setup));

  setup.num_blocks = bifolio::blocks_for(setup.max_positions, setup.block_size) + 6;
  setup.layout = layout_kind::nhd;
  setup.max_batch_tokens = 40;
  const generation_result result = continue_prompts(weights, prompts, setup);
  check_outputs(*reference, result);
  CHECK(result.stats.schedule.num_preemptions > 0);
}

TEST_CASE("stories260K: logits through the paged cache are the reference's") { check_logits("stories260K"); }

TEST_CASE("stories15M: logits through the paged cache are the reference's") { check_logits("stories15M"); }

TEST_CASE("stories260K: likelihoods are the reference's, and narrow caches move them little") {
  check_likelihoods("stories260K");
}

TEST_CASE("stories15M: likelihoods are the reference's, and narrow caches move them little") {
  check_likelihoods("stories15M");
}

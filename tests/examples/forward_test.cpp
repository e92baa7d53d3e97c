// SPDX-License-Identifier: Apache-2.0
// The model by itself, on attention over contiguous float64 sums: loaders, tokenizer, forward pass and sampler are
// right before the paged cache comes in.
#include <doctest/doctest.h>

#include <bifolio/cpu.hpp>
#include <bifolio/executor.hpp>
#include <cstring>
#include <random>

#include "contiguous_attention.hpp"
#include "generation_fixture.hpp"
#include "llama.hpp"
#include "loaded_model.hpp"
#include "model_fixtures.hpp"
#include "reference_files.hpp"
#include "sampler.hpp"
#include "support/random.hpp"
#include "support/skip.hpp"
#include "support/token_ids.hpp"
#include "tokenizer.hpp"

namespace {

using namespace bifolio::test;
using bifolio::token_id;
using generate::linear;

/// Logits after every token of one sequence, fed `chunk` tokens at a time.
std::vector<std::vector<float>> all_logits(generate::llama& model, const std::vector<token_id>& ids,
                                           std::size_t chunk) {
  contiguous_attention attention;
  std::vector<std::vector<float>> result;
  const auto vocab = static_cast<std::size_t>(model.config().vocab_size);
  for (std::size_t begin = 0; begin < ids.size(); begin += chunk) {
    const std::size_t count = std::min(chunk, ids.size() - begin);
    std::vector<std::int32_t> positions, rows;
    for (std::size_t i = 0; i < count; ++i) {
      positions.push_back(static_cast<std::int32_t>(begin + i));
      rows.push_back(static_cast<std::int32_t>(i));
    }
    const auto logits = model.forward(std::span(ids).subspan(begin, count), positions, rows, attention);
    for (std::size_t i = 0; i < count; ++i) {
      result.emplace_back(logits.begin() + static_cast<std::ptrdiff_t>(i * vocab),
                          logits.begin() + static_cast<std::ptrdiff_t>((i + 1) * vocab));
    }
  }
  return result;
}

void check_against_references(const char* name) {
  const auto reference = find_reference_model(name);
  if (!reference) return skip("the folder of the reference models is absent");
  const auto checkpoint = generate::load_llama2c(reference->weights);
  const auto tokens = generate::load_bpe_tokenizer(reference->tokenizer, checkpoint.config.vocab_size);
  const auto workers = bifolio::make_executor(bifolio::executor_kind::serial);
  generate::llama model(checkpoint, *workers);

  REQUIRE(!reference->rows.empty());
  for (const reference_row& row : reference->rows) {
    CAPTURE(row.id);
    CHECK(tokens->encode(row.prompt) == to_ids(row.prompt_ids));
    std::vector<token_id> ids = to_ids(row.prompt_ids);
    const std::vector<token_id> outputs = to_ids(row.output_ids);
    ids.insert(ids.end(), outputs.begin(), outputs.end() - 1);  // the last is chosen, not fed
    const auto logits = all_logits(model, ids, 64);
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      CHECK(generate::largest_logit(logits[row.prompt_ids.size() - 1 + i]) == outputs[i]);
    }
    for (const reference_logits& expected : reference->logits) {
      if (expected.id != row.id) continue;
      CAPTURE(expected.position);
      const std::vector<float>& got = logits[static_cast<std::size_t>(expected.position)];
      CHECK(ids[static_cast<std::size_t>(expected.position)] == token_id{expected.token_in});
      double sum = 0, squares = 0;
      for (const float l : got) {
        sum += static_cast<double>(l);
        squares += static_cast<double>(l) * static_cast<double>(l);
      }
      const auto count = static_cast<double>(got.size());
      CHECK(std::abs(sum / count - expected.mean) < 2e-4);
      CHECK(std::abs(std::sqrt(squares / count) - expected.rms) < 2e-4);
      for (const auto& [id, logit] : expected.largest) {
        CHECK(std::abs(static_cast<double>(got[static_cast<std::size_t>(id)]) - logit) < 2e-4);
      }
    }
  }
  for (const reference_nll& text : reference->texts) {
    const auto ids = to_ids(text.ids);
    const auto logits = all_logits(model, {ids.begin(), ids.end() - 1}, 100);
    REQUIRE(logits.size() == text.per_position.size());
    double sum = 0;
    for (std::size_t i = 0; i < logits.size(); ++i) {
      const double nll = generate::negative_log_likelihood(logits[i], ids[i + 1]);
      CHECK(std::abs(nll - text.per_position[i]) < 2e-4);
      sum += nll;
    }
    CHECK(std::abs(sum / static_cast<double>(logits.size()) - text.mean) < 1e-5);
  }
}

}  // namespace

TEST_CASE("stories260K on contiguous attention gives the reference's ids, logits and likelihoods") {
  check_against_references("stories260K");
}

TEST_CASE("stories15M on contiguous attention gives the reference's ids, logits and likelihoods") {
  check_against_references("stories15M");
}

TEST_CASE("a text begun on one instruction set and ended on another keeps its bytes, and its logits nearly") {
  // cuda_model_test.cpp does the same between the CPU and a GPU.
  const std::vector<bifolio::cpu_isa> isas = bifolio::supported_isas();
  const auto model = generate::load_model(random_hugging_face("moved", test_seed(), {.num_layers = 2}), {});
  const std::vector<token_id> ids = random_bytes(test_seed(), 160);
  CAPTURE(seed_note());
  for (const bifolio::dtype type : {bifolio::dtype::bf16, bifolio::dtype::f16}) {
    const double bound = logit_bound(model.weights, ids, type);
    generation_setup begun;
    begun.query_type = begun.kv_type = type;
    begun.isa = isas.front();
    generation_setup ended = begun;
    ended.isa = isas.back();
    for (const bool back : {false, true}) {
      const moved_text moved = move_text(model.weights, ids, 100, back ? ended : begun, back ? begun : ended);
      CAPTURE(std::string(to_string(type)));
      CHECK(moved.equal_bytes);
      CHECK(moved.logits_against_begun <= bound);
      CHECK(moved.logits_against_ended <= bound);
      CHECK(moved.nll_against_begun <= nll_bound);
      CHECK(moved.nll_against_ended <= nll_bound);
    }
  }
}

// SPDX-License-Identifier: Apache-2.0
// What a sequence says depends on its prompt, the seed and its own number, and on nothing else: not on the other
// sequences in the batch, the number of threads, the chunking of prompts, or a pool so small that it was preempted.
// Sampling makes that a test of every bit of the logits that matters. The model has random weights.
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <random>

#include "generation_fixture.hpp"
#include "input_error.hpp"
#include "linear.hpp"
#include "model_fixtures.hpp"
#include "reference_files.hpp"
#include "sampler.hpp"
#include "tokenizer.hpp"

namespace {

using namespace bifolio::test;
using bifolio::token_id;
using generate::linear;

generate::checkpoint tiny_model() { return generate::load_hugging_face(tiny_hugging_face("isolation", 11)); }

std::vector<std::vector<token_id>> some_prompts(std::size_t count) {
  std::mt19937_64 random(5);
  std::vector<std::vector<token_id>> prompts(count);
  for (auto& prompt : prompts) {
    prompt.resize(1 + random() % 40);
    for (token_id& id : prompt) id = token_id{static_cast<std::int32_t>(random() % 255 + 1)};
  }
  return prompts;
}

generation_setup sampling_setup() {
  generation_setup setup;
  setup.max_positions = 64;
  setup.how = {1.5f, 0.98f};
  setup.seed = 77;
  setup.block_size = 8;
  return setup;
}

}  // namespace

TEST_CASE("a sequence says the same alone, in company, in chunks, preempted, and on any number of threads") {
  const auto weights = tiny_model();
  const auto prompts = some_prompts(9);
  const generation_setup plain = sampling_setup();
  const generation_result expected = continue_prompts(weights, prompts, plain);

  const auto check_same = [&](const char* name, const generation_setup& setup) {
    CAPTURE(name);
    const generation_result got = continue_prompts(weights, prompts, setup);
    CHECK(got.outputs == expected.outputs);
    CHECK(got.ended_by == expected.ended_by);
    return got.stats;
  };
  generation_setup setup = plain;
  setup.num_threads = 3;
  check_same("3 threads", setup);
  setup = plain;
  setup.max_batch_tokens = 5;
  check_same("5 tokens a step", setup);
  setup = plain;
  setup.max_batch_seqs = 1;
  check_same("one sequence after another", setup);
  setup = plain;
  setup.num_blocks = 12;
  CHECK(check_same("a pool that preempts", setup).schedule.num_preemptions > 0);

  // Sequence 0 of a batch of its own has the same number and prompt.
  const generation_result alone = continue_prompts(weights, {prompts[0]}, plain);
  CHECK(alone.outputs[0] == expected.outputs[0]);
}

TEST_CASE("a sequence says the same whether its prefix was found or computed, and whether it was swapped") {
  const auto weights = tiny_model();
  auto prompts = some_prompts(6);
  for (std::size_t i = 1; i < prompts.size(); ++i) {  // all but the first go on where it ends, or repeat it
    prompts[i].insert(prompts[i].begin(), prompts[0].begin(), prompts[0].end());
  }
  prompts[0].resize(32, token_id{7});
  for (std::size_t i = 1; i < prompts.size(); ++i) prompts[i].insert(prompts[i].begin(), 32, token_id{7});
  prompts.push_back(std::vector<token_id>(32, token_id{7}));  // cached to its very end
  generation_setup plain = sampling_setup();
  plain.max_positions = 150;
  for (const std::int32_t samples : {1, 3}) {
    plain.num_samples = samples;
    const generation_result expected = continue_prompts(weights, prompts, plain);
    CHECK(expected.stats.prefix.num_hit_blocks == 0);
    const auto check_same = [&](const char* name, const generation_setup& setup) {
      CAPTURE(name);
      CAPTURE(samples);
      const generation_result got = continue_prompts(weights, prompts, setup);
      CHECK(got.outputs == expected.outputs);
      CHECK(got.ended_by == expected.ended_by);
      return got.stats;
    };
    generation_setup setup = plain;
    setup.prefix_caching = true;
    setup.max_batch_seqs = samples;  // one prompt after another
    CHECK(check_same("prefixes found", setup).prefix.num_hit_blocks >= 4 * 6);

    setup = plain;
    setup.num_blocks = 40;
    setup.num_host_blocks = 400;
    const auto swapped = check_same("swapped", setup);
    CHECK(swapped.cache.num_swapped_out_blocks > 0);
    CHECK(swapped.cache.num_swapped_in_blocks > 0);

    setup.prefix_caching = true;
    setup.max_batch_tokens = 9;
    check_same("swapped, found and in chunks", setup);
    setup.num_host_blocks = 0;
    CHECK(check_same("computed again from what is still cached", setup).schedule.num_preemptions > 0);
  }
}

TEST_CASE("samples of a prompt differ, repeat with the seed and change with it; greedy ones are all the same") {
  const auto weights = tiny_model();
  const auto prompts = some_prompts(2);
  generation_setup setup = sampling_setup();
  setup.num_samples = 4;
  const generation_result once = continue_prompts(weights, prompts, setup);
  CHECK(once.outputs == continue_prompts(weights, prompts, setup).outputs);
  CHECK(once.outputs[0] != once.outputs[1]);
  CHECK(once.stats.cache.num_forks == 6);
  CHECK(once.stats.cache.num_copied_blocks > 0);
  CHECK(once.stats.record.peak_table_entries > once.stats.cache.peak_used_blocks);
  setup.seed = 78;
  CHECK(once.outputs != continue_prompts(weights, prompts, setup).outputs);

  setup.how.temperature = 0;
  const generation_result greedy = continue_prompts(weights, prompts, setup);
  for (std::size_t i = 0; i < greedy.outputs.size(); ++i) CHECK(greedy.outputs[i] == greedy.outputs[i / 4 * 4]);
}

TEST_CASE("samples that are preempted after their fork say the same as undisturbed ones") {
  const auto weights = tiny_model();
  const auto prompts = some_prompts(3);
  generation_setup setup = sampling_setup();
  setup.num_samples = 3;
  const generation_result expected = continue_prompts(weights, prompts, setup);
  setup.num_blocks = 12;
  const generation_result squeezed = continue_prompts(weights, prompts, setup);
  CHECK(squeezed.outputs == expected.outputs);
  CHECK(squeezed.stats.schedule.num_preemptions > 0);
}

TEST_CASE("a sequence stops when max_positions tokens were fed, prompt included") {
  const auto weights = tiny_model();
  std::vector<std::vector<token_id>> prompts(1, std::vector<token_id>(10, token_id{65}));
  generation_setup setup = sampling_setup();
  for (const std::int32_t limit : {64, 40, 11, 10}) {
    setup.max_positions = limit;
    setup.seed = 3;
    const generation_result result = continue_prompts(weights, prompts, setup);
    CAPTURE(limit);
    if (result.ended_by[0] == "steps") {
      CHECK(result.outputs[0].size() == static_cast<std::size_t>(limit - 10 + 1));  // the last is not fed
    } else {
      CHECK(result.ended_by[0] == "bos");
      CHECK(result.outputs[0].back() == token_id{0});
    }
  }
  setup.max_positions = 9;  // a longer prompt is not fed at all
  const generation_result cut = continue_prompts(weights, prompts, setup);
  CHECK(cut.outputs[0].empty());
  CHECK(cut.ended_by[0] == "steps");
}

TEST_CASE("a pool too small for one sequence is refused with the blocks it needs") {
  generation_setup setup = sampling_setup();
  setup.num_blocks = 3;
  try {
    static_cast<void>(continue_prompts(tiny_model(), some_prompts(1), setup));
    FAIL_CHECK("it was accepted");
  } catch (const generate::input_error& problem) {
    const std::string sentence = problem.what();
    CHECK(sentence.find("8 blocks of 8") != std::string::npos);
    CHECK(sentence.find("pool of 3 blocks") != std::string::npos);
  }
}

TEST_CASE("a linear layer gives a token the same bits in any batch, on any number of threads") {
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  for (const auto type : {bifolio::dtype::f32, bifolio::dtype::bf16}) {
    for (const auto& [outputs, inputs] : {std::pair{37, 19}, {1, 1}, {16, 64}, {130, 33}}) {
      linear matrix(outputs, inputs, type);
      std::vector<float> weights(static_cast<std::size_t>(outputs * inputs)), x(static_cast<std::size_t>(23 * inputs));
      for (float& w : weights) w = bifolio::to_float(bifolio::from_float<bifolio::bfloat16>(normal(random)));
      for (float& value : x) value = normal(random);
      matrix.set_rows(0, weights.data(), outputs);
      std::vector<float> row(static_cast<std::size_t>(inputs));
      matrix.copy_row(outputs - 1, row.data());
      CHECK(std::memcmp(row.data(), weights.data() + (outputs - 1) * inputs, row.size() * sizeof(float)) == 0);

      const auto one_worker = generate::make_workers(1);
      const auto three_workers = generate::make_workers(3);
      std::vector<float> all(static_cast<std::size_t>(23 * outputs)), threaded(all.size()), single(all.size());
      matrix.apply(*one_worker, x.data(), 23, all.data());
      matrix.apply(*three_workers, x.data(), 23, threaded.data());
      for (int t = 0; t < 23; ++t) matrix.apply(*one_worker, x.data() + t * inputs, 1, single.data() + t * outputs);
      CHECK(std::memcmp(all.data(), threaded.data(), all.size() * sizeof(float)) == 0);
      CHECK(std::memcmp(all.data(), single.data(), all.size() * sizeof(float)) == 0);
      for (int t = 0; t < 23; ++t) {
        for (int o = 0; o < outputs; ++o) {
          double sum = 0, size = 0;
          for (int i = 0; i < inputs; ++i) {
            const double product = static_cast<double>(weights[static_cast<std::size_t>(o * inputs + i)]) *
                                   static_cast<double>(x[static_cast<std::size_t>(t * inputs + i)]);
            sum += product;
            size += std::abs(product);
          }
          CHECK(std::abs(static_cast<double>(all[static_cast<std::size_t>(t * outputs + o)]) - sum) <= 1e-5 * size);
        }
      }
    }
  }
}

TEST_CASE("the sampler takes the lower id on a tie, the best at temperature 0, and only the nucleus under top-p") {
  const std::vector<float> logits{1, 3, 3, -std::numeric_limits<float>::infinity(), 2};
  CHECK(generate::largest_logit(logits) == token_id{1});
  generate::sampler greedy({0, 1}, 1, 0);
  CHECK(greedy.choose(logits) == token_id{1});

  generate::sampler all({1, 1}, 9, 0), nucleus({1, 0.5f}, 9, 0);
  std::vector<int> counts(5), nucleus_counts(5);
  constexpr int rounds = 20000;
  for (int i = 0; i < rounds; ++i) {
    ++counts[static_cast<std::size_t>(to_index(all.choose(logits)))];
    ++nucleus_counts[static_cast<std::size_t>(to_index(nucleus.choose(logits)))];
  }
  const double sum = std::exp(1.0) + 2 * std::exp(3.0) + std::exp(2.0);
  for (std::size_t i = 0; i < counts.size(); ++i) {
    const double expected = std::exp(static_cast<double>(logits[i])) / sum;
    CHECK(std::abs(counts[i] / static_cast<double>(rounds) - expected) < 0.02);
  }
  CHECK(nucleus_counts[1] + nucleus_counts[2] == rounds);  // 0.417 alone is too little, two of them are enough
  CHECK(nucleus_counts[1] > 0);
  CHECK(nucleus_counts[2] > 0);

  const std::vector<float> broken(4, std::numeric_limits<float>::quiet_NaN());
  CHECK_THROWS_AS(static_cast<void>(greedy.choose(broken)), generate::input_error);
}

TEST_CASE("likelihoods are those of the softmax") {
  const std::vector<float> logits{0, 1, 2};
  const double sum = 1 + std::exp(1.0) + std::exp(2.0);
  for (std::int32_t i = 0; i < 3; ++i) {
    CHECK(std::abs(generate::negative_log_likelihood(logits, token_id{i}) - (std::log(sum) - i)) < 1e-12);
  }
}

TEST_CASE("byte tokens go to text and back, and special ids give no text") {
  const auto bytes = generate::make_byte_tokenizer(token_id{0});
  std::string all;
  for (int byte = 1; byte < 256; ++byte) all += static_cast<char>(byte);
  std::vector<token_id> ids = bytes->encode(all);
  CHECK(ids.size() == 256);
  CHECK(ids[0] == token_id{0});
  CHECK(bytes->decode_all(ids) == all);
  ids.push_back(token_id{0});
  CHECK(bytes->decode_all(ids) == all);
  CHECK(bytes->encode("").size() == 1);

  const auto path = scratch_directory() / "isolation.tok";
  std::ofstream(path, std::ios::binary) << tiny_tokenizer(300);
  const auto pieces = generate::load_bpe_tokenizer(path, 300);
  for (const std::string& text :
       {std::string("abc de"), std::string("\xe2\x82\xac \xff\x80"), std::string("A\nB"), std::string()}) {
    CHECK(pieces->decode_all(pieces->encode(text)) == text);
  }
  CHECK(pieces->encode("").size() == 1);
  CHECK(pieces->encode("ab").size() == 3);  // begin, space, one merged piece
}

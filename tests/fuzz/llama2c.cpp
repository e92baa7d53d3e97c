// SPDX-License-Identifier: Apache-2.0
// A llama2.c checkpoint: the bytes as they are, or a header of plausible numbers with exactly the arrays that it
// announces, which is then run for some tokens, with a paged cache and without.
#include <algorithm>
#include <array>
#include <bifolio/error.hpp>
#include <bifolio/executor.hpp>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint.hpp"
#include "choices.hpp"
#include "examples/contiguous_attention.hpp"
#include "examples/generation_fixture.hpp"
#include "fuzz_target.hpp"
#include "llama.hpp"
#include "scratch_files.hpp"
#include "tools/common/program.hpp"

namespace {

using namespace bifolio::fuzz;

/// Header and arrays. The number of bytes after the header is computed here once more, from the format's description.
std::vector<std::uint8_t> plausible_file(choices& from) {
  const std::int32_t num_kv_heads = 1 + from.below(3);
  const std::int32_t num_q_heads = num_kv_heads * (1 + from.below(3)) + (from.below(16) == 0 ? 1 : 0);
  const std::int32_t head_dim = 2 * (1 + from.below(8)) + (from.below(16) == 0 ? 1 : 0);
  const std::int32_t dim = num_q_heads * head_dim;
  const std::int32_t hidden = 1 + from.below(40);
  const std::int32_t layers = 1 + from.below(3);
  const std::int32_t vocabulary = 2 + from.byte();
  const std::int32_t positions = 1 + from.below(64);
  const bool tied = from.flag();
  const std::array<std::int32_t, 7> header{
      dim, hidden, layers, num_q_heads, num_kv_heads, tied ? vocabulary : -vocabulary, positions};
  const std::int64_t kv_dim = std::int64_t{num_kv_heads} * head_dim;
  const std::int64_t floats = std::int64_t{tied ? 1 : 2} * vocabulary * dim + 2 * layers * dim +
                              2 * std::int64_t{layers} * dim * dim + 2 * layers * kv_dim * dim +
                              3 * std::int64_t{layers} * hidden * dim + dim + std::int64_t{positions} * head_dim;
  std::int64_t num_bytes = 4 * floats;
  if (from.below(8) == 0) num_bytes += static_cast<std::int8_t>(from.byte());

  std::vector<std::uint8_t> file(sizeof(header) + static_cast<std::size_t>(num_bytes));
  std::memcpy(file.data(), header.data(), sizeof(header));
  const auto values = from.rest();
  for (std::size_t at = sizeof(header); at + 4 <= file.size(); at += 4) {
    // Most weights are small, some are whatever the input's bytes say: huge, NaN, infinite.
    float weight = static_cast<float>(at * 7 % 23) * 0.01f - 0.1f;
    if (values.size() >= 4 && at % 28 == 0) std::memcpy(&weight, &values[at % (values.size() - 3)], 4);
    std::memcpy(&file[at], &weight, 4);
  }
  return file;
}

/// The same tokens over contiguous float64 sums, one by one, and through a paged cache, some at a time.
void run_some_tokens(const generate::checkpoint& model, bool is_tame) {
  const std::unique_ptr<bifolio::executor> workers = bifolio::make_executor(bifolio::executor_kind::serial);
  generate::llama runner(model, *workers);
  bifolio::test::contiguous_attention attention;
  const std::int32_t count = std::min(5, model.config.max_positions);
  std::vector<bifolio::token_id> tokens;
  std::vector<std::vector<float>> expected;
  for (std::int32_t position = 0; position < count; ++position) {
    const bifolio::token_id token{position % model.config.vocab_size};
    const std::int32_t row = 0;
    const auto logits = runner.forward({&token, 1}, {&position, 1}, {&row, 1}, attention);
    if (logits.size() != static_cast<std::size_t>(model.config.vocab_size)) flaw("logits of another length");
    tokens.push_back(token);
    expected.emplace_back(logits.begin(), logits.end());
  }
  bifolio::test::generation_setup setup;
  setup.num_blocks = 16;
  setup.block_size = 2;
  const auto paged = bifolio::test::paged_logits(model, tokens, 2, setup);
  const double difference = bifolio::test::largest_difference(paged, expected);
  if (is_tame && !(difference < 1e-3)) flaw("paged attention gives other logits, by " + std::to_string(difference));
}

}  // namespace

BIFOLIO_FUZZ_TARGET(llama2c) {
  choices from(input);
  const bool is_plausible = from.flag();
  const auto path =
      is_plausible ? write_scratch("model.bin", plausible_file(from)) : write_scratch("model.bin", from.rest());
  // Weights of the input may be huge or no numbers.
  const bool is_tame = is_plausible && from.rest().size() < 4;
  try {
    generate::checkpoint model = generate::load_llama2c(path);
    model.config.max_positions = std::min(model.config.max_positions, 64);
    run_some_tokens(model, is_tame);
  } catch (const tools::input_error&) {
  } catch (const bifolio::error&) {  // a cache that is not supported
  }
}

// SPDX-License-Identifier: Apache-2.0
// 5. Continuous batching.
//
// Requests of all lengths come and go; the `scheduler` decides in every step who computes how many tokens, within
// budgets of tokens and blocks. The pool here is too small for everybody: requests wait, and the latest arrivals are
// preempted and computed again. What each says stays the same. The model is one attention layer with random weights.

#include <algorithm>
#include <bifolio/bifolio.hpp>
#include <cmath>
#include <cstdio>
#include <map>
#include <random>
#include <vector>

#include "expect.hpp"

namespace {

using bifolio::token_id;

constexpr std::int32_t vocab = 50, num_q_heads = 2, num_kv_heads = 1, head_dim = 16, block_size = 4, max_new = 24;
constexpr std::int32_t dim = num_q_heads * head_dim;

/// Random tables: what a token asks for, what it offers, what it holds, and how an output reads as a token.
struct model {
  std::vector<float> q, k, v, head;

  model() {
    std::mt19937 random(1);
    const auto fill = [&](std::vector<float>& table, std::int32_t width) {
      for (std::int32_t i = 0; i < vocab * width; ++i) {
        table.push_back((static_cast<float>(random() % 2001) - 1000.0f) / 400.0f);
      }
    };
    fill(q, dim), fill(k, num_kv_heads * head_dim), fill(v, num_kv_heads * head_dim), fill(head, dim);
  }

  static std::vector<float> rows(const std::vector<float>& table, std::int32_t width,
                                 const std::vector<token_id>& tokens, const std::vector<std::int32_t>& positions) {
    std::vector<float> result;
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      for (std::int32_t i = 0; i < width; ++i) {
        result.push_back(table[static_cast<std::size_t>(to_index(tokens[t]) * width + i)] +
                         std::sin(static_cast<float>(positions[t] * (i + 1)) * 0.37f));
      }
    }
    return result;
  }

  [[nodiscard]] token_id best(const float* out) const {
    std::vector<float> logits(vocab);
    for (std::int32_t i = 0; i < vocab * dim; ++i)
      logits[static_cast<std::size_t>(i / dim)] += head[static_cast<std::size_t>(i)] * out[i % dim];
    return token_id{static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin())};
  }
};

using texts = std::map<std::uint64_t, std::vector<token_id>>;  // what each request said

texts serve(const model& weights, std::int64_t num_blocks, bifolio::scheduler_stats& stats) {
  bifolio::kv_cache_config cache;
  cache.block_size = block_size;
  cache.num_blocks = num_blocks;
  bifolio::kv_cache_manager manager(cache);
  bifolio::scheduler_config budget;
  budget.max_tokens_per_step = 16;  // a longer prompt is computed in chunks
  budget.vocab_size = vocab;
  bifolio::scheduler scheduler(manager, budget);
  const auto cpu = bifolio::make_backend();
  const auto layout =
      bifolio::make_layout(bifolio::layout_kind::hnd, bifolio::dtype::f32, num_kv_heads, head_dim, block_size);
  bifolio::cache_engine engine(*cpu, {1, num_blocks, layout});
  bifolio::attention_spec spec;
  spec.num_q_heads = num_q_heads, spec.num_kv_heads = num_kv_heads, spec.head_dim = head_dim,
  spec.block_size = block_size;
  bifolio::attention_plan attention_plan;

  // Six requests with prompts of 3, 10, 17 … tokens.
  for (std::int32_t r = 0; r < 6; ++r) {
    bifolio::request request;
    for (std::int32_t i = 0; i < 3 + 7 * r; ++i) request.prompt.push_back(token_id{(r * 13 + i * 7) % vocab});
    request.max_new_tokens = max_new;
    expect(scheduler.submit(std::move(request)).status == bifolio::alloc_status::ok, "each would fit by itself");
  }

  texts said;
  bifolio::step_inputs inputs;
  for (;;) {
    const bifolio::step_plan& plan = scheduler.schedule();
    if (plan.seqs.empty()) break;
    scheduler.build(inputs);
    expect(engine.copy_blocks(plan.copies) == bifolio::errc::ok, "copies are done first");
    const auto batch = engine.upload(inputs.batch);
    cpu->plan_attention(attention_plan, spec, inputs.batch.view(), num_blocks);

    const auto q = model::rows(weights.q, dim, inputs.tokens, inputs.positions);
    const auto k = model::rows(weights.k, num_kv_heads * head_dim, inputs.tokens, inputs.positions);
    const auto v = model::rows(weights.v, num_kv_heads * head_dim, inputs.tokens, inputs.positions);
    std::vector<float> out(q.size());
    const auto view = [&](const std::vector<float>& rows, std::int32_t num_heads) {
      return bifolio::dense_view<const void>(rows.data(), bifolio::dtype::f32, plan.num_tokens, num_heads, head_dim);
    };
    expect(engine.append(0, view(k, num_kv_heads), view(v, num_kv_heads), batch.slot_mapping) == bifolio::errc::ok,
           "keys and values are stored");
    bifolio::attention_params params;
    params.q = view(q, num_q_heads);
    params.out = bifolio::dense_view<void>(out.data(), bifolio::dtype::f32, plan.num_tokens, num_q_heads, head_dim);
    params.kv = engine.layers()[0];
    params.batch = batch;
    params.scale = 0.25f;
    expect(cpu->attention(attention_plan, params) == bifolio::errc::ok, "attention runs");

    // Only rows that complete what is known of a sequence are sampled; chunks in the middle of a prompt are not.
    std::vector<bifolio::sampled_token> sampled;
    for (const std::int32_t row : inputs.sample_rows) sampled.push_back({weights.best(out.data() + row * dim)});
    for (auto& done : scheduler.commit(plan, sampled)) said[to_index(done.request)] = std::move(done.tokens);
  }
  stats = scheduler.stats();
  expect(manager.num_free_blocks() == num_blocks && manager.check().empty(), "every block came back");
  return said;
}

void run() {
  const model weights;
  bifolio::scheduler_stats roomy, tight;
  const texts expected = serve(weights, 200, roomy);
  const texts squeezed = serve(weights, 18, tight);
  std::printf("200 blocks: %lld steps, %lld preemptions\n", static_cast<long long>(roomy.num_steps),
              static_cast<long long>(roomy.num_preemptions));
  std::printf(" 18 blocks: %lld steps, %lld preemptions\n", static_cast<long long>(tight.num_steps),
              static_cast<long long>(tight.num_preemptions));
  expect(expected.size() == 6, "six requests were answered");
  for (const auto& [request, tokens] : expected) expect(tokens.size() == max_new, "each got all its tokens");
  expect(roomy.num_preemptions == 0 && tight.num_preemptions > 0, "only the small pool preempts");
  expect(squeezed == expected, "and all say the same");
  std::printf("all six say the same\n");
}

}  // namespace

int main() { return run_example(run); }

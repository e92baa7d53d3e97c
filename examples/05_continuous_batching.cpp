// SPDX-License-Identifier: Apache-2.0
// 5. Continuous batching.
//
// Requests of all lengths come and go; the `scheduler` decides in every step who computes how many tokens, within
// budgets of tokens and blocks. The pool here is too small for everybody: requests wait, and the latest arrivals are
// preempted: computed again, or moved to a second pool and back. What each says stays the same. The model is one
// attention layer with random weights.

#include <algorithm>
#include <bifolio/bifolio.hpp>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "expect.hpp"

namespace {

using namespace bifolio;

constexpr std::int32_t num_q_heads = 2, head_dim = 16, dim = num_q_heads * head_dim;  // two query heads on one KV head
constexpr std::int32_t vocab = 50, block_size = 4, max_new = 24;

/// Random tables: what a token looks for, what it offers, what it holds, and how an output reads as a token.
struct model {
  std::mt19937 random{1};
  std::vector<float> q = table(dim), k = table(head_dim), v = table(head_dim), head = table(dim);

  std::vector<float> table(std::size_t width) {
    std::vector<float> values(vocab * width);
    for (float& value : values) value = (static_cast<float>(random() % 2001) - 1000.0f) / 400.0f;
    return values;
  }

  /// [num_tokens, width]: a table's rows of the step's tokens, each shifted by its position.
  static std::vector<float> rows(const std::vector<float>& table, std::size_t width, const step_inputs& inputs) {
    std::vector<float> result;
    for (std::size_t n = 0; n < inputs.tokens.size() * width; ++n) {
      const std::size_t t = n / width, i = n % width;
      result.push_back(table[static_cast<std::size_t>(to_index(inputs.tokens[t])) * width + i] +
                       std::sin(static_cast<float>(inputs.positions[t]) * static_cast<float>(i + 1) * 0.37f));
    }
    return result;
  }

  [[nodiscard]] token_id best(const float* out) const {
    std::vector<float> logits(vocab);
    for (std::size_t i = 0; i < head.size(); ++i) logits[i / dim] += head[i] * out[i % dim];
    return token_id{static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin())};
  }
};

using texts = std::vector<std::vector<token_id>>;  // what each request said

texts serve(const model& weights, std::int64_t num_blocks, std::int64_t num_host_blocks, scheduler_stats& stats) {
  kv_cache_manager manager({.block_size = block_size, .num_blocks = num_blocks, .num_host_blocks = num_host_blocks});
  scheduler requests(manager, {.max_tokens_per_step = 16,  // a longer prompt goes in chunks
                               .vocab_size = vocab,
                               .preemption = preemption_mode::swap});  // where there are host blocks
  const auto cpu = make_backend();
  const kv_layout layout = make_layout(layout_kind::hnd, dtype::f32, 1, head_dim, block_size);
  cache_engine cache(*cpu, {1, num_blocks, layout});
  cache_engine host(*cpu, {1, std::max<std::int64_t>(1, num_host_blocks), layout});
  const attention_spec spec{.num_q_heads = num_q_heads,
                            .num_kv_heads = 1,
                            .qk_head_dim = head_dim,
                            .v_head_dim = head_dim,
                            .block_size = block_size};
  attention_plan work;

  // Six requests with prompts of 3, 10, 17 … tokens.
  for (std::int32_t r = 0; r < 6; ++r) {
    request asked;
    for (std::int32_t i = 0; i < 3 + 7 * r; ++i) asked.prompt.push_back(token_id{(r * 13 + i * 7) % vocab});
    asked.max_new_tokens = max_new;
    expect(requests.submit(std::move(asked)).status == alloc_status::ok, "each would fit by itself");
  }

  texts said(6);
  step_inputs inputs;
  for (;;) {
    const step_plan& plan = requests.schedule();
    if (plan.empty()) break;
    // The order of a step: what leaves, copies, the step's tokens, what comes back for the next step.
    expect(cache.swap_blocks_to(host, plan.swap_outs) == errc::ok, "blocks leave before they are written");
    expect(cache.copy_blocks(plan.copies) == errc::ok, "copies are done before anything is stored");
    requests.build(inputs);
    std::vector<float> out(inputs.tokens.size() * dim);
    if (!plan.seqs.empty()) {  // else sequences only came back
      const auto batch = cache.upload(inputs.batch);
      cpu->plan_attention(work, spec, inputs.batch.view(), num_blocks);
      const auto q = model::rows(weights.q, dim, inputs);
      const auto k = model::rows(weights.k, head_dim, inputs), v = model::rows(weights.v, head_dim, inputs);
      const auto view = [&](const std::vector<float>& rows, std::int32_t num_heads) {
        return dense_view<const void>(rows.data(), dtype::f32, plan.num_tokens, num_heads, head_dim);
      };
      expect(cache.append(0, view(k, 1), view(v, 1), batch.slot_mapping) == errc::ok, "keys and values are stored");
      const attention_params params{
          .q = view(q, num_q_heads),
          .out = dense_view<void>(out.data(), dtype::f32, plan.num_tokens, num_q_heads, head_dim),
          .kv = cache.layers()[0],
          .batch = batch,
          .scale = 0.25f};
      expect(cpu->attention(work, params) == errc::ok, "attention runs");
    }
    expect(host.swap_blocks_to(cache, plan.swap_ins) == errc::ok, "blocks are back before the next step");

    // Only rows that complete what is known of a sequence are sampled; chunks in the middle of a prompt are not.
    std::vector<sampled_token> sampled;
    for (const std::int32_t row : inputs.sample_rows) sampled.push_back({weights.best(out.data() + row * dim)});
    for (auto& done : requests.commit(plan, sampled)) said[to_index(done.request) - 1] = std::move(done.tokens);
  }
  stats = requests.stats();
  expect(manager.num_free_blocks() == num_blocks && manager.check().empty(), "every block came back");
  return said;
}

void run() {
  const model weights;
  scheduler_stats roomy, tight, swapping;
  const texts expected = serve(weights, 200, 0, roomy);
  const texts squeezed = serve(weights, 18, 0, tight);
  const texts swapped = serve(weights, 18, 40, swapping);
  for (const auto& tokens : expected) expect(tokens.size() == max_new, "each got all its tokens");
  expect(roomy.num_preemptions == 0 && tight.num_preemptions > 0, "only the small pool preempts");
  expect(swapping.num_swap_ins > 0 && swapping.num_scheduled_tokens < tight.num_scheduled_tokens,
         "what comes back is not computed again");
  expect(squeezed == expected && swapped == expected, "and all say the same");
  std::printf("200 blocks: %d tokens computed, no preemption\n", static_cast<int>(roomy.num_scheduled_tokens));
  std::printf(" 18 blocks: %d tokens, %d preemptions\n", static_cast<int>(tight.num_scheduled_tokens),
              static_cast<int>(tight.num_preemptions));
  std::printf(" 18 and 40 of the host: %d tokens, %d preemptions, %d of them swapped\n",
              static_cast<int>(swapping.num_scheduled_tokens), static_cast<int>(swapping.num_preemptions),
              static_cast<int>(swapping.num_swap_outs));
  std::printf("all six say the same\n");
}

}  // namespace

int main() { return run_example(run); }

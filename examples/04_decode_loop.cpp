// SPDX-License-Identifier: Apache-2.0
// 4. A decode loop.
//
// What an inference engine does in every step, for two sequences of different lengths at once: ask the manager for
// slots, flatten the decision into a `step_batch`, upload it, plan attention, and per layer append and attend. The
// "model" here is a few sines, so that the loop is all there is to see.

#include <algorithm>
#include <bifolio/bifolio.hpp>
#include <cmath>
#include <cstdio>
#include <vector>

#include "expect.hpp"

namespace {

using namespace bifolio;

constexpr std::int32_t num_layers = 2, num_q_heads = 4, num_kv_heads = 2, head_dim = 16, block_size = 8;

/// Stands for a layer's projections: `width` numbers for each token, made from its position and the layer.
std::vector<float> projected(const std::vector<std::int64_t>& positions, std::int32_t layer, std::int32_t width,
                             float phase) {
  std::vector<float> rows;
  for (const std::int64_t position : positions) {
    for (std::int32_t i = 0; i < width; ++i) {
      rows.push_back(std::sin(phase + 0.31f * static_cast<float>(position + layer) + 0.7f * static_cast<float>(i)));
    }
  }
  return rows;
}

class engine {
 public:
  explicit engine(kv_cache_manager& manager)
      : manager_(manager),
        cpu_(make_backend()),
        cache_(*cpu_, {num_layers, manager.config().num_blocks,
                       make_layout(layout_kind::hnd, dtype::bf16, num_kv_heads, head_dim, block_size)}) {}

  /// One step over any mix of prompts (query_len > 1) and decodes (query_len 1). Returns attention's output of the last
  /// layer, [num_tokens, num_q_heads, head_dim].
  std::vector<float> step(const step_plan& plan) {
    manager_.build(batch_, plan);  // ids become flat arrays
    expect(cache_.copy_blocks(plan.copies) == errc::ok, "copies are done first");
    const device_step_view batch = cache_.upload(batch_);  // once a step
    cpu_->plan_attention(plan_, spec_, batch_.view(), manager_.config().num_blocks);

    std::vector<std::int64_t> positions;
    for (const auto& seq : plan.seqs) {
      for (std::int32_t t = 0; t < seq.query_len; ++t) positions.push_back(seq.seq_len - seq.query_len + t);
    }
    std::vector<float> out(positions.size() * num_q_heads * head_dim);
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {  // nothing is allocated by bifolio in here
      const auto q = projected(positions, layer, num_q_heads * head_dim, 0.0f);
      const auto k = projected(positions, layer, num_kv_heads * head_dim, 1.0f);
      const auto v = projected(positions, layer, num_kv_heads * head_dim, 2.0f);
      const auto view = [&](const std::vector<float>& rows, std::int32_t num_heads) {
        return dense_view<const void>(rows.data(), dtype::f32, plan.num_tokens, num_heads, head_dim);
      };
      expect(cache_.append(layer, view(k, num_kv_heads), view(v, num_kv_heads), batch.slot_mapping) == errc::ok,
             "keys and values are stored");
      const attention_params params{
          .q = view(q, num_q_heads),
          .out = dense_view<void>(out.data(), dtype::f32, plan.num_tokens, num_q_heads, head_dim),
          .kv = cache_.layers()[static_cast<std::size_t>(layer)],
          .batch = batch,
          .scale = 1.0f / std::sqrt(static_cast<float>(head_dim))};
      expect(cpu_->attention(plan_, params) == errc::ok, "attention runs");
    }
    for (const auto& seq : plan.seqs) manager_.commit(seq.seq, seq.query_len);
    return out;
  }

 private:
  kv_cache_manager& manager_;
  std::unique_ptr<backend> cpu_;
  cache_engine cache_;
  attention_spec spec_{.num_q_heads = num_q_heads,
                       .num_kv_heads = num_kv_heads,
                       .qk_head_dim = head_dim,
                       .v_head_dim = head_dim,
                       .block_size = block_size,
                       .k_code = {dtype::bf16},  // half the bytes of float32; queries stay float32
                       .v_code = {dtype::bf16}};
  attention_plan plan_;
  step_batch batch_;
};

void run() {
  kv_cache_manager manager({.block_size = block_size, .num_blocks = 32});
  engine one(manager);

  // Step 0: two prompts of 11 and 3 tokens, computed together. Then ten steps of one token each.
  const auto a = manager.allocate(11).seq, b = manager.allocate(3).seq;
  step_plan plan;
  plan.seqs = {{a, 11, 11}, {b, 3, 3}}, plan.num_tokens = 14;
  std::vector<float> out = one.step(plan);
  for (std::int32_t i = 1; i <= 10; ++i) {
    plan.seqs = {{a, 1, 11 + i}, {b, 1, 3 + i}}, plan.num_tokens = 2, plan.copies.clear();
    for (const auto& seq : plan.seqs) {
      const auto grown = manager.append(seq.seq, 1);
      expect(grown.status == alloc_status::ok, "the pool has a slot for the next token");
      if (grown.has_copy()) plan.copies.push_back(grown.copy);
    }
    out = one.step(plan);
  }
  expect(manager.stats().num_used_blocks == 5, "21 tokens take 3 blocks of 8, 13 take 2");

  // All at once is the same as token after token: the last row of one long prompt equals the last decode step's.
  const auto whole = manager.allocate(21).seq;
  plan.seqs = {{whole, 21, 21}}, plan.num_tokens = 21, plan.copies.clear();
  const std::vector<float> again = one.step(plan);
  const std::size_t row = num_q_heads * head_dim;
  expect(std::equal(out.begin(), out.begin() + row, again.end() - row), "prefill and decode agree bit for bit");
  std::printf("21 and 13 tokens in 5 blocks; prefill and decode agree bit for bit\n");
}

}  // namespace

int main() { return run_example(run); }

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
  explicit engine(bifolio::kv_cache_manager& manager)
      : manager_(manager),
        cpu_(bifolio::make_backend()),
        cache_(*cpu_, {num_layers, manager.config().num_blocks,
                       bifolio::make_layout(bifolio::layout_kind::hnd, bifolio::dtype::bf16, num_kv_heads, head_dim,
                                            block_size)}) {
    spec_.num_q_heads = num_q_heads;
    spec_.num_kv_heads = num_kv_heads;
    spec_.head_dim = head_dim;
    spec_.block_size = block_size;
    spec_.kv_type = bifolio::dtype::bf16;  // half the bytes of float32; queries stay float32
  }

  /// One step over any mix of prompts (query_len > 1) and decodes (query_len 1). Returns attention's output of the last
  /// layer, [num_tokens, num_q_heads, head_dim].
  std::vector<float> step(const bifolio::step_plan& plan) {
    manager_.build(batch_, plan);  // ids become flat arrays
    expect(cache_.copy_blocks(plan.copies) == bifolio::errc::ok, "copies are done first");
    const bifolio::step_batch_view batch = cache_.upload(batch_);  // once a step
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
        return bifolio::dense_view<const void>(rows.data(), bifolio::dtype::f32, plan.num_tokens, num_heads, head_dim);
      };
      expect(
          cache_.append(layer, view(k, num_kv_heads), view(v, num_kv_heads), batch.slot_mapping) == bifolio::errc::ok,
          "keys and values are stored");
      bifolio::attention_params params;
      params.q = view(q, num_q_heads);
      params.out = bifolio::dense_view<void>(out.data(), bifolio::dtype::f32, plan.num_tokens, num_q_heads, head_dim);
      params.kv = cache_.layers()[static_cast<std::size_t>(layer)];
      params.batch = batch;
      params.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
      expect(cpu_->attention(plan_, params) == bifolio::errc::ok, "attention runs");
    }
    for (const auto& seq : plan.seqs) manager_.commit(seq.seq, seq.query_len);
    return out;
  }

 private:
  bifolio::kv_cache_manager& manager_;
  std::unique_ptr<bifolio::backend> cpu_;
  bifolio::cache_engine cache_;
  bifolio::attention_spec spec_;
  bifolio::attention_plan plan_;
  bifolio::step_batch batch_;
};

void run() {
  bifolio::kv_cache_config config;
  config.block_size = block_size;
  config.num_blocks = 32;
  bifolio::kv_cache_manager manager(config);
  engine one(manager);

  // Step 0: two prompts of 11 and 3 tokens, computed together. Then ten steps of one token each.
  const auto a = manager.allocate(11).seq, b = manager.allocate(3).seq;
  bifolio::step_plan plan;
  plan.seqs = {{a, 11, 11}, {b, 3, 3}};
  plan.num_tokens = 14;
  std::vector<float> out = one.step(plan);
  for (std::int32_t i = 1; i <= 10; ++i) {
    plan.seqs = {{a, 1, 11 + i}, {b, 1, 3 + i}};
    plan.num_tokens = 2;
    plan.copies.clear();
    for (const auto& seq : plan.seqs) {
      const auto grown = manager.append(seq.seq, 1);
      expect(grown.status == bifolio::alloc_status::ok, "the pool has a slot for the next token");
      if (grown.has_copy()) plan.copies.push_back(grown.copy);
    }
    out = one.step(plan);
  }
  std::printf("%lld and %lld tokens in %lld blocks\n", static_cast<long long>(manager.num_tokens(a)),
              static_cast<long long>(manager.num_tokens(b)), static_cast<long long>(manager.stats().num_used_blocks));
  expect(manager.stats().num_used_blocks == 5, "21 tokens take 3 blocks of 8, 13 take 2");

  // All at once is the same as token after token: the last row of one long prompt equals the last decode step's.
  const auto whole = manager.allocate(21).seq;
  plan.seqs = {{whole, 21, 21}};
  plan.num_tokens = 21;
  plan.copies.clear();
  const std::vector<float> again = one.step(plan);
  const std::size_t row = num_q_heads * head_dim;
  expect(std::equal(out.begin(), out.begin() + row, again.end() - row), "prefill and decode agree bit for bit");
  std::printf("prefill and decode agree bit for bit\n");
}

}  // namespace

int main() { return run_example(run); }

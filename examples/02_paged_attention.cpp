// SPDX-License-Identifier: Apache-2.0
// 2. Paged attention by hand.
//
// The other half of the library holds the memory and computes on it: a `backend` (here the CPU) and a `cache_engine`
// with the storage of all layers. It knows slots and block ids, never sequences, so this program can choose the blocks
// itself: it stores six tokens in two blocks that are anywhere, and lets the sixth look at all of them.

#include <bifolio/bifolio.hpp>
#include <cmath>
#include <cstdio>
#include <vector>

#include "expect.hpp"

namespace {

constexpr std::int32_t num_tokens = 6, num_q_heads = 4, num_kv_heads = 2, head_dim = 8, block_size = 4;

/// Attention of the last token the long way round, for one query head: what the library is expected to give.
std::vector<double> by_hand(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
                            std::int32_t q_head) {
  const std::int32_t kv_head = q_head / (num_q_heads / num_kv_heads);  // grouped queries: two heads share a KV head
  const auto at = [&](std::int32_t token, std::int32_t dim) {
    return static_cast<std::size_t>((token * num_kv_heads + kv_head) * head_dim + dim);
  };
  std::vector<double> out(head_dim);
  double sum = 0;
  for (std::int32_t token = 0; token < num_tokens; ++token) {
    double dot = 0;
    for (std::int32_t i = 0; i < head_dim; ++i) {
      dot += static_cast<double>(q[static_cast<std::size_t>(q_head * head_dim + i)]) *
             static_cast<double>(k[at(token, i)]);
    }
    const double weight = std::exp(dot / std::sqrt(static_cast<double>(head_dim)));
    sum += weight;
    for (std::int32_t i = 0; i < head_dim; ++i) {
      out[static_cast<std::size_t>(i)] += weight * static_cast<double>(v[at(token, i)]);
    }
  }
  for (double& value : out) value /= sum;
  return out;
}

void run() {
  const auto cpu = bifolio::make_backend();
  std::printf("%s\n", cpu->description().c_str());

  // One layer, 16 blocks; inside a block [num_kv_heads, block_size, head_dim].
  bifolio::cache_engine engine(
      *cpu, {1, 16,
             bifolio::make_layout(bifolio::layout_kind::hnd, bifolio::dtype::f32, num_kv_heads, head_dim, block_size)});
  std::printf("%zu bytes hold 16 blocks of %d tokens\n", engine.num_bytes(), block_size);

  // What a model would compute: keys and values of six tokens, a query of the last one.
  std::vector<float> q(num_q_heads * head_dim), k(num_tokens * num_kv_heads * head_dim), v(k.size()), out(q.size());
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = std::sin(static_cast<float>(i));
  for (std::size_t i = 0; i < k.size(); ++i) k[i] = std::cos(0.7f * static_cast<float>(i));
  for (std::size_t i = 0; i < v.size(); ++i) v[i] = static_cast<float>(i % 11) - 5.0f;

  // Tokens 0 … 3 go to block 11, tokens 4 and 5 to block 2. The last token computes (query_len 1), and attends to six.
  const std::vector<std::int64_t> slots{11 * 4 + 0, 11 * 4 + 1, 11 * 4 + 2, 11 * 4 + 3, 2 * 4 + 0, 2 * 4 + 1};
  expect(engine.append(
             0, bifolio::dense_view<const void>(k.data(), bifolio::dtype::f32, num_tokens, num_kv_heads, head_dim),
             bifolio::dense_view<const void>(v.data(), bifolio::dtype::f32, num_tokens, num_kv_heads, head_dim),
             slots.data()) == bifolio::errc::ok,
         "the six tokens are stored");

  bifolio::step_batch batch;
  batch.query_start_loc = {0, 1};
  batch.seq_lens = {num_tokens};
  batch.block_tables = {11, 2};
  batch.block_table_stride = 2;
  batch.slot_mapping = {slots.back()};

  // Plan once a step, run once a layer.
  bifolio::attention_spec spec;
  spec.num_q_heads = num_q_heads;
  spec.num_kv_heads = num_kv_heads;
  spec.qk_head_dim = spec.v_head_dim = head_dim;
  spec.block_size = block_size;
  bifolio::attention_plan plan;
  cpu->plan_attention(plan, spec, batch.view(), engine.config().num_blocks);

  bifolio::attention_params params;
  params.q = bifolio::dense_view<const void>(q.data(), bifolio::dtype::f32, 1, num_q_heads, head_dim);
  params.out = bifolio::dense_view<void>(out.data(), bifolio::dtype::f32, 1, num_q_heads, head_dim);
  params.kv = engine.layers()[0];
  params.batch = engine.upload(batch);
  params.scale = 1.0f / std::sqrt(static_cast<float>(head_dim));
  expect(cpu->attention(plan, params) == bifolio::errc::ok, "attention runs");

  double worst = 0;
  for (std::int32_t h = 0; h < num_q_heads; ++h) {
    const std::vector<double> expected = by_hand(q, k, v, h);
    for (std::int32_t i = 0; i < head_dim; ++i) {
      const double got = static_cast<double>(out[static_cast<std::size_t>(h * head_dim + i)]);
      worst = std::max(worst, std::abs(got - expected[static_cast<std::size_t>(i)]));
    }
  }
  std::printf("largest difference to attention by hand: %.1e\n", worst);
  expect(worst < 1e-5, "paging changes nothing");
}

}  // namespace

int main() { return run_example(run); }

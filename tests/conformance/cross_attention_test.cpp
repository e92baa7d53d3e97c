// SPDX-License-Identifier: Apache-2.0
// Cross attention from the digest of an encoder's input to numbers: a manager with a full and a cross group, an engine
// for the cross group's blocks, and attention without a mask over the encoder's output, on every backend. Its length
// and its table are its own; samples of a request and requests of one digest share its blocks.
#include <doctest/doctest.h>

#include <bifolio/cache_engine.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <cstring>
#include <string>

#include "conformance/attention_tables.hpp"
#include "support/elements.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

constexpr std::int32_t num_heads = 4, num_kv_heads = 2, head_dim = 32, cross_block = 8;
constexpr std::int64_t num_cross_blocks = 20;

/// A step's queries; the lengths of the encoder's outputs are 18 (content 0) and 33 (content 1).
attention_case cross_case(dtype kv_type, std::vector<batch_seq> seqs) {
  return {.what = "cross attention",
          .head_dim = head_dim,
          .block_size = cross_block,
          .kv_type = kv_type,
          .seqs = std::move(seqs),
          .causal = false,
          .seed = 19};
}

kv_cache_config two_groups() {
  kv_cache_config config{.max_sequences = 8};
  config.prefix.enabled = true;
  config.groups = {
      {.kind = group_kind::full, .block_size = 4, .num_blocks = 60},
      {.kind = group_kind::cross, .block_size = cross_block, .num_blocks = num_cross_blocks, .max_tokens = 40}};
  return config;
}

class encoder_decoder {
 public:
  encoder_decoder(const tested_backend& tested, dtype kv_type)
      : where_(tested.get()),
        kv_type_(kv_type),
        manager_(two_groups()),
        engine_(where_,
                {1, num_cross_blocks, make_layout(layout_kind::hnd, kv_type, num_kv_heads, head_dim, cross_block)}) {}

  open_result open(std::int32_t prompt_len, std::int32_t encoder_len, const std::string& digest) {
    std::vector<token_id> tokens;
    for (std::int32_t i = 0; i < prompt_len; ++i) tokens.push_back(token_id{1000 * ++num_prompts_ + i});
    prompt_view prompt{.tokens = tokens};
    prompt.cross = {encoder_len, std::as_bytes(std::span(digest.data(), digest.size()))};
    return manager_.open(prompt, prompt_len);
  }
  kv_cache_manager& manager() { return manager_; }

  /// What the sequence's first step does when nobody has stored the encoder's output.
  void store(seq_id seq, const attention_contents::sequence& encoder) {
    std::vector<std::int64_t> slots;
    const std::int64_t length = manager_.num_cross_tokens(seq);
    for (std::int64_t p = 0; p < length; ++p) slots.push_back(to_index(manager_.slot_at(seq, p, 1)));
    device_bytes k(where_, bytes_of(encoder.k), sizeof(float));
    device_bytes v(where_, bytes_of(encoder.v), sizeof(float));
    device_bytes at(where_, bytes_of(slots), sizeof(std::int64_t));
    const auto rows = [&](device_bytes& from) {
      return as_const(dense_view<void>(from.data(), dtype::f32, length, num_kv_heads, head_dim));
    };
    require_ok(engine_.append(0, rows(k), rows(v), reinterpret_cast<const std::int64_t*>(at.data())), "append");
    require_ok(where_.synchronize({}), "synchronize");
  }

  /// Attention of the step's rows to their encoders' outputs.
  attention_output attend(const step_plan& plan, const attention_case& the_case, const attention_contents& contents) {
    step_batch tokens;
    std::vector<step_batch> others(1);
    manager_.build(tokens, others, plan);
    std::vector<float> queries;
    for (const auto& seq : contents.seqs) queries.insert(queries.end(), seq.q.begin(), seq.q.end());
    const std::int64_t num_tokens = tokens.query_start_loc.back();
    device_bytes q(where_, bytes_of(queries), sizeof(float));
    device_bytes out(where_, bytes_of(std::vector<float>(queries.size())), sizeof(float));
    device_bytes lse(where_, bytes_of(std::vector<float>(static_cast<std::size_t>(num_tokens * num_heads))),
                     sizeof(float));
    attention_spec spec{.num_q_heads = num_heads,
                        .num_kv_heads = num_kv_heads,
                        .qk_head_dim = head_dim,
                        .v_head_dim = head_dim,
                        .block_size = cross_block,
                        .k_code = {kv_type_},
                        .v_code = {kv_type_}};
    spec.causal = false;
    attention_plan planned;
    where_.plan_attention(planned, spec, others[0].view(), num_cross_blocks);
    attention_params params;
    params.q = as_const(dense_view<void>(q.data(), dtype::f32, num_tokens, num_heads, head_dim));
    params.out = dense_view<void>(out.data(), dtype::f32, num_tokens, num_heads, head_dim);
    params.lse = reinterpret_cast<float*>(lse.data());
    params.kv = engine_.layers()[0];
    params.batch = engine_.upload(others[0]);
    params.scale = the_case.used_scale();
    require_ok(where_.attention(planned, params), "attention");
    const auto floats = [](const device_bytes& from) {
      const std::vector<std::byte> bytes = from.read();
      std::vector<float> values(bytes.size() / sizeof(float));
      std::memcpy(values.data(), bytes.data(), bytes.size());
      return values;
    };
    return {floats(out), floats(lse)};
  }

 private:
  backend& where_;
  dtype kv_type_;
  kv_cache_manager manager_;
  cache_engine engine_;
  std::int32_t num_prompts_ = 0;
};

}  // namespace

TEST_CASE("samples and requests of one encoder input attend to one stored output, as the oracle does") {
  std::size_t turn = 0;
  for (const dtype kv_type : dtypes) {
    const attention_case alone = cross_case(kv_type, {{7, 18, 0, 0, 0}});
    // Two samples of the first request, a second request of the same input, and one of another whose prompt is longer
    // than the encoder's output.
    const attention_case together =
        cross_case(kv_type, {{1, 18, 0, 0, 7}, {1, 18, 0, 0, 100}, {5, 18, 0, 0, 200}, {50, 33, 1, 0, 0}});
    const attention_contents first(alone);
    const attention_contents second(together);
    REQUIRE(first.seqs[0].k == second.seqs[2].k);
    for (const tested_backend* tested : one_per_family(turn++)) {
      encoder_decoder model(*tested, kv_type);
      kv_cache_manager& manager = model.manager();
      const open_result parent = model.open(7, 18, "an image");
      CHECK(parent.num_cached_cross_tokens == 0);
      model.store(parent.seq, first.seqs[0]);
      step_plan plan;
      plan.seqs.push_back({.seq = parent.seq, .query_len = 7, .seq_len = 7});
      std::string problem =
          attention_expectation(alone, first).problem_of(model.attend(plan, alone, first), tested->numbers);
      CHECK_MESSAGE(problem.empty(), tested->name, ": ", problem);
      manager.commit(parent.seq, std::vector<token_id>(7, token_id{5}));

      const seq_id sample = manager.fork(parent.seq).seq;
      const open_result other = model.open(5, 18, "an image");
      CHECK(other.num_cached_cross_tokens == 18);
      const open_result unlike = model.open(50, 33, "another image");
      CHECK(unlike.num_cached_cross_tokens == 0);
      CHECK(manager.num_free_blocks(1) == num_cross_blocks - 3 - 5);
      model.store(unlike.seq, second.seqs[3]);
      plan.seqs.clear();
      for (const seq_id seq : {parent.seq, sample}) {
        CHECK(manager.append(seq, 1).status == alloc_status::ok);
        plan.seqs.push_back({.seq = seq, .query_len = 1, .seq_len = 8});
      }
      plan.seqs.push_back({.seq = other.seq, .query_len = 5, .seq_len = 5});
      plan.seqs.push_back({.seq = unlike.seq, .query_len = 50, .seq_len = 50});
      problem =
          attention_expectation(together, second).problem_of(model.attend(plan, together, second), tested->numbers);
      CHECK_MESSAGE(problem.empty(), tested->name, ": ", problem);
    }
  }
}

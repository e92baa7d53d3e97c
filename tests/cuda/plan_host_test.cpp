// SPDX-License-Identifier: Apache-2.0
// The host part of planning: every visible position is in exactly one item, partial results do not collide, buffers
// keep their addresses, and a failure leaves the plan as it was.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/cuda.hpp>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "cuda/fake_runtime.hpp"
#include "cuda/host/attention_plan.hpp"
#include "cuda/host/backend.hpp"
#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

struct step {
  attention_spec spec;
  std::vector<std::int32_t> starts{0};
  std::vector<std::int32_t> lens;
  std::vector<std::int32_t> positions;  // none, or of each sequence
  std::vector<std::int32_t> tables;
  std::int64_t table_stride = 0;

  void add(std::int32_t query_len, std::int32_t seq_len) {
    starts.push_back(starts.back() + query_len);
    lens.push_back(seq_len);
  }
  void fill_tables() {
    for (const std::int32_t len : lens) table_stride = std::max(table_stride, blocks_for(len, spec.block_size));
    tables.assign(lens.size() * static_cast<std::size_t>(table_stride), 0);
  }
  [[nodiscard]] host_step_view view() const {
    return {static_cast<std::int32_t>(lens.size()),
            starts.back(),
            starts.data(),
            lens.data(),
            tables.data(),
            table_stride,
            nullptr,
            positions.empty() ? nullptr : positions.data()};
  }
  [[nodiscard]] cuda::plan_input input(std::int32_t num_sms = 132) const {
    cuda::plan_input in;
    in.spec = spec;
    in.num_seqs = static_cast<std::int32_t>(lens.size());
    in.query_start_loc = starts.data();
    in.seq_lens = lens.data();
    in.query_positions = positions.empty() ? nullptr : positions.data();
    in.num_tokens = starts.back();
    for (std::size_t i = 0; i < lens.size(); ++i) {
      in.max_query_len = std::max(in.max_query_len, starts[i + 1] - starts[i]);
      in.max_seq_len = std::max(in.max_seq_len, lens[i]);
    }
    in.device.num_sms = num_sms;
    return in;
  }
};

attention_spec spec_of(std::int32_t num_q_heads, std::int32_t num_kv_heads, std::int32_t head_dim = 128) {
  attention_spec spec;
  spec.num_q_heads = num_q_heads;
  spec.num_kv_heads = num_kv_heads;
  spec.qk_head_dim = spec.v_head_dim = head_dim;
  spec.block_size = 16;
  return spec;
}

// Checks a plan against the definition of what each row attends to.
void check_covers(const step& s, const cuda::general_plan& plan) {
  const std::int64_t group = s.spec.num_q_heads / s.spec.num_kv_heads;
  std::map<std::pair<std::int32_t, std::int32_t>, std::set<std::int32_t>> splits_of_tile;
  std::set<std::int32_t> partials;
  for (const cuda::general_item& item : plan.items) {
    auto& splits = splits_of_tile[{item.seq, item.first_row}];
    if (item.tile >= 0) {
      CHECK(item.num_splits == 1);
      CHECK(item.partial >= item.first_partial);
      CHECK(item.partial < item.first_partial + item.num_partials);
      CHECK(partials.insert(item.partial).second);
      CHECK(item.tile < plan.num_tiles);
    }
    for (std::int32_t i = 0; i < item.num_splits; ++i) CHECK(splits.insert(item.first_split + i).second);
  }
  CHECK(static_cast<std::int64_t>(partials.size()) == plan.num_partials);
  std::size_t num_tiles = 0;
  for (std::size_t seq = 0; seq < s.lens.size(); ++seq) {
    const std::int64_t query_len = s.starts[seq + 1] - s.starts[seq];
    const std::int64_t seq_len = s.lens[seq];
    for (std::int64_t row = 0; row < query_len * group; ++row) {
      const std::int64_t first_row = row / plan.rows_per_tile * plan.rows_per_tile;
      num_tiles += row == first_row ? 1u : 0u;
      const auto found = splits_of_tile.find({static_cast<std::int32_t>(seq), static_cast<std::int32_t>(first_row)});
      REQUIRE(found != splits_of_tile.end());
      const std::int64_t p = (s.positions.empty() ? seq_len - query_len : s.positions[seq]) + row / group;
      std::int64_t begin = 0;
      std::int64_t end = seq_len;
      if (s.spec.causal) end = std::min(end, p + 1);
      if (s.spec.window_left >= 0) begin = std::max<std::int64_t>(begin, p - s.spec.window_left);
      if (s.spec.window_right >= 0) end = std::min(end, p + s.spec.window_right + 1);
      for (std::int64_t split = begin / cuda::split_positions; begin < end && split * cuda::split_positions < end;
           ++split) {
        CHECK(found->second.count(static_cast<std::int32_t>(split)) == 1);
      }
    }
  }
  CHECK(splits_of_tile.size() == num_tiles);
}

}  // namespace

TEST_CASE("every position that a row attends to is in exactly one item of its tile") {
  std::mt19937_64 random(test_seed());
  CAPTURE(seed_note());
  const auto below = [&](std::uint64_t n) { return static_cast<std::int32_t>(random() % n); };
  bool any_cut = false;
  for (int round = 0; round < 300; ++round) {
    step s;
    const std::int32_t kv_heads = 1 + below(8);
    s.spec = spec_of(kv_heads * (1 + below(9)), kv_heads, 1 + below(300));
    s.spec.causal = below(3) != 0;
    if (below(3) == 0) s.spec.window_left = below(2000);
    if (below(3) == 0) s.spec.window_right = below(100);
    const int num_seqs = below(6);
    for (int i = 0; i < num_seqs; ++i) {
      const std::int32_t seq_len = below(4) == 0 ? below(3) : below(6000);
      s.add(below(3) == 0 ? below(70) : below(3), seq_len);
      if (round % 2 == 0) s.positions.push_back(below(6000) - 1000);
    }
    cuda::general_plan plan;
    cuda::plan_general(s.input(1 + below(140)), true, plan);
    check_covers(s, plan);
    any_cut = any_cut || plan.num_tiles > 0;
    CHECK(plan.workspace_bytes(s.spec) <= cuda::max_partial_bytes);
  }
  CHECK(any_cut);
}

TEST_CASE("a long sequence alone is cut into splits, many of them are not") {
  step alone;
  alone.spec = spec_of(32, 8);
  alone.add(1, 131072);
  cuda::general_plan plan;
  cuda::plan_general(alone.input(), true, plan);
  CHECK(plan.num_partials == 256);
  CHECK(plan.rows_per_tile == cuda::few_rows);

  step many;
  many.spec = spec_of(32, 8);
  for (int i = 0; i < 256; ++i) many.add(1, 4096);
  cuda::plan_general(many.input(), true, plan);
  CHECK(plan.num_partials == 0);
  CHECK(plan.items.size() == 256);
}

TEST_CASE("x_split decode has several CTAs for a row where one would take longer") {
  const auto plan_of = [](int num_seqs, std::int32_t seq_len, std::int32_t query_len) {
    step s;
    s.spec = spec_of(32, 8);
    for (int i = 0; i < num_seqs; ++i) s.add(query_len, seq_len);
    return cuda::plan_x_split(s.input());
  };
  CHECK(plan_of(1, 512, 1).num_splits == 1);
  CHECK(plan_of(1, 512, 1).workspace_floats == 0);
  CHECK(plan_of(1, 513, 1).num_splits == 2);
  CHECK(plan_of(16, 4000, 1).max_partitions == 8);
  CHECK(plan_of(16, 4000, 1).num_splits == 8);
  CHECK(plan_of(16, 4000, 1).workspace_floats == 16u * 32u * 8u * 130u);
  // 8 CTAs per sequence, 64 · 132 = 8448 at the most, in powers of two. 66 sequences are two full waves of v1.
  CHECK(plan_of(39, 8192, 1).num_splits == 16);
  CHECK(plan_of(66, 8192, 1).num_splits == 1);
  CHECK(plan_of(66, 8192, 1).workspace_floats == 66u * 32u * 16u * 130u);
  CHECK(plan_of(67, 8192, 1).num_splits == 8);
  CHECK(plan_of(256, 8192, 1).num_splits == 1);
  CHECK(plan_of(256, 8192, 1).max_partitions == 16);
  CHECK_FALSE(plan_of(1, 4096, 2).has_decodes);
  CHECK(plan_of(1, 4096, 2).has_others);
}

TEST_CASE("x_split decode takes the kernels that were measured to be the faster ones on 132 SMs") {
  struct measured {
    int num_seqs;
    std::int32_t seq_len, num_q_heads, num_kv_heads;
    bool mixed;
    double v1, v2;  // µs on an H200, bf16, head_dim 128
  };
  const std::vector<measured> table{
      {1, 1024, 32, 8, false, 21.7, 14.3},       {8, 1024, 32, 8, false, 23.1, 18.0},
      {64, 1024, 32, 8, false, 71.2, 79.9},      {256, 1024, 32, 8, false, 256.2, 288.2},
      {1, 8192, 32, 8, false, 150.6, 21.7},      {8, 8192, 32, 8, false, 151.6, 82.6},
      {64, 8192, 32, 8, false, 482.1, 537.7},    {256, 8192, 32, 8, false, 1901.7, 2130.3},
      {1, 1024, 32, 32, false, 20.6, 14.4},      {8, 1024, 32, 32, false, 37.1, 44.4},
      {64, 1024, 32, 32, false, 255.7, 265.6},   {256, 1024, 32, 32, false, 962.1, 1034.0},
      {1, 8192, 32, 32, false, 143.2, 46.1},     {8, 8192, 32, 32, false, 244.9, 274.9},
      {64, 8192, 32, 32, false, 1881.0, 1955.9}, {256, 8192, 32, 32, false, 7433.1, 7916.9},
      {16, 4096, 32, 8, false, 81.4, 80.7},      {72, 8192, 32, 8, false, 670.4, 600.7},
      {64, 8192, 64, 8, false, 485.9, 565.6},    {64, 8192, 64, 4, false, 284.0, 334.3},
      {64, 8192, 71, 1, false, 507.6, 370.8},    {32, 32768, 32, 8, true, 640.3, 221.6},
      {300, 16384, 32, 8, true, 1066.6, 1116.8},
  };
  for (const measured& m : table) {
    CAPTURE(m.num_seqs);
    CAPTURE(m.seq_len);
    CAPTURE(m.num_q_heads);
    CAPTURE(m.num_kv_heads);
    step s;
    s.spec = spec_of(m.num_q_heads, m.num_kv_heads);
    s.spec.q_type = s.spec.k_code.type = s.spec.v_code.type = s.spec.out_type = dtype::bf16;
    for (int i = 0; i < m.num_seqs; ++i) {
      // Mixed: as many between 128 and 256 as between any other length and its double.
      const double steps = std::log2(m.seq_len / 128.0) * (i + 0.5) / m.num_seqs;
      s.add(1, m.mixed ? static_cast<std::int32_t>(std::lround(128 * std::exp2(steps))) : m.seq_len);
    }
    const cuda::x_split_plan plan = cuda::plan_x_split(s.input());
    CHECK((plan.num_splits == 1 ? m.v1 : m.v2) <= 1.03 * std::min(m.v1, m.v2));
  }
}

TEST_CASE("x_split decode with a window counts what is visible") {
  const auto num_splits = [](std::int32_t window_left) {
    step s;
    s.spec = spec_of(32, 8);
    s.spec.window_left = window_left;
    s.add(1, 32768);
    for (int i = 0; i < 65; ++i) s.add(1, 1024);
    return cuda::plan_x_split(s.input()).num_splits;
  };
  CHECK(num_splits(-1) > 1);
  CHECK(num_splits(32767) > 1);
  CHECK(num_splits(1023) == 1);
}

TEST_CASE("x_split decode counts a CTA for each KV head and 16 or 8 of its query heads") {
  struct heads {
    std::int32_t num_q_heads, num_kv_heads;
    dtype q_type, kv_type;
    std::int32_t ctas;  // of a sequence
  };
  for (const heads& h : {heads{8, 8, dtype::bf16, dtype::bf16, 8}, heads{32, 8, dtype::bf16, dtype::bf16, 8},
                         heads{128, 8, dtype::f16, dtype::f16, 8}, heads{17, 1, dtype::f16, dtype::f16, 2},
                         heads{71, 1, dtype::bf16, dtype::bf16, 5}, heads{128, 1, dtype::bf16, dtype::bf16, 8},
                         heads{8, 1, dtype::f32, dtype::f32, 1}, heads{9, 1, dtype::f32, dtype::f32, 2},
                         heads{32, 2, dtype::f32, dtype::bf16, 4}, heads{16, 2, dtype::f32, dtype::f32, 2},
                         heads{71, 1, dtype::f32, dtype::f32, 9}}) {
    CAPTURE(h.num_q_heads);
    CAPTURE(h.num_kv_heads);
    const auto plan_of = [&](std::int32_t num_seqs, std::int32_t seq_len, std::int32_t num_sms) {
      step s;
      s.spec = spec_of(h.num_q_heads, h.num_kv_heads, 64);
      s.spec.q_type = s.spec.out_type = h.q_type;
      s.spec.k_code.type = s.spec.v_code.type = h.kv_type;
      for (int i = 0; i < num_seqs; ++i) s.add(1, seq_len);
      return cuda::plan_x_split(s.input(num_sms));
    };
    for (const std::int32_t num_sms : {20, 132}) {
      // One more sequence than run at once would leave the device nearly idle for much of v1's time.
      const std::int32_t at_once = 4 * num_sms / h.ctas;
      CHECK(plan_of(at_once, 8192, num_sms).num_splits == 1);
      CHECK(plan_of(at_once + 1, 8192, num_sms).num_splits > 1);
      const std::int32_t most = 32 * num_sms / h.ctas;
      CHECK(plan_of(most, 600, num_sms).workspace_floats > 0);
      CHECK(plan_of(most + 1, 600, num_sms).workspace_floats == 0);
    }
  }
}

TEST_CASE("x_split decode has one CTA for a row where partial results would take too much room") {
  step s;
  s.spec = spec_of(128, 1, 256);
  s.spec.q_type = s.spec.k_code.type = s.spec.v_code.type = s.spec.out_type = dtype::bf16;
  for (int i = 0; i < 64; ++i) s.add(1, 8192);
  // 64 sequences · 128 heads · 16 partitions · 258 floats are 135 MB.
  const cuda::x_split_plan many = cuda::plan_x_split(s.input());
  CHECK(many.num_splits == 1);
  CHECK(many.workspace_floats == 0);
  s.starts.resize(41);
  s.lens.resize(40);
  const cuda::x_split_plan fewer = cuda::plan_x_split(s.input());
  CHECK(fewer.num_splits == 16);
  CHECK(fewer.workspace_floats * sizeof(float) <= cuda::max_partial_bytes);
}

TEST_CASE("plans of later steps keep the epoch until buffers or kernels change") {
  fake_runtime runtime;
  cuda::cuda_backend opened(runtime.api(), 0);
  backend& where = opened;
  attention_plan plan;
  const auto plan_decode = [&](int num_seqs, std::int32_t seq_len) {
    step s;
    s.spec = spec_of(8, 8);
    for (int i = 0; i < num_seqs; ++i) s.add(1, seq_len);
    s.fill_tables();
    where.plan_attention(plan, s.spec, s.view(), 1);
  };
  plan_decode(2, 100);
  const std::uint64_t first = cuda::graph_epoch(plan);
  CHECK(first > 0);
  for (std::int32_t len = 101; len < 512; ++len) plan_decode(2, len);
  CHECK(cuda::graph_epoch(plan) == first);
  // A captured launch holds whether there are query positions.
  step anywhere;
  anywhere.spec = spec_of(8, 8);
  anywhere.add(1, 100);
  anywhere.positions = {40};
  anywhere.fill_tables();
  where.plan_attention(plan, anywhere.spec, anywhere.view(), 1);
  CHECK(cuda::graph_epoch(plan) > first);
  plan_decode(2000, 100);
  CHECK(cuda::graph_epoch(plan) > first);

  attention_plan reserved;
  cuda::reserve_plan(where, reserved, spec_of(8, 8), 64, 64, 16384);
  std::swap(plan, reserved);
  plan_decode(64, 8192);
  const std::uint64_t kept = cuda::graph_epoch(plan);
  const std::int64_t allocations = runtime.count("malloc_device");
  for (const std::int32_t len : {8193, 9000, 12000, 16384}) plan_decode(64, len);
  CHECK(runtime.count("malloc_device") == allocations);
  CHECK(cuda::graph_epoch(plan) == kept);
}

TEST_CASE("the first partial results of prefill change the epoch, later steps without them do not") {
  fake_runtime runtime;
  runtime.encodes_tensor_maps = true;
  cuda::cuda_backend opened(runtime.api(), 0);
  backend& where = opened;
  attention_spec spec = spec_of(8, 8);
  spec.q_type = spec.out_type = dtype::bf16;
  spec.k_code = spec.v_code = kv_code{dtype::bf16};
  attention_plan plan;
  cuda::reserve_plan(where, plan, spec, 160, 2720, 8192);
  // As many tokens in each step: of many row tiles, which are not cut, or of few on a long context.
  const auto epoch_of = [&](std::int32_t num_seqs) {
    step s;
    s.spec = spec;
    for (std::int32_t i = 0; i < num_seqs; ++i) s.add(2720 / num_seqs, num_seqs == 1 ? 8192 : 1000);
    s.fill_tables();
    where.plan_attention(plan, s.spec, s.view(), 1);
    return cuda::graph_epoch(plan);
  };
  const std::uint64_t whole = epoch_of(160);
  CHECK(epoch_of(160) == whole);
  const std::uint64_t cut = epoch_of(1);
  CHECK(cut != whole);
  CHECK(epoch_of(160) == cut);
  CHECK(epoch_of(1) == cut);
}

TEST_CASE("a step that takes the kernels of an earlier one has its epoch again") {
  fake_runtime runtime;
  runtime.encodes_tensor_maps = true;
  cuda::cuda_backend opened(runtime.api(), 0);
  backend& where = opened;
  attention_spec spec = spec_of(8, 8);
  spec.q_type = spec.out_type = dtype::bf16;
  spec.k_code = spec.v_code = kv_code{dtype::bf16};
  attention_plan plan;
  cuda::reserve_plan(where, plan, spec, 4, 4096, 4096);
  const auto epoch_of = [&](std::int32_t query_len, std::int32_t seq_len) {
    step s;
    s.spec = spec;
    s.add(query_len, seq_len);
    s.add(1, 300);
    s.fill_tables();
    where.plan_attention(plan, s.spec, s.view(), 1);
    return cuda::graph_epoch(plan);
  };
  const std::uint64_t of_decode = epoch_of(1, 300);
  const std::uint64_t of_prompt = epoch_of(2000, 2000);
  CHECK(of_prompt != of_decode);
  CHECK(epoch_of(1, 301) == of_decode);
  CHECK(epoch_of(2000, 4000) == of_prompt);  // prefill is captured with the number of tokens
  CHECK(epoch_of(1, 302) == of_decode);
  std::set<std::uint64_t> met{of_decode, of_prompt};
  for (std::int32_t n = 2001; n < 2100; ++n) CHECK(met.insert(epoch_of(n, n)).second);
  CHECK(met.count(epoch_of(1, 303)) == 0);  // forgotten: 64 kinds of steps are remembered
  for (std::int32_t n = 3001; n < 3100; ++n) {
    const std::uint64_t kept = epoch_of(1, 304);
    (void)epoch_of(n, n);
    CHECK(epoch_of(1, 305) == kept);
  }
  // Larger buffers end all numbers there were.
  met.insert(cuda::graph_epoch(plan));
  cuda::reserve_plan(where, plan, spec, 400, 40000, 40000);
  CHECK(met.count(epoch_of(1, 303)) == 0);
  CHECK(epoch_of(1, 303) > *met.rbegin());
}

TEST_CASE("batches of many sizes in turns keep the epoch once there is room for each") {
  fake_runtime runtime;
  cuda::cuda_backend opened(runtime.api(), 0);
  backend& where = opened;
  attention_plan plan;
  const auto plan_decode = [&](int num_seqs) {
    step s;
    s.spec = spec_of(32, 8);
    for (int i = 0; i < num_seqs; ++i) s.add(1, 9000);
    s.fill_tables();
    where.plan_attention(plan, s.spec, s.view(), 1);
  };
  // Of x_split's kernels these take 32 CTAs for a row, or a single one.
  for (int round = 0; round < 2; ++round) {
    const std::uint64_t epoch = cuda::graph_epoch(plan);
    for (const int num_seqs : {600, 1, 66, 132, 264, 528}) {
      plan_decode(num_seqs);
      if (round == 0) continue;
      CAPTURE(num_seqs);
      CHECK(cuda::graph_epoch(plan) == epoch);
    }
  }
}

TEST_CASE("x_split decode changes between one CTA for a row and several without a change of epoch") {
  fake_runtime runtime;
  cuda::cuda_backend opened(runtime.api(), 0);
  backend& where = opened;
  attention_plan plan;
  const auto num_splits = [&](std::int32_t other_lens) {
    step s;
    s.spec = spec_of(32, 8);
    for (int i = 0; i < 66; ++i) s.add(1, i == 0 ? 16384 : other_lens);
    s.fill_tables();
    where.plan_attention(plan, s.spec, s.view(), 1);
    return dynamic_cast<const cuda::cuda_plan_state&>(*plan.state).plans().x_split.num_splits;
  };
  CHECK(num_splits(16384) == 1);
  CHECK(num_splits(100) == 16);
  const std::uint64_t epoch = cuda::graph_epoch(plan);
  CHECK(num_splits(16384) == 1);
  CHECK(num_splits(100) == 16);
  CHECK(cuda::graph_epoch(plan) == epoch);
}

TEST_CASE("x_split decode reckons with sequences as long as reserved") {
  step s;
  s.spec = spec_of(32, 8);
  for (int i = 0; i < 64; ++i) s.add(1, 8192);
  CHECK(cuda::plan_x_split(s.input(), 16).num_splits == 1);
  CHECK(cuda::plan_x_split(s.input(), 32).num_splits == 1);
  CHECK(cuda::plan_x_split(s.input(), 64).num_splits == 16);
}

TEST_CASE("steps within the limits of reserve_plan allocate nothing, whatever their mix of lengths") {
  std::mt19937_64 random(test_seed());
  CAPTURE(seed_note());
  const auto below = [&](std::uint64_t n) { return static_cast<std::int32_t>(random() % n); };
  for (int round = 0; round < 60; ++round) {
    CAPTURE(round);
    fake_runtime runtime;
    runtime.num_sms = 1 + below(140);
    cuda::cuda_backend opened(runtime.api(), 0);
    backend& where = opened;
    const std::int32_t kv_heads = 1 + below(8);
    const std::int32_t dims[] = {64, 80, 128, 256, 576};
    attention_spec spec = spec_of(kv_heads * (1 + below(9)), kv_heads, dims[below(5)]);
    if (below(2) == 0) spec.q_type = spec.k_code.type = spec.v_code.type = spec.out_type = dtype::bf16;
    spec.causal = below(3) != 0;
    spec.deterministic = below(4) == 0;
    if (below(3) == 0) spec.window_left = below(2000);
    if (below(3) == 0) spec.window_right = below(100);
    const std::int32_t max_seqs = 1 + below(below(2) == 0 ? 8 : 100);
    const std::int32_t max_tokens = 1 + below(below(2) == 0 ? 100 : 3000);
    const std::int32_t max_len = 1 + below(below(2) == 0 ? 3000 : 60000);
    attention_plan plan;
    cuda::reserve_plan(where, plan, spec, max_seqs, max_tokens, max_len);
    const auto allocations = [&] { return runtime.count("malloc_device") + runtime.count("malloc_host"); };
    const std::int64_t reserved = allocations();
    for (int n = 0; n < 40; ++n) {
      step s;
      s.spec = spec;
      const std::int32_t num_seqs = below(static_cast<std::uint64_t>(max_seqs) + 1);
      std::int32_t left = max_tokens;
      for (std::int32_t i = 0; i < num_seqs; ++i) {
        std::int32_t query_len = below(3) == 0 ? 1 + below(200) : 1;
        if (below(20) == 0) query_len = below(static_cast<std::uint64_t>(left) + 1);
        query_len = std::min(query_len, left);
        left -= query_len;
        s.add(query_len, below(3) == 0 ? max_len : below(static_cast<std::uint64_t>(max_len) + 1));
      }
      s.fill_tables();
      where.plan_attention(plan, spec, s.view(), 1);
      REQUIRE(allocations() == reserved);
    }
  }
}

TEST_CASE("room for prompts is room for decoding too") {
  fake_runtime runtime;
  cuda::cuda_backend opened(runtime.api(), 0);
  backend& where = opened;
  attention_plan plan;
  cuda::reserve_plan(where, plan, spec_of(8, 8), 16, 2048, 16384);
  const std::int64_t allocations = runtime.count("malloc_device");
  for (const int num_seqs : {1, 2, 4, 16}) {
    CAPTURE(num_seqs);
    std::uint64_t kept = 0;
    for (const std::int32_t len : {400, 600, 1100, 9000, 16384}) {
      step s;
      s.spec = spec_of(8, 8);
      for (int i = 0; i < num_seqs; ++i) s.add(1, len);
      s.fill_tables();
      where.plan_attention(plan, s.spec, s.view(), 1);
      if (kept == 0) kept = cuda::graph_epoch(plan);
      CHECK(cuda::graph_epoch(plan) == kept);
    }
  }
  CHECK(runtime.count("malloc_device") == allocations);
}

TEST_CASE("room for more sequences than x_split shares out among CTAs is room for fewer") {
  fake_runtime runtime;
  cuda::cuda_backend opened(runtime.api(), 0);
  backend& where = opened;
  attention_plan plan;
  cuda::reserve_plan(where, plan, spec_of(32, 8), 600, 600, 16384);
  const std::int64_t allocations = runtime.count("malloc_device");
  for (const int num_seqs : {600, 252, 66, 64}) {
    CAPTURE(num_seqs);
    step s;
    s.spec = spec_of(32, 8);
    for (int i = 0; i < num_seqs; ++i) s.add(1, 16384);
    s.fill_tables();
    where.plan_attention(plan, s.spec, s.view(), 1);
    CHECK(runtime.count("malloc_device") == allocations);
  }
}

TEST_CASE("whatever CUDA call fails while room is made, the plan is as it was") {
  fake_runtime runtime;
  cuda::cuda_backend opened(runtime.api(), 0);
  backend& where = opened;
  bool done = false;
  for (std::int64_t nth = 1; !done && nth < 100; ++nth) {
    attention_plan plan;
    step s;
    s.spec = spec_of(8, 8);
    s.add(1, 100);
    s.fill_tables();
    where.plan_attention(plan, s.spec, s.view(), 1);
    const std::uint64_t epoch = cuda::graph_epoch(plan);
    runtime.fail_at(nth, cudaErrorMemoryAllocation);
    try {
      cuda::reserve_plan(where, plan, s.spec, 2000, 4000, 131072);
      done = true;
    } catch (const error& e) {
      CHECK(e.code() == errc::out_of_memory);
      CHECK(cuda::graph_epoch(plan) == epoch);
      CHECK(plan.num_seqs == 1);
    }
    runtime.fail_at(0, cudaSuccess);
    CHECK(runtime.last_error == cudaSuccess);
  }
  CHECK(done);
}

TEST_CASE("planning during a capture is refused") {
  fake_runtime runtime;
  cuda::cuda_backend opened(runtime.api(), 0);
  backend& where = opened;
  attention_plan plan;
  step s;
  s.spec = spec_of(8, 8);
  s.add(1, 10);
  s.fill_tables();
  runtime.capture = cudaStreamCaptureStatusActive;
  try {
    where.plan_attention(plan, s.spec, s.view(), 1);
    FAIL("a plan was made during a capture");
  } catch (const error& e) {
    CHECK(e.code() == errc::failed_precondition);
  }
  CHECK(plan.state == nullptr);
}

TEST_CASE("whatever CUDA call fails while planning, the plan stays as it was and nothing leaks") {
  fake_runtime runtime;
  {
    cuda::cuda_backend opened(runtime.api(), 0);
    backend& where = opened;
    const auto plan_into = [&](attention_plan& plan, std::int32_t seq_len, int num_seqs) {
      step s;
      s.spec = spec_of(8, 8);
      for (int i = 0; i < num_seqs; ++i) s.add(1, seq_len);
      s.fill_tables();
      where.plan_attention(plan, s.spec, s.view(), 1);
    };
    int num_failures = 0;
    for (std::int64_t nth = 1; nth < 100; ++nth) {
      attention_plan plan;
      plan_into(plan, 100, 1);
      const auto& state = dynamic_cast<const cuda::cuda_plan_state&>(*plan.state);
      const std::size_t num_items = state.plans().general.items.size();
      runtime.fail_at(nth, cudaErrorMemoryAllocation);
      bool failed = false;
      try {
        plan_into(plan, 20000, 200);
      } catch (const error& e) {
        failed = true;
        CHECK(e.code() == errc::out_of_memory);
        CHECK(std::string(e.what()).find("cudaErrorMemoryAllocation") != std::string::npos);
      }
      runtime.fail_at(0, cudaSuccess);
      CHECK(runtime.last_error == cudaSuccess);
      if (!failed) {
        CHECK(plan.num_seqs == 200);
        // A record of an event may fail without harm: the copy is waited for instead.
        if (nth > 12) break;
        continue;
      }
      ++num_failures;
      CHECK(plan.num_seqs == 1);
      CHECK(state.plans().general.items.size() == num_items);
      plan_into(plan, 100, 1);
      CHECK(plan.num_seqs == 1);
    }
    CHECK(num_failures >= 8);
  }
  CHECK(runtime.live_device_blocks == 0);
  CHECK(runtime.live_host_blocks == 0);
  CHECK(runtime.live_events == 0);
}

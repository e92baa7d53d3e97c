// SPDX-License-Identifier: Apache-2.0
// The list of attention implementations: who is planned, who serves a call, what is said about the others, and what is
// forced by name.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/cuda.hpp>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cuda/attention/prefill/launch.hpp"
#include "cuda/fake_runtime.hpp"
#include "cuda/host/attention_plan.hpp"
#include "cuda/host/backend.hpp"
#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

struct new_seq {
  std::int32_t query_len, seq_len;
};

/// Calls of bf16 with 8 query heads and 2 KV heads of 128 dims on a pretended device, by default with everything that
/// the fastest implementations need.
struct world {
  fake_runtime runtime;
  std::unique_ptr<cuda::cuda_backend> opened;
  attention_spec spec;
  kv_layout layout;
  std::vector<std::int32_t> starts, lens, tables;
  attention_plan plan;

  explicit world(layout_kind kind = layout_kind::hnd, bool encodes_tensor_maps = true) {
    runtime.encodes_tensor_maps = encodes_tensor_maps;
    opened = std::make_unique<cuda::cuda_backend>(runtime.api(), 0);
    spec.num_q_heads = 8;
    spec.num_kv_heads = 2;
    spec.qk_head_dim = spec.v_head_dim = 128;
    spec.block_size = 16;
    spec.q_type = spec.k_code.type = spec.v_code.type = spec.out_type = dtype::bf16;
    layout = make_layout(kind, dtype::bf16, 2, 128, 16);
  }
  [[nodiscard]] backend& where() const { return *opened; }
  void plan_for(const std::vector<new_seq>& seqs, const std::int32_t* query_positions = nullptr) {
    starts.assign(1, 0);
    lens.clear();
    std::int32_t longest = 0;
    for (const new_seq& s : seqs) {
      starts.push_back(starts.back() + s.query_len);
      lens.push_back(s.seq_len);
      longest = std::max(longest, s.seq_len);
    }
    const std::int64_t stride = blocks_for(longest, spec.block_size);
    tables.assign(seqs.size() * static_cast<std::size_t>(stride), 0);
    host_step_view batch;
    batch.num_seqs = static_cast<std::int32_t>(seqs.size());
    batch.num_tokens = starts.back();
    batch.query_start_loc = starts.data();
    batch.seq_lens = lens.data();
    batch.block_tables = tables.data();
    batch.block_table_stride = stride;
    batch.query_positions = query_positions;
    where().plan_attention(plan, spec, batch, 1);
  }
  /// Addresses that are far apart and never read: nothing is run.
  [[nodiscard]] static void* array(std::uintptr_t number) { return reinterpret_cast<void*>(number << 36); }
  [[nodiscard]] attention_params call() const {
    attention_params p;
    p.q = as_const(dense_view(array(1), dtype::bf16, starts.back(), 8, spec.qk_head_dim));
    p.out = dense_view(array(2), dtype::bf16, starts.back(), 8, spec.v_head_dim);
    p.kv = {array(3), array(4), 1, layout};
    p.batch.num_seqs = plan.num_seqs;
    p.batch.num_tokens = plan.num_tokens;
    p.batch.query_start_loc = p.batch.seq_lens = p.batch.block_tables = static_cast<const std::int32_t*>(array(5));
    p.batch.block_table_stride = plan.num_table_entries;
    p.scale = 0.1f;
    return p;
  }
  [[nodiscard]] attention_params call_with_bias() const {
    attention_params p = call();
    p.bias = {array(6), dtype::bf16, 1, 1, 1 << 20};
    return p;
  }
  [[nodiscard]] const cuda::step_plans& plans() const {
    return static_cast<const cuda::cuda_plan_state&>(*plan.state).plans();
  }
  /// The first words of the kernels' names, each once: "decode", "general".
  [[nodiscard]] std::vector<std::string> kernels_of(const attention_params& params) const {
    std::vector<std::string> kernels;
    for (const std::string& name : where().describe(plan, params)) {
      const std::string kernel = name.empty() ? "" : name.substr(5, name.find(' ', 5) - 5);
      if (std::find(kernels.begin(), kernels.end(), kernel) == kernels.end()) kernels.push_back(kernel);
    }
    return kernels;
  }
};

using names = std::vector<std::string>;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// The error that planning throws.
error refusal_of(world& w) {
  try {
    w.plan_for({{1, 100}});
  } catch (const error& e) {
    return e;
  }
  FAIL("a plan was made");
  return error(errc::ok);
}

}  // namespace

TEST_CASE("decode is planned alone, and its call is one launch") {
  world w;
  w.plan_for({{1, 5000}, {1, 300}});
  CHECK(w.plans().decode.num_seqs == 2);
  CHECK(w.plans().prefill.empty());
  CHECK_FALSE(w.plans().general.has_items);
  CHECK(w.plans().general.items.capacity() == 0);
  w.runtime.forget_counts();
  REQUIRE(w.where().attention(w.plan, w.call()) == errc::ok);
  CHECK(w.runtime.launches.size() == 1);
  CHECK(w.kernels_of(w.call()) == names{"decode"});
}

TEST_CASE("a mixed step is shared by prefill and decode") {
  world w;
  w.plan_for({{1, 5000}, {2000, 2000}, {0, 30}, {1, 300}});
  CHECK(w.plans().prefill.seqs == std::vector<std::int32_t>{1});
  CHECK(w.plans().decode.num_seqs == 2);
  w.runtime.forget_counts();
  REQUIRE(w.where().attention(w.plan, w.call()) == errc::ok);
  CHECK(w.runtime.launches.size() == 3);  // prefill in parts, its combine, decode
  const names kernels = w.where().describe(w.plan, w.call());
  CHECK(kernels == names{"cuda decode bf16 d128", "cuda prefill bf16 d128 tma plain", "", "cuda decode bf16 d128"});
}

TEST_CASE("prefill loads blocks of 16 tokens and more by TMA where head_dim and strides allow it, else by cp.async") {
  struct row {
    layout_kind kind;
    std::int32_t head_dim, block_size;
    const char* kernel;
    dtype type = dtype::bf16;
  };
  for (const row& r : {row{layout_kind::hnd, 128, 16, "cuda prefill bf16 d128 tma plain"},
                       row{layout_kind::nhd, 128, 64, "cuda prefill bf16 d128 tma plain"},
                       row{layout_kind::hnd, 64, 48, "cuda prefill bf16 d64 tma plain"},
                       row{layout_kind::hnd, 256, 32, "cuda prefill bf16 d256 tma plain"},
                       row{layout_kind::hnd, 128, 8, "cuda prefill bf16 d128 copy plain"},
                       row{layout_kind::nhd, 128, 5, "cuda prefill bf16 d128 copy plain"},
                       row{layout_kind::hnd, 80, 16, "cuda prefill bf16 d96 copy plain"},
                       row{layout_kind::hnd, 136, 16, "cuda prefill bf16 d192 copy plain"},
                       row{layout_kind::hnd, 512, 16, "cuda prefill bf16 d512 tma plain"},
                       row{layout_kind::nhd, 264, 32, "cuda prefill bf16 d512 copy plain"},
                       row{layout_kind::hnd, 320, 16, "cuda prefill bf16 d512 copy plain"},
                       row{layout_kind::nhd, 384, 32, "cuda prefill bf16 d512 copy plain"},
                       row{layout_kind::hnd, 448, 64, "cuda prefill bf16 d512 copy plain"},
                       row{layout_kind::hnd, 4, 16, "cuda prefill f32 d64 copy plain", dtype::f32},
                       row{layout_kind::nhd, 64, 5, "cuda prefill f32 d64 copy plain", dtype::f32},
                       row{layout_kind::hnd, 68, 64, "cuda prefill f32 d128 copy plain", dtype::f32},
                       row{layout_kind::nhd, 128, 16, "cuda prefill f32 d128 copy plain", dtype::f32}}) {
    CAPTURE(r.head_dim);
    CAPTURE(r.block_size);
    world w(r.kind);
    w.spec.qk_head_dim = w.spec.v_head_dim = r.head_dim;
    w.spec.block_size = r.block_size;
    w.spec.q_type = w.spec.k_code.type = w.spec.v_code.type = w.spec.out_type = r.type;
    w.layout = make_layout(r.kind, r.type, 2, r.head_dim, r.block_size);
    w.plan_for({{2000, 2000}});
    attention_params call = w.call();
    call.q = as_const(dense_view(world::array(1), r.type, 2000, 8, r.head_dim));
    call.out = dense_view(world::array(2), r.type, 2000, 8, r.head_dim);
    CHECK(w.where().describe(w.plan, call) == names{r.kernel});
  }
}

TEST_CASE("deterministic plans use prefill, which has decode's bits, and above 256 dims nothing else") {
  struct row {
    std::int32_t head_dim;
    dtype type;
  };
  for (const row& r :
       {row{128, dtype::bf16}, row{64, dtype::f16}, row{112, dtype::bf16}, row{40, dtype::bf16}, row{80, dtype::bf16},
        row{96, dtype::f16}, row{136, dtype::bf16}, row{160, dtype::f16}, row{192, dtype::bf16}, row{200, dtype::bf16},
        row{256, dtype::f16}, row{64, dtype::f32}, row{128, dtype::f32}, row{4, dtype::f32}}) {
    CAPTURE(r.head_dim);
    world w;
    w.spec.deterministic = true;
    w.spec.qk_head_dim = w.spec.v_head_dim = r.head_dim;
    w.spec.q_type = w.spec.k_code.type = w.spec.v_code.type = w.spec.out_type = r.type;
    w.plan_for({{2000, 2000}, {1, 500}});
    CHECK_FALSE(w.plans().prefill.empty());
    w.plan_for({{1, 500}, {1, 9000}});
    CHECK(w.plans().prefill.empty());
    CHECK(w.plans().decode.num_seqs == 2);
  }
  struct named {
    std::int32_t head_dim, block_size;
    const char* kernel;
    dtype type = dtype::bf16;
  };
  for (const named& n : {named{80, 16, "cuda prefill bf16 d96 copy deterministic"},
                         named{160, 16, "cuda prefill bf16 d192 copy deterministic"},
                         named{192, 16, "cuda prefill bf16 d192 tma deterministic"},
                         named{256, 128, "cuda prefill bf16 d256 tma deterministic"},
                         named{256, 8, "cuda prefill bf16 d256 copy deterministic"},
                         named{60, 16, "cuda prefill f32 d64 copy deterministic", dtype::f32},
                         named{128, 16, "cuda prefill f32 d128 copy deterministic", dtype::f32},
                         named{264, 16, "cuda prefill bf16 d512 copy deterministic"},
                         named{512, 16, "cuda prefill bf16 d512 tma deterministic"}}) {
    CAPTURE(n.kernel);
    world w;
    w.spec.deterministic = true;
    w.spec.qk_head_dim = w.spec.v_head_dim = n.head_dim;
    w.spec.block_size = n.block_size;
    w.spec.q_type = w.spec.k_code.type = w.spec.v_code.type = w.spec.out_type = n.type;
    w.layout = make_layout(layout_kind::hnd, n.type, 2, n.head_dim, n.block_size);
    w.plan_for({{2000, 2000}});
    attention_params call = w.call();
    call.q = as_const(dense_view(world::array(1), n.type, 2000, 8, n.head_dim));
    call.out = dense_view(world::array(2), n.type, 2000, 8, n.head_dim);
    CHECK(w.where().describe(w.plan, call) == names{n.kernel});
  }
  for (const std::int32_t head_dim : {264, 512}) {  // no decode kernel: prefill computes all sequences
    CAPTURE(head_dim);
    world w;
    w.spec.deterministic = true;
    w.spec.qk_head_dim = w.spec.v_head_dim = head_dim;
    w.plan_for({{2000, 2000}, {1, 9000}, {1, 0}});
    CHECK(w.plans().prefill.seqs == std::vector<std::int32_t>{0, 1, 2});
    CHECK(w.plans().decode.empty());
    w.spec.block_size = 16;
    w.layout = make_layout(layout_kind::hnd, dtype::bf16, 2, head_dim, 16);
    w.plan_for({{2000, 2000}});
    attention_params capped = w.call();
    capped.q = as_const(dense_view(world::array(1), dtype::bf16, 2000, 8, head_dim));
    capped.out = dense_view(world::array(2), dtype::bf16, 2000, 8, head_dim);
    capped.soft_cap = 5;
    const std::string loading = head_dim == 512 ? "tma" : "copy";
    CHECK(w.where().describe(w.plan, capped) ==
          names{"cuda prefill bf16 d512 " + loading + " deterministic transform"});
  }
  world w;
  w.spec.deterministic = true;
  w.plan_for({{2000, 2000}});
  CHECK(w.where().describe(w.plan, w.call()) == names{"cuda prefill bf16 d128 tma deterministic"});
  // What prefill declines goes to the general kernel in steps of decode as well: its bits would not be prefill's.
  w.plan_for({{1, 500}});
  attention_params decoding = w.call();
  CHECK(w.kernels_of(decoding) == names{"decode"});
  decoding.soft_cap = 0x1p-41f;
  CHECK(w.kernels_of(decoding) == names{"general"});
}

TEST_CASE("a call that the planned implementation declines is served by the general one, and planned for next time") {
  world w;
  cuda::reserve_plan(w.where(), w.plan, w.spec, 2, 2, 20000);
  w.plan_for({{1, 20000}, {1, 300}});
  const std::uint64_t epoch = cuda::graph_epoch(w.plan);
  w.runtime.forget_counts();
  CHECK(w.kernels_of(w.call_with_bias()) == names{"general"});
  REQUIRE(w.where().attention(w.plan, w.call_with_bias()) == errc::ok);
  CHECK(w.runtime.launches.size() == 1);
  for (const char* const forbidden : {"malloc_device", "malloc_host", "memcpy_async", "stream_synchronize"}) {
    CAPTURE(forbidden);
    CHECK(w.runtime.count(forbidden) == 0);
  }
  // A call that is planned for is still served as planned.
  CHECK(w.kernels_of(w.call()) == names{"decode"});
  CHECK_FALSE(w.plans().general.has_items);

  w.plan_for({{1, 20000}, {1, 301}});
  CHECK(w.plans().general.has_items);
  CHECK(w.plans().general.num_partials > 0);
  CHECK(w.plans().decode.num_seqs == 2);
  CHECK(w.runtime.count("malloc_device") == 0);
  CHECK(cuda::graph_epoch(w.plan) == epoch);  // a captured launch reads whether there are items
}

TEST_CASE("a cache of layout x_split goes to x_split, without anything planned for it") {
  world w(layout_kind::x_split);
  w.plan_for({{1, 20000}, {1, 300}});
  CHECK(w.kernels_of(w.call()) == names{"x_split"});
  w.plan_for({{1, 20000}, {3, 300}});
  CHECK(w.kernels_of(w.call()) == names{"x_split", "general"});
  w.runtime.forget_counts();
  REQUIRE(w.where().attention(w.plan, w.call()) == errc::ok);
  CHECK(w.runtime.launches.size() == 3);  // x_split's two and the general kernel
}

TEST_CASE("without a list of items the general kernel finds the same row tiles") {
  std::mt19937_64 random(test_seed());
  CAPTURE(seed_note());
  const auto below = [&](std::uint64_t n) { return static_cast<std::int32_t>(random() % n); };
  for (int round = 0; round < 200; ++round) {
    cuda::plan_input in;
    in.spec.num_kv_heads = 1;
    in.spec.num_q_heads = 1 + below(9);
    in.spec.qk_head_dim = in.spec.v_head_dim = 8;
    in.spec.block_size = 16;
    in.spec.causal = below(2) == 0;
    if (below(3) == 0) in.spec.window_left = below(2000);
    if (below(3) == 0) in.spec.window_right = below(700);
    in.device.num_sms = 1;
    std::vector<std::int32_t> starts{0};
    std::vector<std::int32_t> lens;
    in.num_seqs = below(6);
    for (std::int32_t i = 0; i < in.num_seqs; ++i) {
      starts.push_back(starts.back() + (below(3) == 0 ? below(70) : below(3)));
      lens.push_back(below(3) == 0 ? below(30) : below(6000));
      in.max_query_len = std::max(in.max_query_len, starts[static_cast<std::size_t>(i) + 1] - starts.rbegin()[1]);
    }
    in.query_start_loc = starts.data();
    in.seq_lens = lens.data();
    cuda::general_plan plan;
    cuda::plan_general(in, true, plan);

    cuda::attention_kernel_args args;
    args.query_start_loc = starts.data();
    args.seq_lens = lens.data();
    args.group_size = in.spec.num_q_heads;
    args.causal = in.spec.causal;
    args.window_left = in.spec.window_left;
    args.window_right = in.spec.causal ? 0 : in.spec.window_right;
    // A tile that is cut has its splits in items of their own, one after another.
    std::vector<cuda::general_item> expected;
    for (const cuda::general_item& item : plan.items) {
      const bool continues = item.tile >= 0 && item.partial > item.first_partial;
      if (continues) continue;
      expected.push_back(item);
      if (item.tile >= 0) expected.back().num_splits = item.num_partials;
    }
    // Three CTAs take tiles by turns.
    for (std::int64_t cta = 0; cta < 3; ++cta) {
      cuda::tile_walk walk{0, 0};
      for (auto ordinal = cta;; ordinal += 3) {
        cuda::general_item item;
        const bool found = walk.find(args, in.num_seqs, plan.rows_per_tile, ordinal, item);
        REQUIRE(found == (ordinal < static_cast<std::int64_t>(expected.size())));
        if (!found) break;
        const cuda::general_item& wanted = expected[static_cast<std::size_t>(ordinal)];
        CHECK(item.seq == wanted.seq);
        CHECK(item.first_row == wanted.first_row);
        CHECK(item.first_split == wanted.first_split);
        CHECK(item.num_splits == wanted.num_splits);
        CHECK(item.tile == -1);
      }
    }
  }
}

TEST_CASE("explain names every implementation of the list, and why each faster one declines") {
  world w;
  CHECK(w.where().explain(w.plan) == names{"prefill", "decode", "latent", "x_split", "general"});
  w.plan_for({{1, 5000}, {2000, 2000}, {1, 300}});
  names said = w.where().explain(w.plan);
  REQUIRE(said.size() == 5);
  CHECK(said[0] == "prefill takes 1 of 3 sequences");
  CHECK(said[1] == "decode takes 2 of 3 sequences");
  CHECK(said[2] == "latent declines: V is no part of K");
  CHECK(said[3].rfind("x_split takes 2 of 3 sequences of calls that those above decline", 0) == 0);
  CHECK(said[4].rfind("general takes 3 of 3 sequences of calls that those above decline", 0) == 0);

  world other(layout_kind::hnd, false);
  other.spec.qk_head_dim = other.spec.v_head_dim = 84;
  other.spec.block_size = 5;
  other.plan_for({{1, 100}});
  said = other.where().explain(other.plan);
  REQUIRE(said.size() == 5);
  CHECK(said[0] == "prefill declines: the driver has no cuTensorMapEncodeTiled");
  CHECK(said[1] == "decode declines: head_dim is 84; it takes multiples of 8 up to 256");
  CHECK(said[3] == "x_split declines: head_dim is 84; it takes 64, 128 and 256");
  CHECK(said[4] == "general takes 1 of 1 sequence");

  other.spec.k_code.type = other.spec.v_code.type = dtype::f32;
  other.spec.qk_head_dim = other.spec.v_head_dim = 128;
  other.plan_for({{1, 100}});
  said = other.where().explain(other.plan);
  CHECK(said[1] == "decode declines: the dtypes of q, kv and out are bf16, f32 and bf16; it takes one dtype for all");
  CHECK(said[3] == "x_split declines: block_size is 5; for f32 it takes multiples of 4");
}

TEST_CASE("only the general implementation takes query positions and V of another head_dim") {
  world w;
  const std::int32_t position = 5;
  w.plan_for({{1, 100}}, &position);
  names said = w.where().explain(w.plan);
  REQUIRE(said.size() == 5);
  for (const std::size_t i : {0u, 1u, 3u}) CHECK(contains(said[i], "declines: the batch has query_positions"));
  CHECK(said[4] == "general takes 1 of 1 sequence");
  CHECK(w.plans().general.has_items);
  w.spec.v_head_dim = 64;
  w.plan_for({{1, 100}});
  said = w.where().explain(w.plan);
  for (const std::size_t i : {0u, 1u, 3u}) {
    CHECK(contains(said[i], "declines: qk_head_dim is 128 and v_head_dim 64"));
  }
}

TEST_CASE("latent takes V in K of 576 and 512 dims, one KV head, heads that divide into its tiles") {
  world w;
  w.spec.num_q_heads = 16;
  w.spec.num_kv_heads = 1;
  w.spec.qk_head_dim = 576;
  w.spec.v_head_dim = 512;
  w.spec.v_in_k = true;
  w.layout = make_layout(layout_kind::hnd, {dtype::bf16}, {dtype::bf16}, 1, 576, 512, 16, true);
  const auto call = [&] {
    attention_params p = w.call();
    const std::int32_t heads = w.spec.num_q_heads;
    p.q = as_const(dense_view(world::array(1), dtype::bf16, w.starts.back(), heads, 576));
    p.out = dense_view(world::array(2), dtype::bf16, w.starts.back(), heads, 512);
    p.kv = {world::array(3), nullptr, 1, w.layout};
    return p;
  };
  const auto said_with = [&](auto change) {
    const attention_spec before = w.spec;
    change(w.spec);
    w.plan_for({{1, 100}});
    w.spec = before;
    return w.where().explain(w.plan).at(2);
  };
  w.plan_for({{1, 5000}, {0, 7}, {1, 300}});
  names said = w.where().explain(w.plan);
  REQUIRE(said.size() == 5);
  CHECK(said[0] == "prefill declines: V is part of K; it takes planes of their own");
  CHECK(said[2] == "latent takes 2 of 3 sequences");
  CHECK(w.where().describe(w.plan, call()) ==
        names{"cuda latent bf16 d576 rows 16 tma", "", "cuda latent bf16 d576 rows 16 tma"});
  w.runtime.forget_counts();
  REQUIRE(w.where().attention(w.plan, call()) == errc::ok);
  CHECK(w.runtime.launches.size() == 2);  // the long sequence is in parts, which are combined
  attention_params capped = call();
  capped.soft_cap = 3;
  CHECK(w.kernels_of(capped) == names{"general", ""});
  capped = call();
  capped.scale = -1;
  CHECK(w.kernels_of(capped) == names{"general", ""});

  w.plan_for({{1, 100}, {2, 100}});
  CHECK(w.where().describe(w.plan, call()).at(1) == "cuda latent bf16 d576 rows 64 tma");
  w.spec.block_size = 5;
  w.layout = make_layout(layout_kind::hnd, {dtype::bf16}, {dtype::bf16}, 1, 576, 512, 5, true);
  w.plan_for({{1, 100}});
  CHECK(w.where().describe(w.plan, call()).at(0) == "cuda latent bf16 d576 rows 16 copy");

  CHECK(said_with([](attention_spec& s) { s.num_q_heads = 128; }) == "latent takes 1 of 1 sequence");
  CHECK(said_with([](attention_spec& s) { s.num_q_heads = 71; }) ==
        "latent declines: there are 71 query heads; it takes numbers that divide into up to 8 times 64");
  CHECK(said_with([](attention_spec& s) { s.v_head_dim = 448; }) ==
        "latent declines: qk_head_dim is 576 and v_head_dim 448; it takes 576 and 512");
  CHECK(said_with([](attention_spec& s) { s.num_kv_heads = 2; }) ==
        "latent declines: there are 2 KV heads; it takes 1");
  CHECK(contains(said_with([](attention_spec& s) { s.deterministic = true; }), "the plan is deterministic"));
  CHECK(contains(said_with([](attention_spec& s) { s.q_type = dtype::f32; }), "it takes one 16-bit dtype for all"));
}

TEST_CASE("decode and prefill take codes of 8 bits in K and V beside q and out of one 16-bit type") {
  using g = scale_granularity;
  world w;
  std::string prefill;
  const auto decode_of = [&](const kv_code& k, const kv_code& v) {
    w.spec.k_code = k;
    w.spec.v_code = v;
    w.plan_for({{1, 100}, {1, 200}});
    const names said = w.where().explain(w.plan);
    REQUIRE(said.size() == 5);
    prefill = said[0];
    CHECK(contains(said[3], "x_split declines: "));
    return said[1];
  };
  const kv_code e4m3{dtype::e4m3, g::layer};
  const kv_code i8{dtype::i8, g::token_head};
  const std::string taken = "decode takes 2 of 2 sequences";
  CHECK(decode_of(e4m3, e4m3) == taken);
  CHECK(contains(prefill, "prefill takes 0 of 2 sequences"));
  CHECK(decode_of({dtype::e5m2}, {dtype::e4m3, g::head}) == taken);
  CHECK(contains(prefill, "prefill takes 0 of 2 sequences"));
  CHECK(decode_of(i8, {dtype::u8, g::token_head}) == taken);  // tails of other lengths
  CHECK(decode_of({dtype::u8, g::token_head}, {dtype::u8, g::token_head}) == taken);
  CHECK(decode_of({dtype::u8, g::token_head}, e4m3) == taken);
  CHECK(decode_of(i8, {dtype::e4m3, g::token_head}) == taken);
  CHECK(contains(prefill, "prefill takes 0 of 2 sequences"));
  CHECK(decode_of({dtype::bf16}, e4m3) == taken);
  CHECK(decode_of({dtype::bf16}, {dtype::u8, g::token_head}) == taken);
  CHECK(
      decode_of({dtype::f16}, e4m3) ==
      "decode declines: the dtypes of q, K and out are bf16, f16 and bf16; beside codes of V it takes one 16-bit dtype "
      "for all");
  CHECK(decode_of(e4m3, {dtype::bf16}) == taken);
  CHECK(decode_of(e4m3, {dtype::f16}) == taken);  // beside bf16 queries too
  CHECK(decode_of({dtype::u8, g::token_head}, {dtype::bf16}) == taken);
  CHECK(decode_of(e4m3, {dtype::f32}) ==
        "decode declines: K is stored as e4m3, scale per layer (f32) and V as f32; it takes types of 8 bits for both, "
        "or one of 16 bits beside codes");
  w.spec.q_type = w.spec.out_type = dtype::f16;
  CHECK(decode_of(e4m3, {dtype::f16}) == taken);
  CHECK(
      decode_of(e4m3, {dtype::bf16}) ==
      "decode declines: the dtypes of V and out are bf16 and f16; beside codes of K it takes V in f16 or in the dtype "
      "of q and out");
  w.spec.out_type = dtype::bf16;
  w.spec.q_type = dtype::f32;
  for (const kv_code& v : {e4m3, kv_code{dtype::f16}}) {
    CHECK(decode_of(e4m3, v) ==
          "decode declines: the dtypes of q and out are f32 and bf16; beside codes it takes f16 or bf16 for both");
  }
  w.spec.q_type = dtype::bf16;
  w.spec.qk_head_dim = w.spec.v_head_dim = 192;
  CHECK(decode_of(e4m3, e4m3) == taken);
  CHECK(decode_of({dtype::bf16}, e4m3) == taken);
  CHECK(decode_of(e4m3, {dtype::bf16}) == taken);
  CHECK(decode_of(e4m3, e4m3) == taken);
  CHECK(prefill == "prefill takes 0 of 2 sequences; decode is estimated to be faster for the others");
  for (const std::int32_t head_dim : {72, 200, 272}) {
    w.spec.qk_head_dim = w.spec.v_head_dim = head_dim;
    const std::string why =
        " declines: head_dim is " + std::to_string(head_dim) + "; it takes multiples of 16 up to 256";
    CHECK(decode_of(e4m3, {dtype::f16}) == "decode" + why);
    CHECK(decode_of(e4m3, e4m3) == "decode" + why);
    CHECK(prefill == "prefill" + why);
  }
}

TEST_CASE("prompts over codes are computed by prefill, by the kernel of their scales") {
  using g = scale_granularity;
  struct code_pair {
    kv_code k, v;
    const char* variant;
  };
  const code_pair pairs[] = {{{dtype::e4m3}, {dtype::e5m2}, "plain"},
                             {{dtype::e4m3, g::layer}, {dtype::i8, g::layer}, "plain"},
                             {{dtype::i8, g::head}, {dtype::e4m3, g::head}, "plain"},
                             {{dtype::e4m3, g::token_head}, {dtype::e4m3, g::token_head}, "token"},
                             {{dtype::i8, g::token_head}, {dtype::e4m3, g::token_head}, "token"},
                             {{dtype::e4m3, g::layer}, {dtype::e4m3, g::token_head}, "token"},
                             {{dtype::i8, g::token_head}, {dtype::e5m2}, "token"},
                             {{dtype::u8, g::token_head}, {dtype::u8, g::token_head}, "token zeros"},
                             {{dtype::u8, g::token_head}, {dtype::e4m3, g::token_head}, "token zeros"},
                             {{dtype::i8, g::head}, {dtype::u8, g::token_head}, "token zeros"},
                             // 16 bits beside codes
                             {{dtype::bf16}, {dtype::e4m3}, "token"},
                             {{dtype::f16}, {dtype::e4m3, g::layer}, "token"},
                             {{dtype::bf16}, {dtype::i8, g::token_head}, "token"},
                             {{dtype::f16}, {dtype::u8, g::token_head}, "token zeros"},
                             {{dtype::e4m3, g::head}, {dtype::bf16}, "token"},
                             {{dtype::e4m3, g::token_head}, {dtype::f16}, "token"},
                             {{dtype::u8, g::token_head}, {dtype::bf16}, "token zeros"}};
  for (const code_pair& codes : pairs) {
    world w;
    w.spec.k_code = codes.k;
    w.spec.v_code = codes.v;
    for (const auto& [head_dim, width] : {std::pair{128, "128"}, std::pair{144, "192"}, std::pair{256, "256"}}) {
      if (head_dim > 128 && size_of(codes.k.type) != size_of(codes.v.type)) continue;  // decode's
      w.spec.qk_head_dim = w.spec.v_head_dim = head_dim;
      w.layout = make_layout(layout_kind::hnd, codes.k, codes.v, 2, head_dim, head_dim, 16);
      w.plan_for({{2000, 2000}});
      attention_params params = w.call();
      params.kv.layout = w.layout;
      params.kv.k_scales = params.kv.v_scales = static_cast<const float*>(world::array(6));
      const std::string kernel = std::string("cuda prefill bf16 d") + width + " coded ";
      CHECK(w.where().describe(w.plan, params).at(0) == kernel + codes.variant);
      params.soft_cap = 30;
      const std::string variant = codes.variant;
      const std::string with_cap = variant == "plain" ? "transform" : variant + " transform";
      CHECK(w.where().describe(w.plan, params).at(0) == kernel + with_cap);
    }
  }
}

TEST_CASE("prefill takes K or V of 16 bits beside codes, and computes all sequences where decode does not") {
  using g = scale_granularity;
  world w;
  const auto prefill_of = [&](const kv_code& k, const kv_code& v) {
    w.spec.k_code = k;
    w.spec.v_code = v;
    w.plan_for({{1, 100}, {300, 300}});
    return w.where().explain(w.plan).front();
  };
  const kv_code e4m3{dtype::e4m3, g::token_head};
  const kv_code f16{dtype::f16};
  const kv_code bf16{dtype::bf16};
  const kv_code f32{dtype::f32};
  CHECK(prefill_of(f16, e4m3) == "prefill takes 2 of 2 sequences");  // decode asks for the type of q
  CHECK(contains(prefill_of(bf16, e4m3), " of 2 sequences"));
  CHECK(contains(prefill_of(e4m3, bf16), " of 2 sequences"));
  CHECK(prefill_of(f16, bf16) == "prefill declines: the codes of K and V differ");
  CHECK(contains(prefill_of(f32, e4m3), "prefill declines: K is stored as f32 and V as e4m3"));
  CHECK(contains(prefill_of(e4m3, f32), "; it takes types of 8 bits for both, or one of 16 bits beside codes"));
  w.spec.deterministic = true;
  for (const bool is_k : {true, false}) {
    CHECK(
        contains(is_k ? prefill_of(f16, e4m3) : prefill_of(e4m3, f16), "prefill declines: the plan is deterministic"));
  }
  w.spec.deterministic = false;
  w.spec.qk_head_dim = w.spec.v_head_dim = 192;
  CHECK(prefill_of(bf16, e4m3) == "prefill declines: head_dim is 192; it takes multiples of 16 up to 128");
  w.spec.qk_head_dim = w.spec.v_head_dim = 72;
  CHECK(prefill_of(e4m3, bf16) == "prefill declines: head_dim is 72; it takes multiples of 16 up to 128");
  w.spec.q_type = dtype::f32;
  CHECK(contains(prefill_of(e4m3, bf16), "beside codes it takes f16 or bf16 for both"));
}

TEST_CASE("every implementation can be forced by name") {
  for (const std::string& name : names{"prefill", "decode", "x_split", "general"}) {
    CAPTURE(name);
    world w(name == "x_split" ? layout_kind::x_split : layout_kind::hnd);
    {
      const std::string gone = name;  // the text need not outlive planning
      w.spec.implementation = gone;
      w.plan_for({{1, 5000}, {2000, 2000}, {1, 300}});
    }
    CHECK(w.plan.spec.implementation == name);
    w.runtime.forget_counts();
    REQUIRE(w.where().attention(w.plan, w.call()) == errc::ok);
    CHECK(w.kernels_of(w.call()) == (name == "x_split" ? names{"x_split", "general"} : names{name}));
    if (name == "general") {
      CHECK(w.plans().general.has_items);
      continue;
    }
    // A call that it does not take is refused, and nothing is launched.
    w.runtime.forget_counts();
    CHECK(w.where().attention(w.plan, w.call_with_bias()) == errc::unsupported);
    CHECK(w.where().describe(w.plan, w.call_with_bias()).empty());
    CHECK(w.runtime.launches.empty());
  }
}

TEST_CASE("a forced implementation that does not exist or declines is refused with the list and the reason") {
  world w;
  w.spec.implementation = "fastest";
  const error unknown = refusal_of(w);
  CHECK(unknown.code() == errc::invalid_argument);
  CHECK(contains(unknown.what(), "attention_spec::implementation is 'fastest'"));
  CHECK(contains(unknown.what(), "prefill, decode, latent, x_split, general"));
  w.spec.implementation = "prefill";
  w.spec.qk_head_dim = w.spec.v_head_dim = 132;
  const error declined = refusal_of(w);
  CHECK(declined.code() == errc::unsupported);
  CHECK(contains(declined.what(), "head_dim is 132; it takes multiples of 8 up to 512"));
  w.spec.q_type = w.spec.k_code.type = w.spec.v_code.type = w.spec.out_type = dtype::f32;
  CHECK(contains(refusal_of(w).what(), "head_dim is 132; it takes multiples of 4 up to 128"));
  CHECK(contains(declined.what(), "prefill, decode, latent, x_split, general"));
  CHECK(w.plan.state == nullptr);
}

TEST_CASE("BIFOLIO_ATTENTION forces an implementation of backends that are opened later, and a spec goes before it") {
  REQUIRE(setenv("BIFOLIO_ATTENTION", "general", 1) == 0);
  world w;
  REQUIRE(setenv("BIFOLIO_ATTENTION", "no such name", 1) == 0);
  world wrong;
  REQUIRE(setenv("BIFOLIO_ATTENTION", "cpu:no such name", 1) == 0);
  world not_meant;
  REQUIRE(setenv("BIFOLIO_ATTENTION", "cuda:general", 1) == 0);
  world meant;
  REQUIRE(unsetenv("BIFOLIO_ATTENTION") == 0);
  w.plan_for({{1, 100}});
  CHECK(w.kernels_of(w.call()) == names{"general"});
  w.spec.implementation = "decode";
  w.plan_for({{1, 100}});
  CHECK(w.kernels_of(w.call()) == names{"decode"});
  not_meant.plan_for({{1, 100}});
  CHECK(not_meant.kernels_of(not_meant.call()) == names{"decode"});
  meant.plan_for({{1, 100}});
  CHECK(meant.kernels_of(meant.call()) == names{"general"});
  const error e = refusal_of(wrong);
  CHECK(e.code() == errc::invalid_argument);
  CHECK(contains(e.what(), "BIFOLIO_ATTENTION is 'no such name'"));
}

TEST_CASE("the number of decoding sequences next to a prefill is no part of the graph epoch") {
  world w;
  cuda::reserve_plan(w.where(), w.plan, w.spec, 8, 2003, 5000);
  w.plan_for({{2000, 2000}, {1, 500}, {1, 300}, {1, 10}});
  const std::uint64_t epoch = cuda::graph_epoch(w.plan);
  w.plan_for({{2001, 2001}, {1, 500}, {1, 300}, {0, 10}});
  CHECK(cuda::graph_epoch(w.plan) == epoch);
}

TEST_CASE("prefill declines codes whose plane reaches beyond 64 GiB by any of its strides") {
  cuda::attention_kernel_args args;  // null pointers are aligned
  args.q_type = args.out_type = dtype::bf16;
  args.kv_type = args.k_type = args.v_type = dtype::e4m3;
  args.is_coded = true;
  args.num_q_heads = args.num_kv_heads = 8;
  args.group_size = 1;
  args.head_dim = args.v_head_dim = 128;
  args.q_token_stride = args.out_token_stride = 8 * 128;
  args.q_head_stride = args.out_head_stride = 128;
  args.scale = 1;
  const auto accepts = [&](std::int32_t block_size, std::int64_t num_blocks, std::int64_t block, std::int64_t token) {
    args.block_size = block_size;
    args.num_blocks = num_blocks;
    args.k_strides = args.v_strides = {.block = block, .head = 128, .token = token, .chunk = 128};
    std::string why;
    const bool accepted = cuda::prefill_accepts_call(args, &why);
    CHECK(accepted == why.empty());
    return accepted;
  };
  constexpr std::int64_t blocks_of_48_gib = (std::int64_t{48} << 30) / (64 * 1024);
  constexpr std::int64_t blocks_of_96_gib = 2 * blocks_of_48_gib;
  CHECK(accepts(64, blocks_of_48_gib, 64 * 1024, 1024));
  CHECK_FALSE(accepts(64, blocks_of_96_gib, 64 * 1024, 1024));
  // The same planes with a token of all blocks side by side.
  CHECK(accepts(64, blocks_of_48_gib, 1024, 1024 * blocks_of_48_gib));
  CHECK_FALSE(accepts(64, blocks_of_96_gib, 1024, 1024 * blocks_of_96_gib));
  // Twice as many bytes where K or V has 16 bits.
  for (dtype* const wide : {&args.k_type, &args.v_type}) {
    *wide = dtype::bf16;
    args.kv_type = args.k_type;
    CHECK_FALSE(accepts(64, blocks_of_48_gib, 64 * 1024, 1024));
    CHECK(accepts(64, blocks_of_48_gib / 2, 64 * 1024, 1024));
    CHECK_FALSE(accepts(64, blocks_of_48_gib, 1024, 1024 * blocks_of_48_gib));
    *wide = dtype::e4m3;
  }
}

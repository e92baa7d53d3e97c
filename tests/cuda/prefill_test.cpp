// SPDX-License-Identifier: Apache-2.0
// The prefill implementation, forced by name, on both sides of each border: rows of one, two and three warpgroups, row
// tiles in one part, two and many, groups that do and do not fill a tile, unequal lengths, in 16 bits and in float32;
// against the oracle, and bit for bit from call to call.
#include <doctest/doctest.h>

#include <bifolio/error.hpp>
#include <string>
#include <utility>
#include <vector>

#include "conformance/attention_case.hpp"
#include "support/random.hpp"
#include "support/skip.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

const tested_backend* cuda_under_test() {
  for (const tested_backend& tested : all_backends()) {
    if (tested.get().where().type == device_type::cuda) return &tested;
  }
  return nullptr;
}

void set_dtype(attention_case& c, dtype type) { c.q_type = c.kv_type = c.out_type = type; }

attention_case bf16_case(std::int32_t num_kv_heads, std::int32_t group, std::vector<batch_seq> seqs) {
  return {.what = "prefill",
          .num_kv_heads = num_kv_heads,
          .group_size = group,
          .head_dim = 128,
          .block_size = 16,
          .q_type = dtype::bf16,
          .kv_type = dtype::bf16,
          .out_type = dtype::bf16,
          .seqs = std::move(seqs),
          .seed = 41};
}

/// What is wrong with the case under the forced implementation. `declined`: the device does not have it.
std::string check_forced(const tested_backend& tested, const attention_case& c, bool& declined) {
  const attention_contents contents(c);
  attention_call call(tested, c, contents, placement_in_turn(c, 0));
  call.spec.implementation = "prefill";
  try {
    call.plan();
  } catch (const error& refused) {
    declined = refused.code() == errc::unsupported;
    return declined ? "" : refused.what();
  }
  std::string problem;
  if (call.run() != errc::ok) return "the call is refused";
  const attention_output first = call.read(problem);
  problem += attention_expectation(c, contents).problem_of(first, numbers_for(tested, c));
  for (int again = 0; again < 2; ++again) {
    call.reset_outputs();
    if (call.run() != errc::ok) return "the call is refused the second time";
    problem += bit_difference(first, call.read(problem));
  }
  return problem.empty() ? "" : problem + " [" + describe(c) + "]";
}

void check_all(const std::vector<attention_case>& cases) {
  const tested_backend* const tested = cuda_under_test();
  if (tested == nullptr) return skip("no CUDA device");
  for (const attention_case& c : cases) {
    bool declined = false;
    CHECK(check_forced(*tested, c, declined) == "");
    if (declined) return skip("the device has no prefill implementation");
  }
}

void add_options(attention_case& c) {
  c.window_left = 700;
  c.soft_cap = 5;
  c.alibi = c.sinks = true;
}

}  // namespace

TEST_CASE("prefill of few rows, of each warpgroup, a tile and one more, over short and long keys") {
  std::vector<attention_case> cases;
  for (const std::int32_t head_dim : {64, 128}) {
    for (const std::int32_t group : {1, 4, 8}) {
      for (const std::int32_t rows : {16, 17, 64, 65, 128, 129, 192, 193, 385}) {
        if (rows > 129 && head_dim == 128) continue;
        const std::int32_t tokens = (rows + group - 1) / group;
        for (const std::int32_t context : {tokens, 257, 5000}) {
          if (context < tokens) continue;
          attention_case c = bf16_case(2, group, {{tokens, context, 0}});
          c.head_dim = head_dim;
          cases.push_back(c);
          if (context != 5000 || rows == 64) continue;
          add_options(c);
          cases.push_back(c);
        }
      }
    }
  }
  check_all(cases);
}

TEST_CASE(
    "float32 and 512 dims: prefill of few rows, of each warpgroup, a tile and one more, over short and long keys") {
  struct kernel_shape {
    dtype type;
    std::int32_t head_dim;
    std::vector<std::int32_t> rows;
  };
  std::vector<attention_case> cases;
  for (const kernel_shape& shape :
       {kernel_shape{dtype::f32, 64, {1, 17, 64, 65, 129}}, kernel_shape{dtype::f32, 128, {1, 17, 64, 65, 129}},
        kernel_shape{dtype::bf16, 512, {1, 17, 65}}, kernel_shape{dtype::f16, 320, {64, 65}}}) {
    for (const std::int32_t group : {1, 8}) {
      for (const std::int32_t rows : shape.rows) {
        const std::int32_t tokens = (rows + group - 1) / group;
        for (const std::int32_t context : {257, 2100}) {
          if (context < tokens) continue;
          attention_case c = bf16_case(2, group, {{tokens, context, 0}});
          set_dtype(c, shape.type);
          c.head_dim = shape.head_dim;
          cases.push_back(c);
          if (context != 2100 || rows == 64) continue;
          add_options(c);
          cases.push_back(c);
        }
      }
    }
  }
  check_all(cases);
}

TEST_CASE("prefill of groups that leave rows unused, packed and a head at a time") {
  std::vector<attention_case> cases;
  for (const std::int32_t group : {3, 5, 6, 7, 12, 33, 64, 71}) {
    const std::int32_t per_warpgroup = group > 64 ? 64 : 64 / group;
    for (const std::int32_t tokens : {1, per_warpgroup, per_warpgroup + 1, 2 * per_warpgroup, 2 * per_warpgroup + 1,
                                      3 * per_warpgroup, 3 * per_warpgroup + 1}) {
      cases.push_back(bf16_case(1, group, {{tokens, tokens + (group > 12 ? 200 : 1500), 0}}));
    }
    const std::int32_t prompt = group > 12 ? 150 : 500;
    cases.push_back(bf16_case(1, group, {{prompt, prompt, 0}}));
    set_dtype(cases.emplace_back(cases.back()), dtype::f32);
    add_options(cases.emplace_back(cases.back()));
    set_dtype(cases.emplace_back(cases.back()), dtype::bf16);
  }
  check_all(cases);
}

TEST_CASE("prefill of row tiles in one part, two and many, whole ones among them") {
  std::vector<attention_case> cases;
  for (const std::int32_t head_dim : {64, 128}) {
    for (const dtype type : {dtype::bf16, dtype::f16}) {
      for (const std::vector<batch_seq>& seqs :
           {std::vector<batch_seq>{{33, 9000, 0}},
            std::vector<batch_seq>(9, batch_seq{5, 2600}),
            std::vector<batch_seq>(17, batch_seq{9, 1100}),
            {{300, 300}, {1, 4000}, {0, 70}, {5, 5}, {17, 130}, {70, 3000}, {1, 1}, {2, 6000}}}) {
        attention_case c = bf16_case(4, 1, seqs);
        c.head_dim = head_dim;
        c.q_type = c.kv_type = c.out_type = type;
        cases.push_back(c);
        c.causal = false;
        cases.push_back(c);
        add_options(c);
        cases.push_back(c);
        c.lse = false;
        c.window_right = 20;
        cases.push_back(c);
      }
    }
  }
  check_all(cases);
}

TEST_CASE("float32 and 512 dims: prefill of row tiles in one part, two and many, whole ones among them") {
  std::vector<attention_case> cases;
  for (const std::vector<batch_seq>& seqs :
       {std::vector<batch_seq>{{33, 4000, 0}},
        std::vector<batch_seq>(9, batch_seq{5, 1300}),
        {{300, 300}, {1, 1500}, {0, 70}, {5, 5}, {17, 130}, {70, 1100}, {1, 1}, {2, 2000}}}) {
    for (const auto& shape : {std::pair{dtype::f32, 64}, {dtype::f32, 128}, {dtype::f16, 512}, {dtype::bf16, 512}}) {
      attention_case c = bf16_case(4, 1, seqs);
      set_dtype(c, shape.first);
      c.head_dim = shape.second;
      cases.push_back(c);
      c.causal = false;
      add_options(c);
      cases.push_back(c);
      c.lse = false;
      c.window_right = 20;
      cases.push_back(c);
    }
  }
  check_all(cases);
}

TEST_CASE("prefill with a soft cap on both sides of the border of its formulas, in one tile and in all") {
  std::vector<attention_case> cases;
  for (const std::int32_t head_dim : {64, 128, 256}) {
    for (const value_kind values : {value_kind::normal, value_kind::dominant_key, value_kind::huge_logits}) {
      // Arguments of tanh up to about 4 / cap; of the huge ones up to 80 / cap.
      for (const float cap : {0.5f, 5.0f, 11.0f, 30.0f, 300.0f, 0x1p30f, 0x1p-30f}) {
        attention_case c = bf16_case(2, 2, {{150, 700, 0}, {1, 300}, {260, 260}});
        c.head_dim = head_dim;
        c.soft_cap = cap;
        c.values = values;
        c.sinks = cases.size() % 2 == 1;
        if (cases.size() % 3 == 2) c.window_left = 200;
        cases.push_back(c);
        if (head_dim == 128) set_dtype(cases.emplace_back(c), dtype::f32);
        if (cap != 5.0f && cap != 300.0f) continue;
        c.q_type = c.kv_type = c.out_type = dtype::f16;
        cases.push_back(c);
        c.scale = -0.1f;
        cases.push_back(c);
      }
    }
  }
  check_all(cases);
}

TEST_CASE("a row's bits, under a soft cap and without, do not depend on the rows and keys in its tile") {
  const tested_backend* const tested = cuda_under_test();
  if (tested == nullptr) return skip("no CUDA device");
  // 70 tokens after 200, with 58 tokens before them in their tile or alone; so many other sequences that none is cut.
  struct kernel_shape {
    dtype type;
    std::int32_t head_dim;
  };
  for (const kernel_shape& shape :
       {kernel_shape{dtype::bf16, 64}, kernel_shape{dtype::bf16, 128}, kernel_shape{dtype::bf16, 512},
        kernel_shape{dtype::f32, 64}, kernel_shape{dtype::f32, 128}}) {
    for (const float cap : {0.0f, 2.0f, 9.0f, 30.0f}) {
      attention_output last[2];
      for (const std::int32_t before : {0, 58}) {
        attention_case c = bf16_case(1, 1, std::vector<batch_seq>(1400, batch_seq{1, 1}));
        c.seqs[0] = {70 + before, 270};
        set_dtype(c, shape.type);
        c.head_dim = shape.head_dim;
        c.soft_cap = cap;
        attention_call call(*tested, c, attention_contents(c), placement_in_turn(c, 0));
        call.spec.implementation = "prefill";
        try {
          call.plan();
        } catch (const error& refused) {
          if (refused.code() == errc::unsupported) return skip("the device has no prefill implementation");
          throw;
        }
        REQUIRE(call.run() == errc::ok);
        std::string problem;
        const attention_output all = rows_of(c, call.read(problem), 0);
        CHECK(problem == "");
        last[before > 0 ? 1 : 0] = {{all.out.end() - 70 * shape.head_dim, all.out.end()},
                                    {all.lse.end() - 70, all.lse.end()}};
      }
      CAPTURE(to_string(shape.type));
      CAPTURE(shape.head_dim);
      CAPTURE(cap);
      CHECK(bit_difference(last[0], last[1]) == "");
    }
  }
}

TEST_CASE("prefill of more work tiles than SMs, call after call with other plans") {
  std::vector<attention_case> cases;
  for (const int num_seqs : {70, 400, 150, 1, 300}) {
    std::vector<batch_seq> seqs(static_cast<std::size_t>(num_seqs), batch_seq{20, 100});
    for (std::size_t i = 0; i < seqs.size(); i += 3) seqs[i] = {static_cast<std::int32_t>(i % 90), 300};
    seqs.push_back({600, 600});
    cases.push_back(bf16_case(2, 2, seqs));
    if (num_seqs <= 150) set_dtype(cases.emplace_back(cases.back()), dtype::f32);
  }
  check_all(cases);
}

TEST_CASE("random prefill agrees with the oracle, of tensors and of codes") {
  using g = scale_granularity;
  random_source random(hash_of(test_seed(), 0x9f1));
  CAPTURE(seed_note());
  std::vector<attention_case> cases;
  for (int round = 0; round < 30; ++round) {
    const auto between = [&](std::int64_t low, std::int64_t high) {
      return static_cast<std::int32_t>(random.between(low, high));
    };
    std::vector<batch_seq> seqs;
    const std::int32_t num_seqs = between(1, 6);
    for (std::int32_t i = 0; i < num_seqs; ++i) {
      const std::int32_t query_len = between(0, between(0, 2) == 0 ? 300 : 30);
      seqs.push_back({query_len, query_len + between(0, between(0, 2) == 0 ? 4000 : 200)});
    }
    attention_case c = bf16_case(between(1, 4), between(1, 9), seqs);
    c.head_dim = between(0, 1) == 0 ? 64 : 128;
    const std::int32_t kind = between(0, 8);
    if (kind < 2) {
      set_dtype(c, dtype::f32);
      c.head_dim = 4 * between(1, 32);
    } else if (kind == 2) {
      c.head_dim = 8 * between(1, 64);
    } else if (kind > 5) {
      const kv_code codes[] = {{dtype::e4m3},
                               {dtype::e5m2, g::layer},
                               {dtype::i8, g::head},
                               {dtype::e4m3, g::token_head},
                               {dtype::u8, g::token_head}};
      if (between(0, 1) == 0) c.q_type = c.out_type = dtype::f16;
      c.head_dim = 16 * between(1, 16);
      c = with_codes(c, codes[between(0, 4)], codes[between(0, 4)]);
    }
    c.block_size = 8 << between(0, 4);
    c.causal = between(0, 3) != 0;
    if (between(0, 2) == 0) c.window_left = between(0, 900);
    if (between(0, 3) == 0) c.window_right = between(0, 100);
    if (between(0, 3) == 0) c.soft_cap = 5;
    c.alibi = between(0, 3) == 0;
    c.sinks = between(0, 3) == 0;
    c.layout = between(0, 1) == 0 ? arrangement::hnd : arrangement::nhd;
    c.seed = static_cast<std::uint64_t>(round);
    cases.push_back(c);
  }
  check_all(cases);
}

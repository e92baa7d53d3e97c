// SPDX-License-Identifier: Apache-2.0
// What a deterministic plan promises of the tensor-core kernel: a token's bits do not depend on how its prompt was cut,
// on the other sequences of the batch, or on physical blocks. Rows are aligned here, so that this kernel is taken; the
// conformance suite's are not. And what decode on x_split promises of every plan: a row's bits depend on the row alone.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/error.hpp>
#include <string>
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

attention_output run(const tested_backend& tested, const attention_case& c, std::uint64_t order = 1) {
  return run_attention(tested, c, attention_contents(c), {{order, 2, 0}, 0, 0, 0, 0});
}

/// Rows [from, to) of the tokens of a result.
attention_output tokens_of(const attention_case& c, const attention_output& all, std::int64_t from, std::int64_t to) {
  const auto heads = static_cast<std::ptrdiff_t>(c.num_q_heads());
  const auto row = heads * c.head_dim;
  attention_output part;
  part.out.assign(all.out.begin() + from * row, all.out.begin() + to * row);
  part.lse.assign(all.lse.begin() + from * heads, all.lse.begin() + to * heads);
  return part;
}

attention_case deterministic_case(dtype type, std::int32_t head_dim, std::int32_t group, bool options) {
  attention_case c{.what = "deterministic",
                   .num_kv_heads = 1,
                   .group_size = group,
                   .head_dim = head_dim,
                   .block_size = 16,
                   .q_type = type,
                   .kv_type = type,
                   .out_type = type,
                   .deterministic = true,
                   .seed = 31};
  if (options) {
    c.window_left = 5000;
    c.soft_cap = 8;
    c.alibi = c.sinks = true;
  }
  return c;
}

}  // namespace

TEST_CASE("a prompt prefilled in chunks of any size, among any batch mates, has the bits of the whole on CUDA") {
  const tested_backend* const tested = cuda_under_test();
  if (tested == nullptr) return skip("no CUDA device");
  random_source random(hash_of(test_seed(), 0xde7));
  CAPTURE(seed_note());
  struct shape {
    dtype type;
    std::int32_t head_dim, group, length;
    bool options;
  };
  // 4096 positions are one run of chunks: the long ones have two.
  for (const shape& s : {shape{dtype::bf16, 128, 4, 5200, false}, shape{dtype::f16, 128, 3, 5200, true},
                         shape{dtype::bf16, 64, 7, 5200, true}, shape{dtype::f16, 64, 8, 700, false},
                         shape{dtype::bf16, 256, 2, 4500, false}, shape{dtype::bf16, 128, 20, 600, true},
                         shape{dtype::f16, 256, 8, 700, true}, shape{dtype::bf16, 192, 4, 4500, true},
                         shape{dtype::f16, 160, 3, 700, false}, shape{dtype::bf16, 80, 7, 4500, false},
                         shape{dtype::f16, 96, 4, 700, true}, shape{dtype::bf16, 512, 2, 2600, false},
                         shape{dtype::f16, 320, 4, 2600, true}, shape{dtype::f16, 512, 3, 1300, true},
                         shape{dtype::f32, 128, 4, 4500, false}, shape{dtype::f32, 80, 3, 700, true},
                         shape{dtype::f32, 64, 8, 4500, true}, shape{dtype::f32, 36, 20, 600, false}}) {
    attention_case whole = deterministic_case(s.type, s.head_dim, s.group, s.options);
    whole.seqs = {{s.length, s.length, 0}};
    const attention_output expected = run(*tested, whole);
    const auto compare = [&](std::int32_t from, std::int32_t to, const std::vector<batch_seq>& mates,
                             std::uint64_t order, const std::string& how) {
      attention_case part = whole;
      part.seqs = {{to - from, to, 0}};
      part.seqs.insert(part.seqs.end(), mates.begin(), mates.end());
      const attention_output got = tokens_of(part, run(*tested, part, order), 0, to - from);
      const std::string difference = bit_difference(tokens_of(whole, expected, from, to), got);
      CHECK_MESSAGE(difference.empty(), how, ", tokens ", from, " to ", to, ": ", difference, describe(part));
    };
    for (const std::int32_t chunk : {1, 7, 64, 2048}) {
      // Stretches at the start, around borders of tiles, chunks and runs, and at the end represent all.
      for (const std::int32_t around : {0, 64, 256, 600, 1024, 4096, s.length}) {
        for (std::int32_t i = -2; i <= 2; ++i) {
          const std::int32_t from = around + i * chunk - chunk / 2;
          if (from < 0 || from + chunk > s.length) continue;
          compare(from, from + chunk, {}, 1, "chunks of " + std::to_string(chunk));
        }
      }
    }
    // The same tokens among many short sequences, among a few long ones, and in other blocks.
    for (const std::int32_t at : {s.length, s.length / 2 + 3}) {
      compare(at - 1, at, std::vector<batch_seq>(300, {1, 80, 3}), 5, "decode among 300 sequences");
      compare(at - 1, at, {{1, 3000, 1}, {200, 700, 2}, {0, 5, 3}}, 6, "decode among a prefill");
      compare(at - 9, at, {{1, 5000, 1}}, 7, "nine tokens beside a long sequence");
    }
  }
}

TEST_CASE("decode and prefill, each forced, give a row the same bits in deterministic plans on CUDA") {
  const tested_backend* const tested = cuda_under_test();
  if (tested == nullptr) return skip("no CUDA device");
  // Both sides of a run of 64 keys, a tile of 128, a leaf of 256, a node of 4096; windows that begin in a leaf. Each
  // padded shape of either: decode's 80 and 160 are parts of prefill's 96 and 192.
  struct shape {
    dtype type;
    std::int32_t head_dim, group, block_size;
    std::vector<batch_seq> seqs;
    std::int32_t window_left;
    bool options;
  };
  const std::vector<batch_seq> borders = {{64, 64, 0},  {65, 65, 0},   {3, 127, 1},   {130, 257, 1},
                                          {9, 4096, 2}, {20, 4200, 2}, {40, 8300, 3}, {1, 1, 3}};
  for (const shape& s : {shape{dtype::bf16, 128, 4, 16, borders, -1, false},
                         shape{dtype::f16, 128, 8, 7, borders, -1, true},
                         shape{dtype::bf16, 64, 5, 16, borders, 300, false},
                         shape{dtype::f16, 64, 1, 48, borders, 4500, true},
                         shape{dtype::bf16, 64, 2, 8, {{300, 700, 0}, {9, 9, 1}}, -1, true},
                         shape{dtype::bf16, 112, 2, 16, borders, -1, false},
                         shape{dtype::f16, 40, 3, 16, borders, 129, false},
                         shape{dtype::bf16, 128, 1, 64, {{600, 600, 0}, {70, 5000, 1}}, -1, false},
                         shape{dtype::bf16, 80, 4, 16, borders, -1, false},
                         shape{dtype::f16, 72, 3, 5, borders, 300, true},
                         shape{dtype::f16, 96, 8, 16, borders, -1, false},
                         shape{dtype::bf16, 88, 1, 48, borders, 4500, true},
                         shape{dtype::bf16, 160, 4, 16, borders, -1, false},
                         shape{dtype::f16, 136, 2, 7, borders, 129, true},
                         shape{dtype::f16, 192, 4, 16, borders, -1, false},
                         shape{dtype::bf16, 168, 5, 64, borders, 4500, true},
                         shape{dtype::bf16, 192, 1, 128, {{600, 600, 0}, {70, 5000, 1}}, 300, false},
                         shape{dtype::bf16, 256, 4, 16, borders, -1, false},
                         shape{dtype::f16, 256, 8, 7, borders, 300, true},
                         shape{dtype::f16, 200, 3, 32, borders, 4500, false},
                         shape{dtype::bf16, 248, 2, 8, borders, -1, true},
                         shape{dtype::f16, 256, 1, 64, {{600, 600, 0}, {70, 9000, 1}}, -1, false},
                         shape{dtype::f32, 128, 4, 16, borders, -1, false},
                         shape{dtype::f32, 128, 8, 7, borders, 300, true},
                         shape{dtype::f32, 96, 3, 32, borders, 4500, true},
                         shape{dtype::f32, 64, 5, 16, borders, -1, false},
                         shape{dtype::f32, 60, 1, 5, borders, 129, true},
                         shape{dtype::f32, 64, 2, 8, {{300, 700, 0}, {9, 9, 1}}, -1, true},
                         shape{dtype::f32, 128, 1, 64, {{600, 600, 0}, {70, 9000, 1}}, -1, false}}) {
    attention_case c = deterministic_case(s.type, s.head_dim, s.group, s.options);
    c.num_kv_heads = 2;
    c.block_size = s.block_size;
    c.seqs = s.seqs;
    c.window_left = s.window_left;
    const attention_contents contents(c);
    attention_output got[2];
    for (const bool by_prefill : {false, true}) {
      attention_call call(*tested, c, contents, placement_in_turn(c, 0));
      call.spec.implementation = by_prefill ? "prefill" : "decode";
      try {
        call.plan();
      } catch (const error& refused) {
        CHECK_MESSAGE(is_for_lack_of_a_kernel(refused), refused.what());
        return skip("the device has no prefill implementation");
      }
      std::string problem;
      REQUIRE(call.run() == errc::ok);
      got[by_prefill ? 1 : 0] = call.read(problem);
      CHECK(problem == "");
    }
    const attention_expectation expectation(c, contents);
    CHECK(expectation.problem_of(got[0], tested->numbers_for(c.q_type, c.kv_type, c.out_type, c.head_dim)) == "");
    CHECK_MESSAGE(bit_difference(got[0], got[1]) == "", describe(c));
  }
}

TEST_CASE("long sequences have the same bits alone and in a batch that cuts them into runs on CUDA") {
  const tested_backend* const tested = cuda_under_test();
  if (tested == nullptr) return skip("no CUDA device");
  struct shape {
    dtype type;
    std::int32_t head_dim;
  };
  for (const auto [type, head_dim] : {shape{dtype::bf16, 64}, shape{dtype::bf16, 96}, shape{dtype::bf16, 160},
                                      shape{dtype::bf16, 256}, shape{dtype::f32, 64}, shape{dtype::f32, 128}}) {
    attention_case alone = deterministic_case(type, head_dim, 2, false);
    CAPTURE(describe(alone));
    alone.num_kv_heads = head_dim * (type == dtype::f32 ? 2 : 1) <= 128 ? 4 : 2;  // wide shapes have half as many CTAs
    alone.seqs = {{1, 10200, 0}};
    attention_case many = alone;
    many.seqs.assign(14, {1, 10200, 0});
    for (std::size_t i = 0; i < many.seqs.size(); ++i) many.seqs[i].seq_len -= static_cast<std::int32_t>(37 * i);
    attention_case crowd = alone;
    crowd.seqs.insert(crowd.seqs.end(), 400, {1, 90, 1});
    const attention_output in_batch = run(*tested, many);
    CHECK(bit_difference(run(*tested, alone), tokens_of(many, in_batch, 0, 1)) == "");
    CHECK(bit_difference(run(*tested, alone), tokens_of(crowd, run(*tested, crowd), 0, 1)) == "");
    for (const std::size_t other : {std::size_t{3}, std::size_t{9}}) {
      attention_case one = alone;
      one.seqs = {many.seqs[other]};
      CHECK(bit_difference(run(*tested, one), tokens_of(many, in_batch, static_cast<std::int64_t>(other),
                                                        static_cast<std::int64_t>(other) + 1)) == "");
    }
  }
}

TEST_CASE("above 256 dims rows have the same bits in one CTA and in one for each part of their keys on CUDA") {
  const tested_backend* const tested = cuda_under_test();
  if (tested == nullptr) return skip("no CUDA device");
  struct shape {
    dtype type;
    std::int32_t head_dim, group, block_size, window_left;
    bool options;
  };
  for (const shape& s : {shape{dtype::bf16, 512, 2, 16, -1, false}, shape{dtype::f16, 320, 4, 16, 2100, true},
                         shape{dtype::bf16, 264, 3, 7, 1500, true}, shape{dtype::f16, 512, 1, 64, 300, false}}) {
    attention_case few = deterministic_case(s.type, s.head_dim, s.group, s.options);
    few.block_size = s.block_size;
    few.window_left = s.window_left;
    few.seqs = {{40, 5200, 0}};  // few row tiles: each part has a CTA
    const attention_contents contents(few);
    const attention_output expected = run_attention(*tested, few, contents, placement_in_turn(few, 0));
    const attention_expectation expectation(few, contents);
    CHECK(expectation.problem_of(expected, tested->numbers_for(s.type, s.type, s.type, s.head_dim)) == "");
    // So many others that no row tile is cut; or more row tiles of the same sequence; or one token.
    attention_case many = few;
    many.seqs.insert(many.seqs.end(), 1100, {1, 20, 1});
    CHECK_MESSAGE(bit_difference(expected, tokens_of(many, run(*tested, many, 3), 0, 40)) == "", describe(few));
    attention_case more = few;
    more.seqs[0].query_len = 1900;
    CHECK_MESSAGE(bit_difference(expected, tokens_of(more, run(*tested, more), 1860, 1900)) == "", describe(few));
    for (const std::int32_t token : {0, 17, 39}) {
      attention_case one = few;
      one.seqs = {{1, 5161 + token, 0}};
      CHECK_MESSAGE(bit_difference(tokens_of(few, expected, token, token + 1), run(*tested, one)) == "", describe(few));
    }
  }
}

namespace {

/// Rows of x_split in every arithmetic: products on tensor cores for one 16-bit type, float32 for others.
std::vector<attention_case> x_split_cases() {
  struct shape {
    dtype q_type, kv_type;
    std::int32_t head_dim, group;
    bool options;
  };
  std::vector<attention_case> cases;
  for (const shape& s : {shape{dtype::bf16, dtype::bf16, 128, 4, false}, shape{dtype::f16, dtype::f16, 64, 12, true},
                         shape{dtype::bf16, dtype::bf16, 256, 17, true}, shape{dtype::f32, dtype::f32, 128, 3, true},
                         shape{dtype::f32, dtype::bf16, 64, 9, false}}) {
    attention_case c{.what = "x_split",
                     .num_kv_heads = 1,
                     .group_size = s.group,
                     .head_dim = s.head_dim,
                     .block_size = 16,
                     .q_type = s.q_type,
                     .kv_type = s.kv_type,
                     .out_type = s.q_type,
                     .layout = arrangement::x_split,
                     .seqs = {{1, 1700, 0}},
                     .seed = 32};
    if (s.options) {
      c.window_left = 1100;
      c.soft_cap = 8;
      c.alibi = c.sinks = true;
    }
    cases.push_back(c);
  }
  return cases;
}

}  // namespace

TEST_CASE("x_split decode has the same bits in one CTA and in one per partition, in blocks of any size, on CUDA") {
  const tested_backend* const tested = cuda_under_test();
  if (tested == nullptr) return skip("no CUDA device");
  for (attention_case c : x_split_cases()) {
    const attention_output alone = run(*tested, c);
    for (const std::int32_t block_size : {8, 24, 600}) {
      attention_case other = c;
      other.block_size = block_size;
      CHECK_MESSAGE(bit_difference(alone, run(*tested, other)) == "", describe(other));
    }
    // So many sequences that each gets one CTA.
    c.seqs.insert(c.seqs.end(), 5000, {1, 3, 1});
    CHECK_MESSAGE(bit_difference(alone, tokens_of(c, run(*tested, c), 0, 1)) == "", describe(c));
  }
}

TEST_CASE("x_split decode gives a query head the same bits whichever heads share its CTA on CUDA") {
  const tested_backend* const tested = cuda_under_test();
  if (tested == nullptr) return skip("no CUDA device");
  for (const attention_case& together : x_split_cases()) {
    const attention_contents contents(together);
    // Each query head with a KV head of its own, which holds the same keys and values.
    attention_case apart = together;
    apart.num_kv_heads = together.group_size;
    apart.group_size = 1;
    attention_contents repeated(apart);
    const auto head_dim = static_cast<std::ptrdiff_t>(together.head_dim);
    const auto repeat = [&](const std::vector<float>& from, std::vector<float>& to) {
      to.clear();
      for (auto row = from.begin(); row != from.end(); row += head_dim) {
        for (std::int32_t head = 0; head < apart.num_kv_heads; ++head) to.insert(to.end(), row, row + head_dim);
      }
    };
    repeated.seqs[0].q = contents.seqs[0].q;
    repeat(contents.seqs[0].k, repeated.seqs[0].k);
    repeat(contents.seqs[0].v, repeated.seqs[0].v);
    repeated.alibi_slopes = contents.alibi_slopes;
    repeated.sinks = contents.sinks;
    CHECK_MESSAGE(
        bit_difference(run_attention(*tested, together, contents), run_attention(*tested, apart, repeated)) == "",
        describe(together));
  }
}

TEST_CASE("the general kernel gives the same bits with a list of items and without on CUDA") {
  const tested_backend* const tested = cuda_under_test();
  if (tested == nullptr) return skip("no CUDA device");
  for (const bool windowed : {false, true}) {
    for (const std::int32_t group : {1, 3, 8}) {
      // One 16-bit dtype and a head_dim of decode, so that the plan has no list; rows that are not aligned, so that the
      // general kernel serves the call nevertheless. The first sequence is long enough to be cut where there is a list.
      attention_case c{.what = "list of items",
                       .num_kv_heads = 2,
                       .group_size = group,
                       .head_dim = 64,
                       .q_type = dtype::bf16,
                       .kv_type = dtype::bf16,
                       .out_type = dtype::bf16,
                       .seqs = {{1, 9000}, {0, 20}, {37, 700}, {5, 3}, {1, 1}},
                       .seed = 77};
      if (windowed) c.window_left = 3000;
      const attention_contents contents(c);
      attention_call call(*tested, c, contents, {{1, 2, 1}, 3, 1, 2, 5});
      call.plan();
      const attention_output without = run_planned(*tested, call);
      call.plan();  // the plan has seen that the general kernel was needed
      call.reset_outputs();
      const attention_output with = run_planned(*tested, call);
      CHECK_MESSAGE(bit_difference(without, with) == "", describe(c));
      const attention_expectation expectation(c, contents);
      CHECK(expectation.problem_of(with, tested->numbers_for(c.q_type, c.kv_type, c.out_type, c.head_dim)) == "");
    }
  }
}

// SPDX-License-Identifier: Apache-2.0
// Partial attention results as an algebra: joining them in any grouping gives the whole, nothing is the identity.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "conformance/attention_tables.hpp"
#include "conformance/merge_case.hpp"
#include "support/covering.hpp"
#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr std::int64_t num_tokens = 5;
constexpr std::int32_t num_heads = 3;
constexpr std::int64_t rows = num_tokens * num_heads;

attention_output merge_on(const tested_backend& tested, std::int32_t head_dim, const host_state& a, dtype type_a,
                          const host_state& b, dtype type_b, dtype out_type) {
  return merge_states_of(tested, {num_tokens, num_heads, head_dim, type_a, type_b, out_type}, a, b);
}

// Where a sequence's new tokens are.
enum class query_place : std::uint8_t { end, middle, before, after };

// Cases for attention in parts: every pair of choices of the axes meets in one of them.
std::vector<attention_case> whole_cases() {
  struct window {
    bool causal;
    std::int32_t left, right;
  };
  constexpr window windows[] = {{true, -1, -1}, {true, 0, -1},   {true, 37, -1}, {false, -1, -1},
                                {false, 20, 9}, {false, -1, 13}, {false, 600, 0}};
  constexpr bias_kind biases[] = {bias_kind::none, bias_kind::full, bias_kind::masked, bias_kind::one_token};
  struct type_choice {
    dtype q, kv, out;
  };
  constexpr type_choice types[] = {{dtype::f32, dtype::f32, dtype::f32},
                                   {dtype::bf16, dtype::bf16, dtype::bf16},
                                   {dtype::f16, dtype::f16, dtype::f16},
                                   {dtype::f32, dtype::bf16, dtype::f32}};
  constexpr std::int32_t heads[] = {64, 71, 128};
  constexpr std::int32_t groups[] = {1, 3, 8};
  constexpr std::int32_t blocks[] = {1, 5, 16};
  constexpr std::int32_t queries[] = {1, 7, 33};
  constexpr std::int32_t keys[] = {1, 90, 1100};
  constexpr query_place places[] = {query_place::end, query_place::middle, query_place::before, query_place::after};
  const std::uint64_t seed = hash_of(test_seed(), 0x9a275);
  std::vector<attention_case> cases;
  for (const std::vector<std::size_t>& row :
       pairwise_rows({std::size(windows), std::size(biases), std::size(types), std::size(heads), std::size(groups),
                      std::size(blocks), std::size(queries), std::size(keys), std::size(places),
                      std::size(all_arrangements), 2, 2, 2},
                     seed)) {
    attention_case c{.what = "in parts"};
    c.seed = hash_of(seed, cases.size());
    random_source random(c.seed);
    c.causal = windows[row[0]].causal;
    c.window_left = windows[row[0]].left;
    c.window_right = windows[row[0]].right;
    c.bias = biases[row[1]];
    c.q_type = types[row[2]].q;
    c.kv_type = types[row[2]].kv;
    c.out_type = types[row[2]].out;
    c.head_dim = heads[row[3]];
    c.group_size = groups[row[4]];
    c.block_size = blocks[row[5]];
    c.layout = all_arrangements[row[9]];
    c.alibi = row[10] != 0;
    c.soft_cap = row[11] != 0 ? 2.0f : 0.0f;
    c.sinks = row[12] != 0;
    c.seqs = {{queries[row[6]], keys[row[7]]}};
    // A bias that all tokens share starts at the same key in all sequences, whose parts begin anywhere.
    if (c.bias != bias_kind::one_token) c.seqs.push_back({1, 1 + static_cast<std::int32_t>(random.next() % 40)});
    for (batch_seq& seq : c.seqs) {
      switch (places[row[8]]) {
        case query_place::end:
          break;
        case query_place::middle:
          seq.query_position = static_cast<std::int32_t>(random.between(0, seq.seq_len - 1));
          break;
        case query_place::before:
          seq.query_position = -static_cast<std::int32_t>(random.between(1, 20));
          break;
        case query_place::after:
          seq.query_position = seq.seq_len + static_cast<std::int32_t>(random.between(0, 20));
          break;
      }
    }
    cases.push_back(c);
  }
  return cases;
}

// `num_parts` calls, each with the queries of `whole` and a run of its keys, cut anywhere; the sinks in one of them.
std::vector<attention_case> parts_of(const attention_case& whole, std::size_t num_parts, random_source& random) {
  std::vector<attention_case> parts(num_parts, whole);
  const std::size_t with_sinks = random.next() % num_parts;
  for (std::size_t p = 0; p < num_parts; ++p) parts[p].sinks = whole.sinks && p == with_sinks;
  for (std::size_t s = 0; s < whole.seqs.size(); ++s) {
    const batch_seq& seq = whole.seqs[s];
    std::vector<std::int32_t> cuts{0, seq.seq_len};
    while (cuts.size() <= num_parts) cuts.push_back(static_cast<std::int32_t>(random.between(0, seq.seq_len)));
    std::sort(cuts.begin(), cuts.end());
    for (std::size_t p = 0; p < num_parts; ++p) {
      parts[p].seqs[s] = {.query_len = seq.query_len,
                          .seq_len = cuts[p + 1] - cuts[p],
                          .content = static_cast<std::int32_t>(s),
                          .first_position = cuts[p],
                          .query_position = static_cast<std::int32_t>(seq.query_offset())};
    }
  }
  return parts;
}

}  // namespace

TEST_CASE("two states merge as the oracle does, in any dtypes") {
  std::size_t turn = 0;
  for (const std::int32_t head_dim : {1, 8, 31, 64, 71, 128}) {
    for (const dtype type_a : dtypes) {
      for (const dtype type_b : dtypes) {
        const dtype out_type = dtypes[turn % 3];
        // Gaps of 8 elements keep rows aligned to 16 bytes, which GPUs have a kernel of its own for.
        const std::int64_t gap_unit = head_dim % 64 == 0 ? 8 : 1;
        const host_state a = random_state(type_a, rows, head_dim, turn * 2 + 1);
        const host_state b = random_state(type_b, rows, head_dim, turn * 2 + 2);
        for (const tested_backend* tested : one_per_family(turn++)) {
          const merge_shape shape{num_tokens, num_heads, head_dim, type_a, type_b, out_type, gap_unit};
          const merge_verdict verdict = judge_merge(shape, a, b, merge_states_of(*tested, shape, a, b));
          CHECK_MESSAGE(verdict.problem.empty(), tested->name, ": ", verdict.problem);
        }
      }
    }
  }
}

TEST_CASE("workers that share a merge leave out no row, nor do one twice") {
  // Enough for three workers, whose shares are not equal.
  constexpr merge_shape shape{37, 5, 1152};
  const host_state a = random_state(dtype::f32, 185, 1152, 91);
  const host_state b = random_state(dtype::f32, 185, 1152, 92);
  for (const tested_backend& tested : all_backends()) {
    const merge_verdict verdict = judge_merge(shape, a, b, merge_states_of(tested, shape, a, b));
    CHECK_MESSAGE(verdict.problem.empty(), tested.name, ": ", verdict.problem);
  }
}

TEST_CASE("a state that saw nothing is the identity, on both sides and whatever it holds") {
  constexpr std::int32_t head_dim = 40;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const dtype type : dtypes) {
    host_state a = random_state(type, rows, head_dim, 5);
    for (float& lse : a.lse) lse = std::isinf(lse) ? 0.5f : lse;
    const host_state nothing{std::vector<float>(static_cast<std::size_t>(rows * head_dim), nan),
                             std::vector<float>(static_cast<std::size_t>(rows), -infinity)};
    for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type))) {
      for (const bool left : {true, false}) {
        const attention_output got = left ? merge_on(*tested, head_dim, nothing, type, a, type, type)
                                          : merge_on(*tested, head_dim, a, type, nothing, type, type);
        CHECK_MESSAGE(got.out == a.out, tested->name);
        CHECK_MESSAGE(got.lse == a.lse, tested->name);
      }
      const attention_output empty = merge_on(*tested, head_dim, nothing, type, nothing, type, type);
      for (const float value : empty.out) CHECK_MESSAGE(value == 0.0f, tested->name);
      for (const float value : empty.lse) CHECK_MESSAGE(value == -infinity, tested->name);
    }
  }
}

TEST_CASE("merging is commutative bit for bit, and associative within rounding") {
  constexpr std::int32_t head_dim = 24;
  const host_state a = random_state(dtype::f32, rows, head_dim, 31);
  const host_state b = random_state(dtype::f32, rows, head_dim, 32);
  const host_state c = random_state(dtype::f32, rows, head_dim, 33);
  constexpr dtype f = dtype::f32;
  for (const tested_backend* tested : one_per_family(1)) {
    const attention_output ab = merge_on(*tested, head_dim, a, f, b, f, f);
    CHECK(bit_difference(ab, merge_on(*tested, head_dim, b, f, a, f, f)).empty());
    const attention_output bc = merge_on(*tested, head_dim, b, f, c, f, f);
    const attention_output left = merge_on(*tested, head_dim, {ab.out, ab.lse}, f, c, f, f);
    const attention_output right = merge_on(*tested, head_dim, a, f, {bc.out, bc.lse}, f, f);
    for (std::size_t n = 0; n < left.out.size(); ++n) {
      CHECK(static_cast<double>(left.out[n]) == doctest::Approx(static_cast<double>(right.out[n])).epsilon(5e-5));
    }
    for (std::size_t r = 0; r < left.lse.size(); ++r) {
      CHECK(
          (left.lse[r] == right.lse[r] || std::abs(left.lse[r] - right.lse[r]) < 1e-5f * (1 + std::abs(left.lse[r]))));
    }
  }
}

TEST_CASE("a merge may write over either of its inputs") {
  constexpr std::int32_t head_dim = 33;
  for (const dtype type : dtypes) {
    const host_state a = random_state(type, rows, head_dim, 51);
    const host_state b = random_state(type, rows, head_dim, 52);
    for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type))) {
      const attention_output expected = merge_on(*tested, head_dim, a, type, b, type, type);
      for (const bool over_a : {true, false}) {
        device_state left(*tested, type, num_tokens, num_heads, head_dim, a.out, a.lse, 1);
        device_state right(*tested, type, num_tokens, num_heads, head_dim, b.out, b.lse, 2);
        device_state& target = over_a ? left : right;
        REQUIRE(tested->get().merge_states({left.state(), right.state(), target.view(), target.lse()}) == errc::ok);
        bool clean = false;
        CHECK_MESSAGE(bit_difference(expected, target.read(clean)).empty(), tested->name);
        CHECK(clean);
      }
    }
  }
}

TEST_CASE("a merge without an LSE output writes the same output") {
  constexpr std::int32_t head_dim = 16;
  const host_state a = random_state(dtype::bf16, rows, head_dim, 61);
  const host_state b = random_state(dtype::f16, rows, head_dim, 62);
  for (const tested_backend* tested : one_per_family(0)) {
    const attention_output expected = merge_on(*tested, head_dim, a, dtype::bf16, b, dtype::f16, dtype::f32);
    device_state left(*tested, dtype::bf16, num_tokens, num_heads, head_dim, a.out, a.lse, 0);
    device_state right(*tested, dtype::f16, num_tokens, num_heads, head_dim, b.out, b.lse, 0);
    device_state joined(*tested, dtype::f32, num_tokens, num_heads, head_dim, {}, {}, 0);
    REQUIRE(tested->get().merge_states({left.state(), right.state(), joined.view(), nullptr}) == errc::ok);
    bool clean = false;
    CHECK(joined.read(clean).out == expected.out);
    CHECK(clean);
    CHECK(joined.lse_bytes.unchanged());
  }
}

TEST_CASE("attention over two parts of the keys merges to attention over all, with the sink in one part only") {
  // The first 300 keys are a shared prefix, seen whole; the rest is causal. ALiBi is left out: its distances count from
  // the end of the part.
  for (const bool sinks : {false, true}) {
    const attention_case whole{.what = "whole", .head_dim = 32, .seqs = {{20, 420}}, .sinks = sinks, .seed = 9};
    const attention_contents contents(whole);
    attention_case prefix = whole;
    prefix.what = "prefix";
    prefix.seqs = {{20, 300}};
    prefix.causal = false;
    prefix.sinks = false;
    attention_case rest = whole;
    rest.what = "rest";
    rest.seqs = {{20, 120}};
    attention_contents prefix_contents(prefix);
    attention_contents rest_contents(rest);
    prefix_contents.seqs[0].q = rest_contents.seqs[0].q = contents.seqs[0].q;
    const std::ptrdiff_t cut = 300 * 2 * 32;
    const auto split = [&](const std::vector<float>& all, std::vector<float>& first, std::vector<float>& second) {
      first.assign(all.begin(), all.begin() + cut);
      second.assign(all.begin() + cut, all.end());
    };
    split(contents.seqs[0].k, prefix_contents.seqs[0].k, rest_contents.seqs[0].k);
    split(contents.seqs[0].v, prefix_contents.seqs[0].v, rest_contents.seqs[0].v);
    const attention_expectation expectation(whole, contents);
    for (const tested_backend* tested : one_per_family(2)) {
      const attention_output a = run_attention(*tested, prefix, prefix_contents);
      const attention_output b = run_attention(*tested, rest, rest_contents);
      device_state left(*tested, dtype::f32, 20, 4, 32, a.out, a.lse, 0);
      device_state right(*tested, dtype::f32, 20, 4, 32, b.out, b.lse, 0);
      device_state joined(*tested, dtype::f32, 20, 4, 32, {}, {}, 0);
      REQUIRE(tested->get().merge_states({left.state(), right.state(), joined.view(), joined.lse()}) == errc::ok);
      bool clean = false;
      const std::string problem = expectation.problem_of(joined.read(clean), tested->numbers);
      CHECK_MESSAGE(problem.empty(), tested->name, ": ", problem);
    }
  }
}

TEST_CASE("a sequence attended in two or three parts, each anywhere, and joined is the whole, with every option") {
  INFO(seed_note());
  std::size_t turn = 0;
  for (const attention_case& whole : whole_cases()) {
    random_source random(whole.seed);
    const attention_contents contents(whole);
    const attention_expectation expectation(whole, contents);
    std::vector<attention_case> parts = parts_of(whole, 2 + turn % 2, random);
    random.shuffle(parts);
    for (const tested_backend* tested : one_per_family(turn)) {
      arithmetic numbers = tested->numbers_for(whole.q_type, whole.kv_type, whole.out_type, whole.head_dim);
      host_state joined;
      try {
        for (const attention_case& part : parts) {
          const attention_contents part_contents(part);
          const attention_output got = run_attention(*tested, part, part_contents, placement_in_turn(part, turn));
          const std::string problem = attention_expectation(part, part_contents).problem_of(got, numbers);
          CHECK_MESSAGE(problem.empty(), tested->name, ": ", problem, " [", describe(part), "]");
          if (&part == &parts.front()) {
            joined = {got.out, got.lse};
            continue;
          }
          const merge_shape shape{whole.num_tokens(), whole.num_q_heads(), whole.head_dim,
                                  whole.out_type,     whole.out_type,      whole.out_type};
          const attention_output merged = merge_states_of(*tested, shape, joined, {got.out, got.lse});
          joined = {merged.out, merged.lse};
        }
      } catch (const std::exception& failure) {
        FAIL_CHECK(failure.what());
        continue;
      }
      // Each part, and each merge but the last, is rounded to the type of the outputs on its way.
      const double rounding = 4 * reference::unit_roundoff(whole.out_type);
      numbers.unit_probability[static_cast<std::size_t>(whole.kv_type)] += rounding;
      const std::string problem = expectation.problem_of({joined.out, joined.lse}, numbers, rounding * rounding);
      CHECK_MESSAGE(problem.empty(), tested->name, ": ", problem, " [", describe(whole), "]");
    }
    ++turn;
  }
}

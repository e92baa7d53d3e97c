// SPDX-License-Identifier: Apache-2.0
// Multi-head latent attention in its absorbed form: V is the first 512 dims of K's 576, of one KV head. GPUs have
// kernels of their own for it; on a machine without such a device the CPU computes a part of the cases.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/error.hpp>
#include <cmath>
#include <span>
#include <string>
#include <vector>

#include "conformance/attention_tables.hpp"
#include "reference/code_oracle.hpp"
#include "support/elements.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

attention_case latent_case(std::string what, std::int32_t heads, std::size_t turn) {
  const dtype type = turn % 2 == 0 ? dtype::bf16 : dtype::f16;
  return {.what = "latent, " + std::move(what),
          .num_kv_heads = 1,
          .group_size = heads,
          .head_dim = 576,
          .v_head_dim = 512,
          .v_in_k = true,
          .q_type = type,
          .kv_type = type,
          .out_type = type,
          .seqs = {{1, 70}, {1, 1}, {1, 129}},
          .aligned = true,
          .seed = turn + 1};
}

class case_list {
 public:
  attention_case& add(std::string what, std::int32_t heads) {
    cases_.push_back(latent_case(std::move(what), heads, cases_.size()));
    return cases_.back();
  }
  [[nodiscard]] std::vector<attention_case> take() { return std::move(cases_); }

 private:
  std::vector<attention_case> cases_;
};

/// Both sides of every border: rows of a tile, keys of a tile, blocks of a box.
std::vector<attention_case> border_cases() {
  case_list list;
  for (const std::int32_t heads : {1, 15, 16, 17, 63, 64, 65, 128}) list.add("heads", heads);
  // Several tiles of heads, in boxes and in copies.
  for (const std::int32_t block_size : {16, 64, 5}) {
    for (const std::int32_t heads : {128, 192, 256}) {
      attention_case& c = list.add("tiles of heads", heads);
      c.block_size = block_size;
      c.seqs = {{1, 200}, {1, 65}, {2, 31}};
    }
  }
  // Tokens that share tiles of rows: exactly one, one too many, and several.
  for (const std::int32_t tokens : {2, 4, 5, 13}) {
    list.add("several tokens of 16 heads", 16).seqs = {{tokens, 100}, {1, 65}, {tokens, tokens}};
    list.add("several tokens of 5 heads", 5).seqs = {{tokens, 130}, {3, 64}};
  }
  list.add("several tokens of 128 heads", 128).seqs = {{3, 66}};
  list.add("more queries than keys", 16).seqs = {{9, 4}, {2, 0}, {1, 4}};
  for (const std::int32_t length : {1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257}) {
    list.add("length", 16).seqs = {{1, length}};
    list.add("length in a batch", 3).seqs = {{1, length}, {1, 1}, {2, length + 1}, {1, 640}};
  }
  for (const std::int32_t block_size : {16, 64, 5, 1, 8, 24, 32, 48, 80, 128, 256}) {
    for (const dtype type : {dtype::bf16, dtype::f16}) {
      for (const std::int32_t heads : {16, 20}) {
        attention_case& c = list.add("block_size", heads);
        c.q_type = c.kv_type = c.out_type = type;
        c.block_size = block_size;
        c.seqs = {{1, 300}, {heads == 16 ? 1 : 2, 64}, {1, 1}};
      }
    }
  }
  return list.take();
}

/// How the keys are split over CTAs: not at all, in two, in many.
std::vector<attention_case> split_cases() {
  case_list list;
  for (const std::int32_t heads : {2, 16, 128}) {
    list.add("one long sequence", heads).seqs = {{1, heads == 128 ? 2000 : 4097}};
    list.add("two long sequences", heads).seqs = {{1, 1500}, {1, 777}};
  }
  list.add("many short sequences", 16).seqs.assign(140, {1, 67});
  list.add("many short sequences and a long one", 4).seqs.assign(150, {1, 40});
  attention_case& c = list.add("one too many for all multiprocessors", 2);
  c.seqs.assign(150, {1, 130});
  c.seqs.push_back({1, 3000});
  list.add("several tokens on a long context", 16).seqs = {{4, 2100}, {7, 1500}};
  list.add("several tokens on a long context", 128).seqs = {{2, 1111}};
  return list.take();
}

std::vector<attention_case> option_cases_of_latent() {
  case_list list;
  const auto add = [&](const char* what) -> attention_case& {
    attention_case& c = list.add(what, 16);
    c.seqs = {{1, 300}, {5, 190}, {1, 64}, {1, 1200}};
    return c;
  };
  add("not causal").causal = false;
  add("sinks").sinks = true;
  add("no LSE").lse = false;
  add("scale").scale = 0.1147f;  // that of DeepSeek-V3, far from 1/√576
  for (const std::int32_t window : {0, 1, 62, 63, 64, 65, 127, 128, 500}) {
    attention_case& c = add("window");
    c.window_left = window;
    c.sinks = window % 2 == 1;
    attention_case& both = add("window to both sides");
    both.causal = false;
    both.window_left = window;
    both.window_right = 130 - window;
  }
  add("layout").layout = arrangement::nhd;
  for (const value_kind values : {value_kind::equal_logits, value_kind::dominant_key, value_kind::huge_logits,
                                  value_kind::denormal, value_kind::max_finite}) {
    add("values").values = values;
    add("values").values = values;
  }
  return list.take();
}

/// Calls that the kernel does not take.
std::vector<attention_case> declined_cases() {
  case_list list;
  list.add("deterministic", 16).deterministic = true;
  list.add("soft cap", 16).soft_cap = 20;
  list.add("ALiBi", 16).alibi = true;
  list.add("negative scale", 16).scale = -0.05f;
  list.add("a bias", 16).bias = bias_kind::full;
  list.add("71 heads", 71).lse = true;
  list.add("float32 queries", 4).q_type = dtype::f32;
  list.add("rows without alignment", 4).aligned = false;
  for (const arrangement layout : all_arrangements) list.add("layout", 16).layout = layout;
  return list.take();
}

std::vector<const tested_backend*> devices_with_the_kernel() {
  std::vector<const tested_backend*> devices;
  for (const tested_backend& tested : all_backends()) {
    const std::vector<std::string> said = tested.get().explain({});
    if (std::ranges::find(said, "latent") != said.end()) devices.push_back(&tested);
  }
  return devices;
}

/// Holds the kernel on each of the devices to the oracle.
void check_kernel(const attention_case& c, const attention_contents& contents,
                  const std::vector<const tested_backend*>& devices, std::size_t turn) {
  CAPTURE(describe(c));
  const attention_expectation expected(c, contents);
  for (const tested_backend* tested : devices) {
    attention_call call(*tested, c, contents, placement_in_turn(c, turn));
    call.spec.implementation = "latent";
    try {
      call.plan();
    } catch (const error& refused) {
      // Only a device or a build that has no such kernel may refuse; there it is another one's.
      CHECK_MESSAGE(is_for_lack_of_a_kernel(refused), refused.what());
      const std::string problem =
          expected.problem_of(run_attention(*tested, c, contents, placement_in_turn(c, turn)), numbers_for(*tested, c));
      CHECK_MESSAGE(problem.empty(), problem);
      continue;
    }
    REQUIRE(call.run() == errc::ok);
    std::string problem;
    const attention_output got = call.read(problem);
    problem += expected.problem_of(got, numbers_for(*tested, c));
    CHECK_MESSAGE(problem.empty(), problem);
    // Now the cache is in the L2 and arrives sooner: a kernel must not store it over what is still being read.
    call.reset_outputs();
    REQUIRE(call.run() == errc::ok);
    const attention_output again = call.read(problem);
    CHECK_MESSAGE(problem.empty(), problem);
    CHECK(bytes_of(again.out) == bytes_of(got.out));
    CHECK(bytes_of(again.lse) == bytes_of(got.lse));
  }
}

/// Devices with the kernel compute every case with it; others a part.
void check_latent(const std::vector<attention_case>& cases, bool forced) {
  const std::vector<const tested_backend*> devices = devices_with_the_kernel();
  const std::size_t step = devices.empty() ? 9 : 1;
  for (std::size_t n = 0; n < cases.size(); n += step) {
    const attention_case& c = cases[n];
    if (devices.empty() || !forced) {
      const std::string problem = check_attention(c, n / step);
      CHECK_MESSAGE(problem.empty(), problem);
    } else {
      check_kernel(c, attention_contents(c), devices, n);
    }
  }
}

/// Tokens of records whose magnitudes are far apart: the power of two of a position, in the 128 dims of a scale.
int magnitude(std::size_t kind, std::size_t position, std::size_t length, std::size_t part) {
  const std::size_t percent = position * 100 / length;
  switch (kind) {
    case 0:  // tiles are taken from the last to the first: larger and larger
      return static_cast<int>(18 - percent * 18 / 100);
    case 1:
      return static_cast<int>(percent * 18 / 100);
    case 2:
      return static_cast<int>(position * 7 % 19 * (part % 2));
    case 3:
      return -100;
    default:
      return part == 2 && percent < 20 ? 90 : 70;
  }
}

}  // namespace

TEST_CASE("latent attention agrees with the oracle on both sides of every border") {
  check_latent(border_cases(), true);
}

TEST_CASE("latent attention agrees with the oracle however its keys are split") { check_latent(split_cases(), true); }

TEST_CASE("latent attention agrees with the oracle with every option and layout that its kernel takes") {
  check_latent(option_cases_of_latent(), true);
}

TEST_CASE("attention over records agrees with the oracle on what is stored") {
  const kv_code record{dtype::e4m3, scale_granularity::record};
  std::vector<attention_case> cases;
  for (const std::vector<attention_case>& some : {option_cases_of_latent(), border_cases()}) {
    for (std::size_t n = 0; n < some.size(); n += 5) cases.push_back(some[n]);
  }
  // Few heads, where kernels may have tiles of few rows.
  for (std::size_t n = 0; n < 5; ++n) cases.push_back(latent_case("few heads", 2, n));
  std::size_t turn = 0;
  for (std::size_t n = 0; n < cases.size(); ++n) {
    attention_case c = with_codes(cases[n], record, record);
    c.q_type = tensor_dtypes[turn % num_tensor_dtypes];
    c.out_type = tensor_dtypes[turn / 2 % num_tensor_dtypes];
    c.aligned = turn % 3 != 0;
    for (const tested_backend* tested : one_per_family(turn++)) {
      const std::string problem = check_attention(c, {tested}, n);
      CHECK_MESSAGE(problem.empty(), problem);
    }
  }
}

TEST_CASE("latent attention over records agrees with the oracle at every border and split") {
  const kv_code record{dtype::e4m3, scale_granularity::record};
  std::vector<attention_case> cases;
  for (const std::vector<attention_case>& some : {border_cases(), split_cases(), option_cases_of_latent()}) {
    for (const attention_case& plain : some) {
      attention_case& c = cases.emplace_back(with_codes(plain, record, record));
      c.q_type = c.out_type = dtype::bf16;
    }
  }
  check_latent(cases, true);
}

TEST_CASE("latent attention over records whose scales are far apart agrees with the oracle") {
  const kv_code record{dtype::e4m3, scale_granularity::record};
  const std::vector<const tested_backend*> devices = devices_with_the_kernel();
  for (std::size_t turn = 0; turn < 20; ++turn) {
    constexpr std::int32_t heads[] = {16, 5, 64, 1};
    attention_case c = with_codes(latent_case("scales far apart", heads[turn % 4], turn), record, record);
    c.q_type = c.out_type = dtype::bf16;
    c.seqs = {{1, 640}, {turn % 4 == 1 ? 3 : 1, 130}, {1, 2100}};
    attention_contents contents(c);
    for (std::size_t s = 0; s < c.seqs.size(); ++s) {
      attention_contents::sequence& sequence = contents.seqs[s];
      const std::size_t kind = turn / 4;
      const auto dims = static_cast<std::size_t>(c.head_dim);
      const auto v_dims = static_cast<std::size_t>(c.out_dim());
      const auto length = static_cast<std::size_t>(c.seqs[s].seq_len);
      // Scores of the largest tokens stay ordinary.
      const int largest = kind == 3 ? -100 : kind == 4 ? 90 : 18;
      for (std::size_t i = 0; i < sequence.q.size(); ++i) {
        if (i % dims < v_dims) sequence.q[i] = stored_as(dtype::bf16, std::ldexp(sequence.q[i], -largest));
      }
      for (std::size_t i = 0; i < sequence.k_given.size(); ++i) {
        if (i % dims >= v_dims) continue;
        // No dim in which the largest tokens are 0: there the others are below what float16 holds beside them.
        const float value = std::copysign(std::max(std::fabs(sequence.k_given[i]), 0.0625f), sequence.k_given[i]);
        sequence.k_given[i] = std::ldexp(value, magnitude(kind, i / dims, length, i % dims / 128));
      }
      for (std::size_t t = 0; t < length; ++t) {
        const std::vector<float> row =
            oracle_decode(record, oracle_encode(record, 1.0f, std::span(sequence.k_given).subspan(t * dims, dims)));
        std::ranges::copy(row, sequence.k.begin() + static_cast<std::ptrdiff_t>(t * dims));
        std::copy_n(row.begin(), v_dims, sequence.v.begin() + static_cast<std::ptrdiff_t>(t * v_dims));
      }
      sequence.v_given = sequence.k_given;
    }
    if (!devices.empty()) {
      check_kernel(c, contents, devices, turn);
      continue;
    }
    const attention_expectation expected(c, contents);
    for (const tested_backend* tested : one_per_family(turn)) {
      const std::string problem =
          expected.problem_of(run_attention(*tested, c, contents, placement_in_turn(c, turn)), numbers_for(*tested, c));
      CHECK_MESSAGE(problem.empty(), problem, " [", describe(c), "]");
    }
  }
}

TEST_CASE("latent attention that the kernel declines agrees with the oracle") { check_latent(declined_cases(), false); }

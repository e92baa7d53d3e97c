// SPDX-License-Identifier: Apache-2.0
// The tensor-core kernels over codes, forced by name: against the oracle, and bit for bit against those of 16-bit types
// on the same values.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/backend.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "conformance/attention_tables.hpp"
#include "reference/code_oracle.hpp"
#include "support/codes.hpp"
#include "support/elements.hpp"
#include "support/skip.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;

constexpr const char* no_device = "no CUDA backend here: not in this build, or no device";

std::vector<const tested_backend*> devices() {
  std::vector<const tested_backend*> found;
  for (const tested_backend& tested : all_backends()) {
    if (!tested.is_host) found.push_back(&tested);
  }
  return found;
}

/// Runs a case of codes and the same case of a 16-bit type on what convert_blocks makes of its cache, both by `kernel`,
/// and compares the bits. False: the device has no such kernel.
bool compare_with_wide(const tested_backend& tested, const attention_case& c, std::size_t turn, const char* kernel) {
  attention_case half = c;
  half.k_code = half.v_code = {};
  half.kv_type = c.q_type;
  const attention_contents contents(c);
  const attention_contents other(half);
  const attention_placement placement = placement_in_turn(c, turn);
  attention_call coded(tested, c, contents, placement);
  attention_call wide(tested, half, other, placement);
  CAPTURE(describe(c));
  REQUIRE(coded.num_blocks == wide.num_blocks);
  std::vector<block_copy> all;
  for (std::int32_t i = 0; i < coded.num_blocks; ++i) all.push_back({block_id{i}, block_id{i}});
  REQUIRE(tested.get().convert_blocks(coded.params.kv, wide.params.kv, all) == errc::ok);
  coded.spec.implementation = wide.spec.implementation = kernel;
  try {
    coded.plan();
  } catch (const error& refused) {
    CHECK_MESSAGE(is_for_lack_of_a_kernel(refused), refused.what());
    return false;
  }
  wide.plan();
  REQUIRE(coded.run() == errc::ok);
  REQUIRE(wide.run() == errc::ok);
  for (const std::string& name : tested.get().describe(coded.planned, coded.params)) {
    CHECK_MESSAGE((name.empty() || name.find(" coded") != std::string::npos), name);
  }
  std::string problem;
  const attention_output a = coded.read(problem);
  CHECK(problem == "");
  CHECK(bit_difference(a, wide.read(problem)) == "");
  return true;
}

/// What `kernel` computes of a case.
attention_output output_by(const char* kernel, const tested_backend& tested, const attention_case& c,
                           const attention_contents& contents) {
  attention_call call(tested, c, contents, placement_in_turn(c, 0));
  call.spec.implementation = kernel;
  call.plan();
  REQUIRE(call.run() == errc::ok);
  std::string problem;
  attention_output output = call.read(problem);
  CHECK(problem == "");
  return output;
}

TEST_CASE("the decode kernel of codes, forced, agrees with the oracle for every pair, head_dim and option") {
  if (devices().empty()) return skip(no_device);
  std::size_t turn = 0;
  for (const attention_case& c : coded_decode_cases()) {
    ++turn;
    const attention_contents contents(c);
    const attention_expectation expected(c, contents);
    for (const tested_backend* tested : devices()) {
      attention_call call(*tested, c, contents, placement_in_turn(c, turn));
      call.spec.implementation = "decode";
      call.plan();
      REQUIRE(call.run() == errc::ok);
      for (const std::string& kernel : tested->get().describe(call.planned, call.params)) {
        CHECK_MESSAGE(kernel.starts_with("cuda decode coded d"), kernel);
      }
      std::string problem;
      const attention_output got = call.read(problem);
      problem += expected.problem_of(got, numbers_for(*tested, c));
      CHECK_MESSAGE(problem.empty(), problem, " [", describe(c), "]");
    }
  }
}

/// Every second case of decode, with codes of one plane, each in turn, whose kernels' names begin with `name`.
/// `planes(code, c, turn)`: what K and V are.
template <class Planes>
void check_codes_of_one_plane(const char* name, const Planes& planes) {
  using g = scale_granularity;
  const kv_code codes[] = {{dtype::e4m3, g::token_head}, {dtype::e5m2, g::layer},    {dtype::i8, g::head},
                           {dtype::u8, g::token_head},   {dtype::i8, g::token_head}, {dtype::e4m3}};
  std::size_t number = 0;
  std::size_t num_compared = 0;
  for (const attention_case& plain : coded_decode_cases()) {
    if (++number % 2 != 0) continue;
    const std::size_t turn = number / 2;
    const auto [k, v] = planes(codes[(turn + turn / std::size(codes)) % std::size(codes)], plain, turn);
    const attention_case c = with_codes(plain, k, v);
    const attention_contents contents(c);
    const attention_expectation expected(c, contents);
    for (const tested_backend* tested : devices()) {
      attention_call call(*tested, c, contents, placement_in_turn(c, turn));
      call.spec.implementation = "decode";
      call.plan();
      REQUIRE(call.run() == errc::ok);
      for (const std::string& kernel : tested->get().describe(call.planned, call.params)) {
        CHECK_MESSAGE(kernel.starts_with(name), kernel);
      }
      std::string problem;
      const attention_output got = call.read(problem);
      problem += expected.problem_of(got, numbers_for(*tested, c));
      CHECK_MESSAGE(problem.empty(), problem, " [", describe(c), "]");
      ++num_compared;
    }
  }
  CHECK(num_compared > 0);
}

TEST_CASE("the decode kernel takes codes of V beside K in the type of q and out, for every code, head_dim and option") {
  if (devices().empty()) return skip(no_device);
  check_codes_of_one_plane("cuda decode coded-v d", [](const kv_code& code, const attention_case& c, std::size_t) {
    return std::pair<kv_code, kv_code>({c.q_type}, code);
  });
}

TEST_CASE(
    "the decode kernel takes codes of K beside V in f16 or the type of out, for every code, head_dim and option") {
  if (devices().empty()) return skip(no_device);
  check_codes_of_one_plane("cuda decode coded-k d", [](const kv_code& code, const attention_case& c, std::size_t turn) {
    return std::pair<kv_code, kv_code>(code, {turn % 5 == 0 ? dtype::f16 : c.q_type});
  });
}

TEST_CASE("decode of codes of one plane takes every number of rows and splits") {
  using g = scale_granularity;
  if (devices().empty()) return skip(no_device);
  const kv_code codes[] = {
      {dtype::e4m3, g::layer}, {dtype::i8, g::head}, {dtype::e4m3, g::token_head}, {dtype::u8, g::token_head}};
  std::size_t turn = 0;
  for (const std::int32_t head_dim : {64, 80, 96, 128, 160, 192, 256}) {
    for (const bool of_keys : {true, false}) {
      for (const std::int32_t rows : {1, 4, 8, 9, 16}) {
        for (const bool deterministic : {false, true}) {
          const kv_code& code = codes[(turn + turn / 4) % std::size(codes)];
          const dtype type = turn % 2 == 0 ? dtype::bf16 : dtype::f16;
          attention_case c{.what = "codes of one plane",
                           .num_kv_heads = 2,
                           .group_size = rows,
                           .head_dim = head_dim,
                           .v_head_dim = head_dim,
                           .q_type = type,
                           .out_type = type,
                           .seqs = {{1, 100}, {1, 1000 + static_cast<std::int32_t>(turn % 64)}},
                           .aligned = true,
                           .seed = ++turn};
          c.deterministic = deterministic;
          if (rows == 4) c.seqs = {{1, 9000}};
          c = of_keys ? with_codes(c, code, {turn % 3 == 0 ? dtype::f16 : type}) : with_codes(c, {type}, code);
          const attention_contents contents(c);
          const attention_expectation expected(c, contents);
          for (const tested_backend* tested : devices()) {
            const std::string problem =
                expected.problem_of(output_by("decode", *tested, c, contents), numbers_for(*tested, c));
            CHECK_MESSAGE(problem.empty(), problem, " [", describe(c), "]");
          }
        }
      }
    }
  }
}

/// Whether prefill's kernels over codes of up to 128 dims compute a head_dim, whose producers differ from the others'.
bool has_raw_codes(std::int32_t head_dim) { return head_dim <= 128; }
/// Whether tiles of codes have the keys of those of 16-bit types.
bool has_tiles_of_wide(std::int32_t head_dim) { return head_dim <= 192; }
/// Whether any does.
bool has_coded_prefill(std::int32_t head_dim) { return head_dim % 16 == 0 && head_dim <= 256; }

/// Forces the prefill kernel over codes in cases of these head_dims, and compares with the oracle.
void check_coded_prefill(bool with_raw_codes) {
  using g = scale_granularity;
  if (devices().empty()) return skip(no_device);
  std::vector<attention_case> cases;
  for (attention_case& c : coded_decode_cases()) {
    c.deterministic = false;  // such plans give codes to decode
    if (has_raw_codes(c.head_dim) == with_raw_codes) cases.push_back(std::move(c));
  }
  // Masks and edges of tiles, with every kind of scale; tails of K and V of different lengths, and none of one.
  const kv_code pairs[][2] = {{{dtype::e4m3, g::token_head}, {dtype::e4m3, g::token_head}},
                              {{dtype::i8, g::head}, {dtype::e4m3, g::head}},
                              {{dtype::u8, g::token_head}, {dtype::u8, g::token_head}},
                              {{dtype::i8, g::token_head}, {dtype::i8, g::token_head}},
                              {{dtype::e4m3, g::layer}, {dtype::e4m3, g::token_head}},
                              {{dtype::e4m3, g::layer}, {dtype::i8, g::head}},
                              {{dtype::u8, g::token_head}, {dtype::e4m3, g::token_head}},
                              {{dtype::e4m3, g::token_head}, {dtype::i8, g::token_head}},
                              {{dtype::i8, g::token_head}, {dtype::e5m2}},
                              {{dtype::i8, g::head}, {dtype::u8, g::token_head}},
                              {{dtype::e4m3}, {dtype::i8, g::token_head}},
                              {{dtype::i8, g::token_head}, {dtype::u8, g::token_head}},
                              {{dtype::u8, g::token_head}, {dtype::e4m3, g::layer}}};
  const std::size_t num_alike = cases.size();
  for (std::size_t i = 0; i < num_alike; i += 2) {
    const auto& pair = pairs[i / 2 % std::size(pairs)];
    cases.push_back(with_codes(cases[i], pair[0], pair[1]));
  }
  std::size_t turn = 0;
  for (const attention_case& plain : prefill_border_cases()) {
    if (!has_coded_prefill(plain.head_dim) || has_raw_codes(plain.head_dim) != with_raw_codes) continue;
    if (++turn % 3 != 0) continue;
    const auto& pair = pairs[turn / 3 % std::size(pairs)];
    attention_case c = with_codes(plain, pair[0], pair[1]);
    c.q_type = c.out_type = turn % 2 == 0 ? dtype::f16 : dtype::bf16;
    cases.push_back(std::move(c));
  }
  std::size_t num_compared = 0;
  for (const attention_case& c : cases) {
    ++turn;
    const attention_contents contents(c);
    const attention_expectation expected(c, contents);
    for (const tested_backend* tested : devices()) {
      if (tested->get().explain({}).front() != "prefill") continue;
      attention_call call(*tested, c, contents, placement_in_turn(c, turn));
      call.spec.implementation = "prefill";
      try {
        call.plan();
      } catch (const error& refused) {
        CHECK_MESSAGE(is_for_lack_of_a_kernel(refused), refused.what());
        continue;
      }
      REQUIRE(call.run() == errc::ok);
      for (const std::string& kernel : tested->get().describe(call.planned, call.params)) {
        CHECK_MESSAGE((kernel.empty() || kernel.find(" coded ") != std::string::npos), kernel);
      }
      std::string problem;
      const attention_output got = call.read(problem);
      problem += expected.problem_of(got, numbers_for(*tested, c));
      CHECK_MESSAGE(problem.empty(), problem, " [", describe(c), "]");
      ++num_compared;
    }
  }
  if (num_compared == 0) return skip("no device here has the prefill kernel");
}

TEST_CASE("the prefill kernel of codes, forced, agrees with the oracle for every pair, head_dim and option") {
  check_coded_prefill(true);
}

TEST_CASE("the prefill kernel of codes above 128 dims, forced, agrees with the oracle for every pair and option") {
  check_coded_prefill(false);
}

void check_zero_points_in_prefill(const std::vector<std::int32_t>& head_dims) {
  using g = scale_granularity;
  if (devices().empty()) return skip(no_device);
  const kv_code u8{dtype::u8, g::token_head};
  const kv_code pairs[][2] = {{u8, u8}, {u8, {dtype::i8, g::token_head}}, {{dtype::e4m3, g::layer}, u8}};
  std::size_t turn = 0;
  std::size_t num_compared = 0;
  for (const auto& pair : pairs) {
    for (const std::int32_t head_dim : head_dims) {
      for (const dtype q_type : {dtype::f16, dtype::bf16}) {
        attention_case c{.what = "zero points",
                         .num_kv_heads = 2,
                         .group_size = 4,
                         .head_dim = head_dim,
                         .v_head_dim = head_dim,
                         .q_type = q_type,
                         .out_type = q_type,
                         .seqs = {{140, 600}, {200, 200}, {65, 333}, {70, 400}, {33, 161}},
                         .aligned = true,
                         .values = value_kind::zero_points,
                         .seed = ++turn};
        if (turn % 4 == 1) c.soft_cap = 5;
        if (turn % 4 == 2) c.alibi = c.sinks = true;
        if (turn % 4 == 3) c.window_left = 150;
        c = with_codes(c, pair[0], pair[1]);
        const attention_contents contents(c);
        const attention_expectation expected(c, contents);
        for (const tested_backend* tested : devices()) {
          if (tested->get().explain({}).front() != "prefill") continue;
          attention_call call(*tested, c, contents, placement_in_turn(c, turn));
          call.spec.implementation = "prefill";
          call.plan();
          REQUIRE(call.run() == errc::ok);
          std::string problem;
          const attention_output got = call.read(problem);
          problem += expected.problem_of(got, numbers_for(*tested, c));
          CHECK_MESSAGE(problem.empty(), problem, " [", describe(c), "]");
          ++num_compared;
        }
      }
    }
  }
  if (num_compared == 0) return skip("no device here has the prefill kernel");
}

TEST_CASE("the prefill kernel takes u8 of any zero point, within the bound of every element") {
  check_zero_points_in_prefill({16, 64, 80, 96, 128});
}

TEST_CASE("the prefill kernel above 128 dims takes u8 of any zero point, within the bound of every element") {
  check_zero_points_in_prefill({144, 192, 256});
}

TEST_CASE("a NaN in a token with scales per token spoils the rows of the prefill kernel that see it, and no other") {
  using g = scale_granularity;
  if (devices().empty()) return skip(no_device);
  constexpr std::int32_t num_new = 300;
  constexpr std::int32_t length = 500;
  struct shape {
    dtype type;
    std::int32_t head_dim;
  };
  for (const auto [type, head_dim] :
       {shape{dtype::e4m3, 128}, shape{dtype::i8, 64}, shape{dtype::u8, 128}, shape{dtype::e4m3, 256},
        shape{dtype::i8, 192}, shape{dtype::u8, 256}, shape{dtype::u8, 176}}) {
    for (const dtype q_type : {dtype::f16, dtype::bf16}) {
      attention_case c{.what = "codes with a bad value",
                       .num_kv_heads = 2,
                       .group_size = 4,
                       .head_dim = head_dim,
                       .v_head_dim = head_dim,
                       .q_type = q_type,
                       .out_type = q_type,
                       .seqs = {{num_new, length}},
                       .aligned = true};
      c = with_codes(c, {type, g::token_head}, {type, g::token_head});
      const attention_contents contents(c);
      for (const tested_backend* tested : devices()) {
        if (tested->get().explain({}).front() != "prefill") continue;
        const auto output_of = [&](const attention_contents& these) {
          attention_call call(*tested, c, these, placement_in_turn(c, 0));
          call.spec.implementation = "prefill";
          call.plan();
          REQUIRE(call.run() == errc::ok);
          std::string problem;
          attention_output output = call.read(problem);
          CHECK(problem == "");
          return output;
        };
        const attention_output good = output_of(contents);
        for (const bool in_k : {true, false}) {
          for (const float bad_value :
               {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
            constexpr std::int32_t bad_position = 350;
            constexpr std::int32_t bad_head = 1;
            attention_contents poisoned = contents;
            auto& given = in_k ? poisoned.seqs[0].k_given : poisoned.seqs[0].v_given;
            given[static_cast<std::size_t>((bad_position * c.num_kv_heads + bad_head) * c.head_dim + 5)] = bad_value;
            const attention_output bad = output_of(poisoned);
            const auto dims = static_cast<std::size_t>(c.head_dim);
            std::size_t row = 0;
            for (std::int32_t t = 0; t < num_new; ++t) {
              for (std::int32_t h = 0; h < c.num_q_heads(); ++h, ++row) {
                const bool sees = h / c.group_size == bad_head && length - num_new + t >= bad_position;
                const bool same = std::memcmp(&good.out[row * dims], &bad.out[row * dims], dims * sizeof(float)) == 0;
                const bool spoiled = std::isinf(bad_value) ||
                                     (std::isnan(bad.out[row * dims]) && std::isnan(bad.out[row * dims + dims - 1]));
                CHECK_MESSAGE((sees ? spoiled : same), (in_k ? "K" : "V"), ", token ", t, ", head ", h, " [",
                              describe(c), "]");
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a NaN in a token with scales per token spoils the rows of the decode kernel that see it, and no other") {
  using g = scale_granularity;
  if (devices().empty()) return skip(no_device);
  constexpr std::int32_t bad_position = 350;
  constexpr std::int32_t bad_head = 1;
  std::size_t turn = 0;
  enum class planes { both, of_k, of_v };
  struct coded_planes {
    dtype type;
    planes which;
  };
  std::vector<coded_planes> kinds;
  for (const dtype type : {dtype::e4m3, dtype::i8, dtype::u8}) {
    for (const planes which : {planes::both, planes::of_k, planes::of_v}) kinds.push_back({type, which});
  }
  for (const auto& [type, which] : kinds) {
    for (const std::int32_t head_dim : {64, 96, 128, 256}) {
      attention_case c{.what = "codes with a bad value",
                       .num_kv_heads = 2,
                       .group_size = 4,
                       .head_dim = head_dim,
                       .v_head_dim = head_dim,
                       .q_type = turn % 2 == 0 ? dtype::f16 : dtype::bf16,
                       .out_type = turn % 2 == 0 ? dtype::f16 : dtype::bf16,
                       .seqs = {{4, 352}, {1, 500}, {1, 351}, {1, 350}, {2, 900}},
                       .window_left = turn % 3 == 2 ? 400 : -1,
                       .aligned = true,
                       .seed = ++turn};
      const kv_code code{type, g::token_head};
      const kv_code wide{c.q_type};
      c = with_codes(c, which == planes::of_v ? wide : code, which == planes::of_k ? wide : code);
      const attention_contents contents(c);
      for (const tested_backend* tested : devices()) {
        const attention_output good = output_by("decode", *tested, c, contents);
        for (const bool in_k : {true, false}) {
          // In a V of 16 bits it spoils one dim, of rows of the same tile too.
          if (!in_k && which == planes::of_k) continue;
          attention_contents poisoned = contents;
          for (std::size_t s = 0; s < c.seqs.size(); ++s) {
            if (c.seqs[s].seq_len <= bad_position) continue;
            auto& given = in_k ? poisoned.seqs[s].k_given : poisoned.seqs[s].v_given;
            given[static_cast<std::size_t>((bad_position * c.num_kv_heads + bad_head) * c.head_dim + 5)] =
                std::numeric_limits<float>::quiet_NaN();
          }
          const attention_output bad = output_by("decode", *tested, c, poisoned);
          const auto dims = static_cast<std::size_t>(c.head_dim);
          std::size_t row = 0;
          std::size_t num_spoiled = 0;
          for (const batch_seq& seq : c.seqs) {
            for (std::int32_t t = 0; t < seq.query_len; ++t) {
              const std::int32_t position = seq.seq_len - seq.query_len + t;
              const bool visible = position >= bad_position && seq.seq_len > bad_position &&
                                   (c.window_left < 0 || position - c.window_left <= bad_position);
              for (std::int32_t h = 0; h < c.num_q_heads(); ++h, ++row) {
                const bool sees = visible && h / c.group_size == bad_head;
                const bool same = std::memcmp(&good.out[row * dims], &bad.out[row * dims], dims * sizeof(float)) == 0;
                const bool spoiled = std::isnan(bad.out[row * dims]) && std::isnan(bad.out[row * dims + dims - 1]);
                CHECK_MESSAGE((sees ? spoiled : same), (in_k ? "K" : "V"), ", token ", t, " of ", seq.seq_len,
                              ", head ", h, " [", describe(c), "]");
                num_spoiled += sees ? 1 : 0;
              }
            }
          }
          CHECK(num_spoiled > 0);
        }
      }
    }
  }
}

TEST_CASE("the prefill kernel gives for static scales of 1 per head the bits of float16") {
  using g = scale_granularity;
  if (devices().empty()) return skip(no_device);
  std::size_t turn = 0;
  for (const attention_case& plain : prefill_border_cases()) {
    if (plain.head_dim % 16 != 0 || !has_tiles_of_wide(plain.head_dim) || ++turn % 4 != 0) continue;
    attention_case c = with_codes(plain, {dtype::e4m3, g::head}, {dtype::e4m3, g::head});
    c.unit_scales = true;
    c.q_type = c.out_type = dtype::f16;
    for (const tested_backend* tested : devices()) {
      if (tested->get().explain({}).front() == "prefill") compare_with_wide(*tested, c, turn, "prefill");
    }
  }
}

TEST_CASE(
    "the decode kernel gives for e4m3 of scale 1 the bits of float16, on tensor cores that add 16 products at once") {
  if (devices().empty()) return skip(no_device);
  std::size_t turn = 0;
  std::size_t num_compared = 0;
  for (const attention_case& plain : coded_decode_cases()) {
    ++turn;
    const scale_granularity grain = turn % 3 == 0   ? scale_granularity::none
                                    : turn % 3 == 1 ? scale_granularity::layer
                                                    : scale_granularity::head;
    attention_case c = with_codes(plain, {dtype::e4m3, grain}, {dtype::e4m3, grain});
    c.unit_scales = true;
    c.q_type = c.out_type = dtype::f16;
    c.deterministic = false;  // such plans sum codes and 16-bit types in different orders
    for (const tested_backend* tested : devices()) num_compared += compare_with_wide(*tested, c, turn, "decode");
    c = turn % 2 == 0 ? with_codes(c, c.k_code.value(), {dtype::f16}) : with_codes(c, {dtype::f16}, c.v_code.value());
    for (const tested_backend* tested : devices()) num_compared += compare_with_wide(*tested, c, turn, "decode");
  }
  CHECK(num_compared > 0);
}

void compare_coded_prefill_with_wide(bool with_raw_codes) {
  if (devices().empty()) return skip(no_device);
  // Blocks, groups, options and lengths of the prefill kernel's own table, with each code in turn.
  std::size_t turn = 0;
  std::size_t num_compared = 0;
  for (const attention_case& plain : prefill_border_cases()) {
    if (plain.head_dim % 16 != 0 || !has_tiles_of_wide(plain.head_dim)) continue;
    if (has_raw_codes(plain.head_dim) != with_raw_codes) continue;
    ++turn;
    const kv_code codes[] = {
        {dtype::e4m3}, {dtype::i8, scale_granularity::layer}, {dtype::e5m2, scale_granularity::layer}};
    attention_case c = with_codes(plain, codes[turn % 3], codes[(turn + turn / 3 % 2) % 3]);
    c.unit_scales = true;
    c.q_type = c.out_type = dtype::f16;
    for (const tested_backend* tested : devices()) {
      if (tested->get().explain({}).front() != "prefill") continue;
      num_compared += compare_with_wide(*tested, c, turn, "prefill");
    }
  }
  if (num_compared == 0) return skip("no device here has the prefill kernel");
}

TEST_CASE("the prefill kernel gives for codes of scale 1 the bits of float16, in which they are exact") {
  compare_coded_prefill_with_wide(true);
}

TEST_CASE("the prefill kernel of 144 to 192 dims gives for codes of scale 1 the bits of float16") {
  compare_coded_prefill_with_wide(false);
}

TEST_CASE("the prefill kernel above 192 dims gives the same values in other codes the same bits") {
  using g = scale_granularity;
  if (devices().empty()) return skip(no_device);
  const kv_code others[][2] = {{{dtype::e5m2}, {dtype::e5m2, g::layer}},
                               {{dtype::i8, g::head}, {dtype::e4m3, g::head}},
                               {{dtype::e4m3, g::layer}, {dtype::i8, g::layer}}};
  std::size_t turn = 0;
  std::size_t num_compared = 0;
  for (const attention_case& plain : prefill_border_cases()) {
    if (!has_coded_prefill(plain.head_dim) || has_tiles_of_wide(plain.head_dim) || ++turn % 4 != 0) continue;
    attention_case c = with_codes(plain, {dtype::e4m3}, {dtype::e4m3});
    c.unit_scales = true;
    c.q_type = c.out_type = turn % 8 == 0 ? dtype::f16 : dtype::bf16;
    attention_contents contents(c);
    for (attention_contents::sequence& sequence : contents.seqs) {
      for (std::vector<float>* const given : {&sequence.k_given, &sequence.v_given}) {
        for (float& x : *given) x = std::clamp(std::round(2 * x), -3.0f, 3.0f);
      }
    }
    for (const tested_backend* tested : devices()) {
      if (tested->get().explain({}).front() != "prefill") continue;
      const attention_output expected = output_by("prefill", *tested, c, contents);
      for (const auto& pair : others) {
        attention_case other = with_codes(c, pair[0], pair[1]);
        CAPTURE(describe(other));
        CHECK(bit_difference(output_by("prefill", *tested, other, contents), expected) == "");
        ++num_compared;
      }
    }
  }
  if (num_compared == 0) return skip("no device here has the prefill kernel");
}

/// Prompts over codes with queries of bfloat16; heads of 40 rows and of 64, some with keys of other calls before them.
attention_case prompts_over_codes(const kv_code& code, std::int32_t head_dim, std::uint64_t seed) {
  attention_case c{.what = "queries of bfloat16 over codes",
                   .num_kv_heads = 2,
                   .group_size = seed % 2 == 0 ? 4 : 5,
                   .head_dim = head_dim,
                   .v_head_dim = head_dim,
                   .q_type = dtype::bf16,
                   .out_type = dtype::bf16,
                   .seqs = {{200, 200}, {70, 500}, {3, 40}},
                   .aligned = true,
                   .seed = seed};
  return with_codes(c, code, code);
}

TEST_CASE("the prefill kernel of codes gives queries of bfloat16 the LSE of the same queries in float16, bit for bit") {
  using g = scale_granularity;
  if (devices().empty()) return skip(no_device);
  std::uint64_t seed = 0;
  std::size_t num_compared = 0;
  for (const kv_code& code :
       {kv_code{dtype::e4m3, g::layer}, kv_code{dtype::i8, g::token_head}, kv_code{dtype::u8, g::token_head}}) {
    for (const std::int32_t head_dim : {48, 64, 96, 128, 176, 256}) {
      for (const char option : {'-', 'c', 'a', 'n'}) {
        attention_case c = prompts_over_codes(code, head_dim, ++seed);
        if (option == 'c') c.soft_cap = 2;
        if (option == 'a') c.alibi = true;
        if (option == 'n') c.scale = -0.25f;
        attention_case half = c;
        half.q_type = half.out_type = dtype::f16;
        attention_contents contents(c);
        attention_contents of_half(half);
        // Of few bits, so that they are exact in both types, and of other magnitudes in each row, on both sides of
        // 2^-8.
        const auto dims = static_cast<std::size_t>(head_dim);
        for (std::size_t s = 0; s < c.seqs.size(); ++s) {
          std::vector<float>& q = contents.seqs[s].q;
          for (std::size_t i = 0; i < q.size(); ++i) {
            q[i] = std::ldexp(std::clamp(std::round(q[i] * 16), -63.0f, 63.0f), static_cast<int>(i / dims % 13) - 14);
          }
          of_half.seqs[s].q = q;
        }
        for (const tested_backend* tested : devices()) {
          if (tested->get().explain({}).front() != "prefill") continue;
          const attention_output got = output_by("prefill", *tested, c, contents);
          const attention_output expected = output_by("prefill", *tested, half, of_half);
          CAPTURE(describe(c));
          REQUIRE(got.lse.size() == expected.lse.size());
          CHECK(std::memcmp(got.lse.data(), expected.lse.data(), got.lse.size() * sizeof(float)) == 0);
          REQUIRE(got.out.size() == expected.out.size());
          std::size_t num_different = 0;  // by more than both roundings of the output
          for (std::size_t i = 0; i < got.out.size(); ++i) {
            const float allowed = 0x1.2p-8f * std::fabs(expected.out[i]) + 0x1p-24f;
            num_different += std::fabs(got.out[i] - expected.out[i]) <= allowed ? 0U : 1U;
          }
          CHECK(num_different == 0);
          ++num_compared;
        }
      }
    }
  }
  if (num_compared == 0) return skip("no device here has the prefill kernel");
}

TEST_CASE("the prefill kernel of codes takes queries of bfloat16 of any magnitude, and of none") {
  using g = scale_granularity;
  if (devices().empty()) return skip(no_device);
  std::uint64_t seed = 100;
  std::size_t num_compared = 0;
  for (const kv_code& code :
       {kv_code{dtype::e4m3}, kv_code{dtype::i8, g::layer}, kv_code{dtype::e4m3, g::token_head}}) {
    for (const std::int32_t head_dim : {64, 96, 128, 192, 240, 256}) {
      const attention_case c = prompts_over_codes(code, head_dim, ++seed);
      const auto dims = static_cast<std::size_t>(head_dim);
      attention_contents contents(c);
      for (attention_contents::sequence& sequence : contents.seqs) {
        for (std::size_t i = 0; i < sequence.q.size(); ++i) {
          // Rows of zeros, of subnormal numbers, of small ones, and ordinary ones.
          constexpr int powers[] = {0, -200, -130, -100, -20, 0, 2};
          const auto kind = i / dims % std::size(powers);
          sequence.q[i] = kind == 0 ? 0.0f : stored_as(dtype::bf16, std::ldexp(sequence.q[i], powers[kind]));
        }
      }
      const attention_expectation expected(c, contents);
      attention_contents poisoned = contents;
      constexpr std::size_t bad_row = 33;
      for (const tested_backend* tested : devices()) {
        if (tested->get().explain({}).front() != "prefill") continue;
        const attention_output good = output_by("prefill", *tested, c, contents);
        const std::string problem = expected.problem_of(good, numbers_for(*tested, c));
        CHECK_MESSAGE(problem.empty(), problem, " [", describe(c), "]");
        for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
          poisoned.seqs[0].q[bad_row * dims + 7] = bad;
          const attention_output got = output_by("prefill", *tested, c, poisoned);
          CAPTURE(describe(c));
          for (std::size_t d = 0; d < dims && std::isnan(bad); ++d) CHECK(std::isnan(got.out[bad_row * dims + d]));
          const std::size_t after = (bad_row + 1) * dims;
          CHECK(std::memcmp(got.out.data(), good.out.data(), bad_row * dims * sizeof(float)) == 0);
          CHECK(std::memcmp(&got.out[after], &good.out[after], (good.out.size() - after) * sizeof(float)) == 0);
        }
        ++num_compared;
      }
    }
  }
  if (num_compared == 0) return skip("no device here has the prefill kernel");
}

TEST_CASE("the prefill kernel with scales per token takes queries far apart in one warp, and V of any magnitude") {
  using g = scale_granularity;
  if (devices().empty()) return skip(no_device);
  const kv_code e4m3{dtype::e4m3, g::token_head};
  const kv_code i8{dtype::i8, g::token_head};
  const kv_code u8{dtype::u8, g::token_head};
  const kv_code pairs[][2] = {{e4m3, e4m3},        {i8, i8},   {u8, u8}, {{dtype::e4m3, g::layer}, i8},
                              {i8, {dtype::e4m3}}, {u8, e4m3}, {i8, u8}};
  // Magnitudes of V as powers of two, of a sequence. Keys are taken from the last to the first: units rise late, or
  // never after the first tile, where rows do not see the largest ones; and are far outside what sums have room for.
  constexpr std::size_t num_kinds = 5;
  const auto magnitude = [](std::size_t kind, std::size_t position, std::size_t length) {
    const int percent = static_cast<int>(position * 100 / length);
    constexpr int mixed[] = {-66, 3, -20, 0, 40, 66, -1};
    switch (kind % num_kinds) {
      case 0:
        return 66 - 132 * percent / 100;
      case 1:
        return 132 * percent / 100 - 66;
      case 2:
        return mixed[position * 5 / 3 % std::size(mixed)];
      case 3:
        return -100;
      default:
        return 14 + percent % 3;
    }
  };
  std::size_t turn = 0;
  std::size_t num_compared = 0;
  for (const auto& pair : pairs) {
    for (const std::int32_t head_dim : {64, 96, 128}) {
      for (const char option : {'-', 'w', 'c'}) {
        ++turn;
        attention_case c = with_codes(prompts_over_codes(pair[0], head_dim, 200 + turn), pair[0], pair[1]);
        if (option == 'w') c.window_left = 130;
        if (option == 'c') c.soft_cap = 20;
        const auto dims = static_cast<std::size_t>(head_dim);
        const auto heads = static_cast<std::size_t>(c.num_kv_heads);
        attention_contents contents(c);
        for (std::size_t s = 0; s < c.seqs.size(); ++s) {
          attention_contents::sequence& sequence = contents.seqs[s];
          const bool is_static = pair[0].granularity != g::token_head;
          // The rows that are multiplied by 2^10 have ordinary logits.
          constexpr int powers[] = {0, 10, -130, 17, 10, 0, -30, -9, 10};
          for (std::size_t i = 0; i < sequence.q.size(); ++i) {
            const auto kind = i / dims % std::size(powers);
            const int power = is_static ? std::min(powers[kind] - 10, 2) : powers[kind];
            sequence.q[i] = kind == 0 ? 0.0f : stored_as(dtype::bf16, std::ldexp(sequence.q[i], power));
          }
          const auto length = static_cast<std::size_t>(c.seqs[s].seq_len);
          for (std::size_t i = 0; i < sequence.k.size(); ++i) {
            if (!is_static) sequence.k_given[i] = std::ldexp(sequence.k_given[i], -10);
            if (pair[1].granularity == g::token_head) {
              const std::size_t position = i / dims / heads;
              // No dim in which the largest tokens are 0: there the others are below what f16 holds beside them.
              const float value = std::copysign(std::max(std::fabs(sequence.v_given[i]), 0.0625f), sequence.v_given[i]);
              sequence.v_given[i] = std::ldexp(value, magnitude(s + turn, position, length));
            }
          }
          const auto read_back = [&](const kv_code& code, const std::vector<float>& given, std::vector<float>& read) {
            if (code.granularity != g::token_head) return;
            for (std::size_t first = 0; first < given.size(); first += dims) {
              const std::vector<float> row =
                  oracle_decode(code, oracle_encode(code, 1.0f, std::span<const float>(given.data() + first, dims)));
              std::copy(row.begin(), row.end(), read.begin() + static_cast<std::ptrdiff_t>(first));
            }
          };
          read_back(pair[0], sequence.k_given, sequence.k);
          read_back(pair[1], sequence.v_given, sequence.v);
        }
        const attention_expectation expected(c, contents);
        for (const tested_backend* tested : devices()) {
          if (tested->get().explain({}).front() != "prefill") continue;
          const attention_output got = output_by("prefill", *tested, c, contents);
          const std::string problem = expected.problem_of(got, numbers_for(*tested, c));
          CHECK_MESSAGE(problem.empty(), problem, " [", describe(c), "]");
          ++num_compared;
        }
      }
    }
  }
  if (num_compared == 0) return skip("no device here has the prefill kernel");
}

TEST_CASE("several new tokens over codes, as a plan shares them out, agree with the oracle") {
  using g = scale_granularity;
  if (devices().empty()) return skip(no_device);
  const kv_code pairs[][2] = {{{dtype::e4m3}, {dtype::e4m3}},
                              {{dtype::e4m3, g::layer}, {dtype::i8, g::layer}},
                              {{dtype::e4m3, g::head}, {dtype::e5m2, g::head}},
                              {{dtype::i8, g::token_head}, {dtype::i8, g::token_head}},
                              {{dtype::u8, g::token_head}, {dtype::u8, g::token_head}}};
  std::size_t turn = 0;
  for (const auto& pair : pairs) {
    for (const std::int32_t head_dim : {64, 96, 128, 160, 256}) {
      attention_case plain{.what = "several new tokens over codes",
                           .num_kv_heads = 2,
                           .group_size = 4,
                           .head_dim = head_dim,
                           .v_head_dim = head_dim,
                           .q_type = turn % 2 == 0 ? dtype::bf16 : dtype::f16,
                           .out_type = turn % 2 == 0 ? dtype::bf16 : dtype::f16,
                           .seqs = {{5, 900}, {64, 200}, {300, 700}, {1, 333}, {2, 2}, {257, 257}}};
      plain.seed = ++turn;
      const attention_case c = with_codes(plain, pair[0], pair[1]);
      const std::string problem = check_attention(c, devices(), turn);
      CHECK_MESSAGE(problem.empty(), problem);
    }
  }
}

}  // namespace

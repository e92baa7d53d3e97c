// SPDX-License-Identifier: Apache-2.0
// Attention over every code: against the float64 oracle on the values that are stored, bit for bit against 16-bit types
// on the same values, and where a NaN goes.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/backend.hpp>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "conformance/attention_tables.hpp"
#include "support/codes.hpp"
#include "support/elements.hpp"
#include "support/random.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;

TEST_CASE("every pair of codes agrees with the oracle, under all options, in all layouts") {
  const std::vector<kv_code>& codes = all_codes();
  const std::size_t num_codes = codes.size();
  const std::vector<attention_case> some = random_cases(test_seed(), 100);
  const std::vector<attention_case> planes = random_plane_cases(test_seed(), 60);
  std::size_t turn = 0;
  for (const std::vector<attention_case>* cases : {&some, &planes}) {
    for (const attention_case& plain : *cases) {
      // Neighbours in turn: each code comes about ten times as K and as V, most often with another one.
      const attention_case c = with_codes(plain, codes[turn % num_codes], codes[turn * 5 / 3 % num_codes]);
      const std::string problem = check_attention(c, turn++);
      CHECK_MESSAGE(problem.empty(), problem);
    }
  }
}

TEST_CASE("e4m3 of scale 1 with float16 queries gives the bits of float16 on what convert_blocks makes of it") {
  std::size_t turn = 0;
  for (const attention_case& plain : random_cases(hash_of(test_seed(), 2), 40)) {
    if (plain.v_in_k) continue;
    ++turn;
    const kv_code e4m3{dtype::e4m3, turn % 2 == 0 ? scale_granularity::none : scale_granularity::layer};
    attention_case c = with_codes(plain, e4m3, e4m3);
    c.values = value_kind::normal;
    c.unit_scales = true;
    c.q_type = dtype::f16;
    c.layout = turn % 3 == 0 ? arrangement::nhd : turn % 3 == 1 ? arrangement::hnd : arrangement::x_split;
    attention_case half = c;
    half.k_code = half.v_code = {};
    half.kv_type = dtype::f16;
    for (const tested_backend* tested : one_per_family(turn)) {
      const attention_contents contents(c);
      const attention_contents other(half);
      const attention_placement placement = placement_in_turn(c, turn);
      attention_call coded(*tested, c, contents, placement);
      attention_call wide(*tested, half, other, placement);
      const std::string what = tested->name + ": " + describe(c);
      CAPTURE(what);
      REQUIRE(coded.num_blocks == wide.num_blocks);
      std::vector<block_copy> all;
      for (std::int32_t i = 0; i < coded.num_blocks; ++i) all.push_back({block_id{i}, block_id{i}});
      REQUIRE(tested->get().convert_blocks(coded.params.kv, wide.params.kv, all) == errc::ok);
      // The implementation that decodes on the fly, on either.
      wide.spec.implementation = tested->is_host ? "vectors" : "general";
      if (!tested->is_host) coded.spec.implementation = wide.spec.implementation;
      coded.plan();
      wide.plan();
      REQUIRE(coded.run() == errc::ok);
      REQUIRE(wide.run() == errc::ok);
      std::string problem;
      const attention_output a = coded.read(problem);
      CHECK(problem == "");
      const attention_output b = wide.read(problem);
      CHECK(bit_difference(a, b) == "");
    }
  }
}

/// Implementations that compute codes as they do a bf16 cache, and how many calls each was compared in.
constexpr const char* widening[] = {"tiles", "dots", "vectors"};
using comparison_counts = std::int64_t[std::size(widening)];

/// A case of codes of scale 1 against bf16 on what convert_blocks makes of them, on the host.
void compare_with_bfloat16(const attention_case& plain, dtype type, std::size_t turn, comparison_counts& counts) {
  attention_case c = with_codes(plain, {type, scale_granularity::layer}, {type, scale_granularity::layer});
  c.values = value_kind::normal;
  c.unit_scales = true;
  c.q_type = c.out_type = dtype::bf16;
  attention_case wide_case = c;
  wide_case.k_code = wide_case.v_code = {};
  wide_case.kv_type = dtype::bf16;
  for (const tested_backend* tested : one_per_family(turn)) {
    if (!tested->is_host) continue;
    const attention_contents contents(c);
    const attention_contents other(wide_case);
    const attention_placement placement = placement_in_turn(c, turn);
    attention_call coded(*tested, c, contents, placement);
    attention_call wide(*tested, wide_case, other, placement);
    const std::string what = tested->name + ": " + describe(c);
    CAPTURE(what);
    std::vector<block_copy> all;
    for (std::int32_t i = 0; i < coded.num_blocks; ++i) all.push_back({block_id{i}, block_id{i}});
    REQUIRE(tested->get().convert_blocks(coded.params.kv, wide.params.kv, all) == errc::ok);
    for (std::size_t i = 0; i < std::size(widening); ++i) {
      CAPTURE(widening[i]);
      coded.spec.implementation = wide.spec.implementation = widening[i];
      try {
        coded.plan();
      } catch (const error& refused) {
        REQUIRE(std::string_view(widening[i]) != "vectors");
        REQUIRE(refused.code() == errc::unsupported);
        continue;
      }
      wide.plan();
      coded.reset_outputs();
      wide.reset_outputs();
      const errc code = coded.run();
      if (code == errc::unsupported && std::string_view(widening[i]) == "tiles") continue;  // the call has a bias
      REQUIRE(code == errc::ok);
      REQUIRE(wide.run() == errc::ok);
      std::string problem;
      const attention_output a = coded.read(problem);
      CHECK(problem == "");
      CHECK(bit_difference(a, wide.read(problem)) == "");
      ++counts[i];
    }
  }
}

bool has_host() {
  return std::ranges::any_of(all_backends(), [](const tested_backend& tested) { return tested.is_host; });
}

constexpr dtype float8_and_i8[] = {dtype::e5m2, dtype::i8, dtype::e4m3};

TEST_CASE("codes of scale 1 with bfloat16 queries give the bits of bfloat16 on what convert_blocks makes of them") {
  comparison_counts counts = {};
  std::size_t turn = 0;
  for (const attention_case& plain : random_cases(hash_of(test_seed(), 3), 40)) {
    if (plain.v_in_k) continue;
    ++turn;
    compare_with_bfloat16(plain, float8_and_i8[turn % 3], turn, counts);
  }
  CHECK((counts[2] > 0) == has_host());
  MESSAGE(counts[0], " comparisons of tiles, ", counts[1], " of dots, ", counts[2], " of vectors");
}

// Up to eight rows of a KV head are computed from codes in registers, more from widened rows.
TEST_CASE("codes give the bits of bfloat16 for any number of rows, in dims and blocks that fill vectors and do not") {
  comparison_counts counts = {};
  constexpr std::int32_t dims[] = {128, 64, 32, 100, 4, 160, 96, 130, 36};
  constexpr std::int32_t blocks[] = {16, 5, 64, 8};
  std::size_t turn = 0;
  for (const std::int32_t rows : {1, 2, 3, 4, 5, 6, 7, 8, 9, 18}) {
    for (const dtype type : float8_and_i8) {
      for (int i = 0; i < 3; ++i) {
        attention_case c{.what = "rows of codes", .num_kv_heads = 2, .seqs = {{1, 203}, {1, 64}, {1, 7}, {1, 531}}};
        c.group_size = rows;
        c.head_dim = dims[turn % std::size(dims)];
        c.block_size = blocks[turn / 2 % std::size(blocks)];
        if (turn % 4 == 3) c.window_left = 37;
        if (rows % 2 == 0 && turn % 2 == 1) {  // rows of different tokens, whose masks differ
          c.group_size = rows / 2;
          c.seqs = {{2, 130}, {2, 65}, {2, 2}};
        }
        compare_with_bfloat16(c, type, turn++, counts);
      }
    }
  }
  CHECK((counts[2] > 0) == has_host());
  MESSAGE(counts[0], " comparisons of tiles, ", counts[1], " of dots, ", counts[2], " of vectors");
}

TEST_CASE("a key that is alone comes out as its values, for each of the 256 codes") {
  using g = scale_granularity;
  for (const dtype q_type : {dtype::bf16, dtype::f32}) {
    for (const dtype type : {dtype::e4m3, dtype::e5m2, dtype::i8, dtype::u8}) {
      attention_case c{.what = "all codes",
                       .num_kv_heads = 1,
                       .head_dim = 8,
                       .v_head_dim = 256,
                       .q_type = q_type,
                       .out_type = q_type,
                       .seqs = {{1, 1}}};
      const kv_code code{type, type == dtype::u8 ? g::token_head : g::layer};
      c = with_codes(c, code, code);
      c.unit_scales = true;  // and those of a row of 0 … 255 in u8 are 1 and 0
      attention_contents contents(c);
      std::vector<float>& given = contents.seqs[0].v_given;
      for (std::size_t i = 0; i < 256; ++i) {
        const auto byte = static_cast<std::uint8_t>(i);
        float value = visit_dtype(type, [&](auto traits) -> float {
          using stored = typename decltype(traits)::storage;
          if constexpr (sizeof(stored) != 1) return 0.0f;
          if constexpr (sizeof(stored) == 1) return to_float(std::bit_cast<stored>(byte));
        });
        if (!std::isfinite(value) || value < -max_finite(type)) value = 0;  // −128 is no code of i8
        given[i] = value;
      }
      for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type))) {
        const attention_output got = run_attention(*tested, c, contents);
        for (std::size_t row = 0; row < 2; ++row) {
          for (std::size_t i = 0; i < 256; ++i) {
            CHECK_MESSAGE(got.out[row * 256 + i] == given[i], tested->name, ", ", to_string(code), ", code ", i);
          }
        }
      }
    }
  }
}

/// What `integers` makes of queries: bytes times a step per row.
attention_contents with_rounded_queries(attention_contents contents, const attention_case& c) {
  const auto dims = static_cast<std::size_t>(c.head_dim);
  for (attention_contents::sequence& seq : contents.seqs) {
    for (std::size_t row = 0; row < seq.q.size(); row += dims) {
      float largest = 0;
      for (std::size_t d = 0; d < dims; ++d) largest = std::max(largest, std::abs(seq.q[row + d]));
      const float inverse = largest < 0x1p-119f ? 0.0f : 127.0f / largest;
      const float step = largest < 0x1p-119f ? 0.0f : largest / 127.0f;
      for (std::size_t d = 0; d < dims; ++d) seq.q[row + d] = std::nearbyint(seq.q[row + d] * inverse) * step;
    }
  }
  return contents;
}

/// Whether it is of an instruction set with dot products of bytes.
bool multiplies_bytes(const tested_backend& tested) {
  constexpr std::string_view families[] = {"cpu-avx2_vnni", "cpu-avx512_bf16", "cpu-amx",
                                           "cpu-amx_fp16",  "cpu-neon_bf16",   "cpu-sve256"};
  return std::ranges::find(families, tested.family) != std::end(families);
}

bool has_integers(const tested_backend& tested) {
  return std::ranges::any_of(tested.get().attention_kernels(),
                             [](const std::string& kernel) { return kernel.ends_with("bf16-codes integers"); });
}

TEST_CASE(
    "integers, forced, agree with the oracle on rounded queries, and on the queries themselves within their own "
    "bound") {
  using g = scale_granularity;
  const kv_code pairs[][2] = {{{dtype::i8, g::token_head}, {dtype::i8, g::token_head}},
                              {{dtype::i8, g::layer}, {dtype::i8, g::layer}},
                              {{dtype::i8, g::head}, {dtype::e4m3, g::token_head}},
                              {{dtype::i8, g::token_head}, {dtype::u8, g::token_head}},
                              {{dtype::i8, g::layer}, {dtype::bf16}}};
  std::vector<attention_case> cases = random_cases(hash_of(test_seed(), 5), 60);
  const std::vector<attention_case> planes = random_plane_cases(hash_of(test_seed(), 5), 30);
  cases.insert(cases.end(), planes.begin(), planes.end());
  std::size_t turn = 0;
  std::int64_t num_served = 0;
  double largest_share = 0;
  for (std::size_t n = 0; n < cases.size(); n += BIFOLIO_CASE_STEP) {
    const auto& pair = pairs[turn++ % std::size(pairs)];
    attention_case c = with_codes(cases[n], pair[0], pair[1]);
    c.q_type = c.out_type = dtype::bf16;
    attention_case worst_case = c;
    worst_case.statistical = false;
    const attention_contents contents(c);
    const attention_contents rounded = with_rounded_queries(contents, c);
    const attention_expectation as_rounded(c, rounded);
    const attention_expectation as_given(worst_case, contents);
    for (const tested_backend* tested : one_per_family(turn)) {
      const bool offered = has_integers(*tested);
      attention_call call(*tested, c, contents, placement_in_turn(c, turn));
      call.plan();
      for (const std::string& kernel : tested->get().describe(call.planned, call.params)) {
        CHECK_MESSAGE(kernel.find("integers") == std::string::npos, kernel);
      }
      if (offered) {
        const std::vector<std::string> said = tested->get().explain(call.planned);
        CHECK(std::ranges::count(said, "integers is not asked: it rounds queries, and has to be forced") == 1);
      }
      call.spec.implementation = "integers";
      if (!offered) {
        CHECK_THROWS_AS(call.plan(), error);
        continue;
      }
      call.plan();
      REQUIRE(call.run() == errc::ok);
      ++num_served;
      std::string problem;
      const attention_output got = call.read(problem);
      arithmetic numbers = numbers_for(*tested, c);
      problem += as_rounded.problem_of(got, numbers);
      CHECK_MESSAGE(problem.empty(), tested->name, ": ", problem, " [", describe(c), "]");
      numbers.query_roundoff = 1.0 / 254;
      const reference::accuracy_judge judge = as_given.judge(got, numbers, 0, c.seqs.size());
      CHECK_MESSAGE(judge.problem().empty(), tested->name, ": ", judge.problem(), " [", describe(c), "]");
      largest_share = std::max(largest_share, judge.worst_share());
    }
  }
  CHECK((num_served > 0) == std::ranges::any_of(all_backends(), multiplies_bytes));
  MESSAGE(num_served, " calls; largest error ", largest_share, " of the bound of rounded queries");
}

TEST_CASE("integers give a token the same bits alone, in a chunk and in any layout") {
  for (const tested_backend* tested : one_per_family(0)) {
    CHECK(has_integers(*tested) == multiplies_bytes(*tested));
    if (!has_integers(*tested)) continue;
    attention_case c{.what = "integers",
                     .group_size = 3,
                     .head_dim = 96,
                     .q_type = dtype::bf16,
                     .out_type = dtype::bf16,
                     .seqs = {{40, 700}, {1, 90}}};
    c = with_codes(c, {dtype::i8, scale_granularity::token_head}, {dtype::i8, scale_granularity::token_head});
    attention_output all;
    for (const arrangement layout : all_arrangements) {
      for (const std::int32_t tokens : {40, 7, 1}) {
        c.layout = layout;
        c.seqs[0].query_len = tokens;
        const attention_contents contents(c);
        attention_call call(*tested, c, contents);
        call.spec.implementation = "integers";
        call.plan();
        attention_output got = rows_of(c, run_planned(*tested, call), 0);
        const std::size_t row = static_cast<std::size_t>(c.num_q_heads()) * static_cast<std::size_t>(c.out_dim());
        got.out.erase(got.out.begin(), got.out.end() - static_cast<std::ptrdiff_t>(row));
        got.lse.erase(got.lse.begin(), got.lse.end() - static_cast<std::ptrdiff_t>(c.num_q_heads()));
        if (all.out.empty()) all = got;
        CHECK_MESSAGE(bit_difference(all, got) == "", tested->name, ", ", tokens, " tokens");
      }
    }
  }
}

TEST_CASE("every implementation, forced by name, agrees with the oracle on codes or says why it declines") {
  using g = scale_granularity;
  const kv_code pairs[][2] = {{{dtype::e4m3, g::layer}, {dtype::e4m3, g::head}},
                              {{dtype::i8, g::head}, {dtype::e5m2, g::layer}},
                              {{dtype::e4m3, g::token_head}, {dtype::i8, g::token_head}},
                              {{dtype::u8, g::token_head}, {dtype::u8, g::token_head}},
                              {{dtype::bf16}, {dtype::e4m3, g::token_head}},
                              {{dtype::i8, g::token_head}, {dtype::f16}}};
  std::size_t turn = 0;
  std::int64_t num_served = 0;
  bool has_host = false;
  for (const attention_case& plain : random_cases(hash_of(test_seed(), 4), 48)) {
    const auto& pair = pairs[turn % std::size(pairs)];
    attention_case c = with_codes(plain, pair[0], pair[1]);
    if (turn++ % 4 != 0) c.q_type = c.out_type = dtype::bf16;
    const attention_contents contents(c);
    const attention_expectation expected(c, contents);
    for (const tested_backend* tested : one_per_family(turn)) {
      if (!tested->is_host) continue;
      has_host = true;
      for (const std::string& name : tested->get().explain({})) {
        if (name == "integers") continue;  // rounds queries; above
        attention_call call(*tested, c, contents, placement_in_turn(c, turn));
        call.spec.implementation = name;
        try {
          call.plan();
        } catch (const error& refused) {
          REQUIRE(refused.code() == errc::unsupported);
          CHECK_MESSAGE(std::string(refused.what()).find(name) != std::string::npos, refused.what());
          continue;
        }
        const errc code = call.run();
        if (code == errc::unsupported) continue;
        REQUIRE(code == errc::ok);
        ++num_served;
        std::string problem;
        const attention_output got = call.read(problem);
        problem += expected.problem_of(got, numbers_for(*tested, c));
        CHECK_MESSAGE(problem.empty(), tested->name, ", ", name, ": ", problem, " [", describe(c), "]");
      }
    }
  }
  CHECK((num_served > 0) == has_host);
}

TEST_CASE("a NaN in a token with scales per token spoils the rows of its head that see it, and no other") {
  using g = scale_granularity;
  for (const dtype q_type : {dtype::bf16, dtype::f32}) {
    // Tile registers take codes by themselves from eight query heads of a KV head on.
    for (const auto& [type, group_size] :
         {std::pair{dtype::e4m3, 2}, {dtype::i8, 8}, {dtype::u8, 2}, {dtype::e4m3, 8}}) {
      attention_case c{.what = "codes with a bad value",
                       .num_kv_heads = 3,
                       .group_size = group_size,
                       .head_dim = 48,
                       .q_type = q_type,
                       .out_type = q_type,
                       .seqs = {{1, 600}, {50, 80}, {1, 30}, {40, 40}, {2, 700}}};
      c = with_codes(c, {type, g::token_head}, {type, g::token_head});
      const attention_contents contents(c);
      for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type))) {
        if (!tested->is_host) continue;
        const attention_output good = run_attention(*tested, c, contents);
        for (const bool in_k : {true, false}) {
          constexpr std::int32_t bad_seq = 3;
          constexpr std::int32_t bad_position = 21;
          constexpr std::int32_t bad_head = 1;
          attention_contents poisoned = contents;
          auto& seq = poisoned.seqs[bad_seq];
          auto& given = in_k ? seq.k_given : seq.v_given;
          given[static_cast<std::size_t>((bad_position * c.num_kv_heads + bad_head) * c.head_dim + 5)] =
              std::numeric_limits<float>::quiet_NaN();
          const attention_output bad = run_attention(*tested, c, poisoned);
          std::size_t row = 0;
          const auto dims = static_cast<std::size_t>(c.head_dim);
          for (std::size_t s = 0; s < c.seqs.size(); ++s) {
            for (std::int32_t t = 0; t < c.seqs[s].query_len; ++t) {
              for (std::int32_t h = 0; h < c.num_q_heads(); ++h, ++row) {
                const bool sees = s == bad_seq && h / c.group_size == bad_head && t >= bad_position;
                const bool same = std::memcmp(&good.out[row * dims], &bad.out[row * dims], dims * sizeof(float)) == 0;
                const bool spoiled = std::isnan(bad.out[row * dims]) && std::isnan(bad.out[row * dims + dims - 1]);
                CHECK_MESSAGE((sees ? spoiled : same), tested->name, in_k ? ", K" : ", V", ", sequence ", s, ", token ",
                              t, ", head ", h, " [", describe(c), "]");
              }
            }
          }
        }
      }
    }
  }
}

TEST_CASE("a part of the decode kernel's cases of codes agrees with the oracle") {
  const std::vector<attention_case> cases = coded_decode_cases();
  for (std::size_t n = 0; n < cases.size(); n += 11) {
    const std::string problem = check_attention(cases[n], n);
    CHECK_MESSAGE(problem.empty(), problem);
  }
}

TEST_CASE("a plan for codes refuses a cache of others, by name") {
  for (const tested_backend* tested : one_per_family(0)) {
    attention_case c = decode_cases().front();
    c = with_codes(c, {dtype::e4m3, scale_granularity::layer}, {dtype::i8, scale_granularity::token_head});
    c.v_in_k = false;
    const attention_contents contents(c);
    attention_call call(*tested, c, contents);
    call.plan();
    const auto sentence = [&] {
      const auto problem = find_problem(call.planned, call.params);
      return problem ? std::string(problem->what()) : std::string();
    };
    CHECK(sentence() == "");
    const kv_cache_view good = call.params.kv;
    call.params.kv.k_scales = nullptr;
    CHECK(sentence().find("kv.k_scales is null; the code of the plane has static scales") != std::string::npos);
    CHECK(call.run() == errc::invalid_argument);
    call.params.kv = good;
    call.params.kv.layout.k.code.granularity = scale_granularity::token_head;
    CHECK(sentence().find(
              "the code of k is e4m3, scale per token_head (f32); the plan was made for e4m3, scale per layer "
              "(f32)") != std::string::npos);
    call.params.kv = good;
    call.params.kv.layout.v.tail.offset -= 4;
    CHECK(sentence().find("its tail is not between the elements and the next block") != std::string::npos);
    CHECK(call.run() == errc::invalid_argument);
    CHECK(call.untouched());
    call.params.kv = good;
    call.spec.q_type = dtype::e4m3;
    try {
      call.plan();
      FAIL("accepted");
    } catch (const error& problem) {
      CHECK(std::string(problem.what()).find("the dtype of q is e4m3; it must be one of f32, f16, bf16") !=
            std::string::npos);
    }
  }
}

}  // namespace

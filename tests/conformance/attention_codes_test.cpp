// SPDX-License-Identifier: Apache-2.0
// Attention over every code: against the float64 oracle on the values that are stored, and e4m3 bit for bit against
// float16.
#include <doctest/doctest.h>

#include <bifolio/backend.hpp>
#include <string>
#include <vector>

#include "conformance/attention_tables.hpp"
#include "support/codes.hpp"
#include "support/random.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;

/// The same case with codes; numbers that only float32 holds become ordinary ones.
attention_case with_codes(attention_case c, const kv_code& k, const kv_code& v) {
  c.kv_type = dtype::f32;
  c.k_code = k;
  c.v_code = c.v_in_k ? k : v;
  if (c.values == value_kind::denormal || c.values == value_kind::max_finite) c.values = value_kind::normal;
  return c;
}

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

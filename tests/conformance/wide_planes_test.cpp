// SPDX-License-Identifier: Apache-2.0
// K or V of 16 bits beside codes, in the prefill kernels of codes, forced by name.
#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/backend.hpp>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "conformance/attention_tables.hpp"
#include "support/codes.hpp"
#include "support/elements.hpp"
#include "support/skip.hpp"

namespace {

using namespace bifolio;
using namespace bifolio::test;
using g = scale_granularity;

constexpr const char* no_kernel = "no device here has the prefill kernel";

std::vector<const tested_backend*> devices_with_prefill() {
  std::vector<const tested_backend*> found;
  for (const tested_backend& tested : all_backends()) {
    if (!tested.is_host && tested.get().explain({}).front() == "prefill") found.push_back(&tested);
  }
  return found;
}

/// What the prefill kernel computes of a case. False: the device has none.
bool prefill(const tested_backend& tested, const attention_case& c, const attention_contents& contents,
             std::size_t turn, attention_output& output) {
  attention_call call(tested, c, contents, placement_in_turn(c, turn));
  call.spec.implementation = "prefill";
  try {
    call.plan();
  } catch (const error& refused) {
    CHECK_MESSAGE(is_for_lack_of_a_kernel(refused), refused.what());
    return false;
  }
  REQUIRE(call.run() == errc::ok);
  for (const std::string& kernel : tested.get().describe(call.planned, call.params)) {
    CHECK_MESSAGE((kernel.empty() || kernel.find(" coded ") != std::string::npos), kernel);
  }
  std::string problem;
  output = call.read(problem);
  CHECK_MESSAGE(problem.empty(), problem, " [", describe(c), "]");
  return true;
}

/// Those of float16, whatever the type of V: decode may compute V of bfloat16 in that type, prefill does not.
arithmetic numbers_of_prefill(const tested_backend& tested, const attention_case& c) {
  arithmetic numbers = numbers_for(tested, c);
  if (c.v_code->type != dtype::bf16) return numbers;
  const auto counted = static_cast<std::size_t>(c.kv_type);
  const auto half = static_cast<std::size_t>(dtype::f16);
  numbers.unit_accumulate[counted] = tested.numbers.unit_accumulate[half];
  numbers.unit_probability[counted] = tested.numbers.unit_probability[half];
  numbers.tiny_probability[counted] = tested.numbers.tiny_probability[half];
  return numbers;
}

/// Holds what prefill computes of a case on each device against the oracle. Returns how many devices have it.
std::size_t check_prefill(const std::vector<const tested_backend*>& devices, const attention_case& c,
                          const attention_contents& contents, std::size_t turn) {
  const attention_expectation expected(c, contents);
  std::size_t num_compared = 0;
  for (const tested_backend* tested : devices) {
    attention_output got;
    if (!prefill(*tested, c, contents, turn, got)) continue;
    const std::string problem = expected.problem_of(got, numbers_of_prefill(*tested, c));
    CHECK_MESSAGE(problem.empty(), problem, " [", describe(c), "]");
    ++num_compared;
  }
  return num_compared;
}

/// 8 query heads on 2 KV heads; q and out of one type.
attention_case case_of(const char* what, std::int32_t head_dim, dtype q_type, std::vector<batch_seq> seqs,
                       std::size_t seed) {
  return {.what = what,
          .num_kv_heads = 2,
          .group_size = 4,
          .head_dim = head_dim,
          .q_type = q_type,
          .out_type = q_type,
          .seqs = std::move(seqs),
          .aligned = true,
          .seed = seed};
}

/// K or V of `type` beside a code.
attention_case with_wide_plane(const attention_case& c, dtype type, bool is_k, const kv_code& code) {
  return is_k ? with_codes(c, {type}, code) : with_codes(c, code, {type});
}

/// A wide K or V beside every code, with every head_dim, block size and option in turn, against the oracle.
void check_beside_codes(bool is_k) {
  const auto devices = devices_with_prefill();
  if (devices.empty()) return skip(no_kernel);
  const kv_code codes[] = {
      {dtype::e4m3, g::layer}, {dtype::e4m3, g::token_head}, {dtype::i8, g::token_head}, {dtype::u8, g::token_head},
      {dtype::e5m2},           {dtype::i8, g::head}};
  constexpr std::int32_t block_sizes[] = {16, 5, 128, 48, 1, 32, 7};
  std::size_t turn = is_k ? 0 : 1000;
  std::size_t num_compared = 0;
  for (const dtype type : {dtype::f16, dtype::bf16}) {
    for (const kv_code& code : codes) {
      for (const std::int32_t head_dim : {64, 80, 96, 128, 16, 48, 112}) {
        ++turn;
        if (head_dim != 64 && head_dim != 128 && turn % 3 == 2) continue;
        const dtype q_type = turn / 2 % 2 == 0 ? dtype::f16 : dtype::bf16;
        attention_case c = case_of("a wide plane beside codes", head_dim, q_type,
                                   {{40, 300}, {130, 130}, {3, 90}, {1, 257}, {5, 5}, {0, 40}}, turn);
        if (turn % 4 == 3) c.group_size = 5;
        c.block_size = block_sizes[turn % std::size(block_sizes)];
        c.layout = turn % 3 == 0 ? arrangement::nhd : arrangement::hnd;
        c.causal = turn % 7 != 6;
        if (turn % 5 == 1) c.soft_cap = 3;
        if (turn % 5 == 2) c.alibi = c.sinks = true;
        if (turn % 5 == 3) c.window_left = 90;
        if (turn % 5 == 4) c.scale = -0.1f;
        c = with_wide_plane(c, type, is_k, code);
        const attention_contents contents(c);
        num_compared += check_prefill(devices, c, contents, turn);
      }
    }
  }
  CHECK(num_compared > 0);
}

TEST_CASE("prefill takes K of 16 bits beside every code of V, head_dim, block size and option") {
  check_beside_codes(true);
}

TEST_CASE("prefill takes V of 16 bits beside every code of K, head_dim, block size and option") {
  check_beside_codes(false);
}

TEST_CASE("rows of bfloat16 of any magnitude beside codes are within the bound") {
  const auto devices = devices_with_prefill();
  if (devices.empty()) return skip(no_kernel);
  std::size_t turn = 0;
  std::size_t num_compared = 0;
  for (const bool is_k : {true, false}) {
    for (const kv_code& code :
         {kv_code{dtype::e4m3, g::layer}, kv_code{dtype::i8, g::token_head}, kv_code{dtype::u8, g::token_head}}) {
      for (const std::int32_t head_dim : {64, 80, 128}) {
        ++turn;
        attention_case c = case_of("rows of other magnitudes", head_dim, dtype::bf16,
                                   {{40, 200}, {40, 200}, {140, 140}, {40, 300}, {30, 150}}, turn);
        c.scale = is_k ? 0x1p-100f : 0.1f;
        c.statistical = false;
        if (turn % 2 == 0) c.window_left = 60;
        c = with_wide_plane(c, dtype::bf16, is_k, code);
        attention_contents contents(c);
        for (std::size_t s = 0; s < c.seqs.size(); ++s) {
          auto& given = is_k ? contents.seqs[s].k_given : contents.seqs[s].v_given;
          auto& stored = is_k ? contents.seqs[s].k : contents.seqs[s].v;
          const auto dims = static_cast<std::size_t>(head_dim);
          for (std::size_t i = 0; i < given.size(); ++i) {
            const std::size_t row = i / dims;
            const std::size_t d = i % dims;
            // Sequences of large rows (about 1e30), of small ones (1e-30), of all kinds, of rows with one large
            // element, and of subnormal numbers and zeros.
            constexpr int mixed[] = {100, -100, 60, 98, 0, -126, 100};
            int power = 0;
            if (s == 0) power = 100;
            if (s == 1) power = -100;
            if (s == 2) power = mixed[row % std::size(mixed)];
            if (s == 3) power = 70 + (d == row % dims ? 24 : 0);
            if (s == 4) power = row % 3 == 0 ? -200 : -129;
            given[i] = stored[i] = stored_as(dtype::bf16, std::ldexp(given[i], power));
          }
        }
        num_compared += check_prefill(devices, c, contents, turn);
      }
    }
  }
  CHECK(num_compared > 0);
}

TEST_CASE("K of bfloat16 beside codes gives the bits of the same K in float16") {
  const auto devices = devices_with_prefill();
  if (devices.empty()) return skip(no_kernel);
  std::size_t turn = 0;
  for (const kv_code& code :
       {kv_code{dtype::e4m3, g::layer}, kv_code{dtype::e4m3, g::token_head}, kv_code{dtype::u8, g::token_head}}) {
    for (const std::int32_t head_dim : {64, 96, 128}) {
      ++turn;
      attention_case c = case_of("the same K in both types", head_dim, turn % 2 == 0 ? dtype::f16 : dtype::bf16,
                                 {{150, 400}, {200, 200}, {3, 40}}, turn);
      if (turn % 3 == 1) c.soft_cap = 2;
      const attention_case brain = with_codes(c, {dtype::bf16}, code);
      const attention_case half = with_codes(c, {dtype::f16}, code);
      attention_contents of_brain(brain);
      attention_contents of_half(half);
      for (std::size_t s = 0; s < c.seqs.size(); ++s) {
        std::vector<float>& k = of_brain.seqs[s].k_given;
        for (std::size_t i = 0; i < k.size(); ++i) {
          const int power = static_cast<int>(i / static_cast<std::size_t>(head_dim) % 5) - 3;
          k[i] = std::ldexp(std::clamp(std::round(k[i] * 16), -63.0f, 63.0f), power);
        }
        of_half.seqs[s].k_given = k;
        of_half.seqs[s].q = of_brain.seqs[s].q;
        of_half.seqs[s].v_given = of_brain.seqs[s].v_given;
      }
      for (const tested_backend* tested : devices) {
        attention_output a, b;
        if (!prefill(*tested, brain, of_brain, turn, a)) continue;
        REQUIRE(prefill(*tested, half, of_half, turn, b));
        CAPTURE(describe(brain));
        CHECK(bit_difference(a, b) == "");
      }
    }
  }
}

TEST_CASE("a NaN or an infinity in K or V of 16 bits beside codes spoils what it touches, and nothing else") {
  const auto devices = devices_with_prefill();
  if (devices.empty()) return skip(no_kernel);
  constexpr std::int32_t num_new = 300;
  constexpr std::int32_t length = 500;
  constexpr std::int32_t bad_position = 350;
  constexpr std::int32_t bad_head = 1;
  constexpr std::size_t bad_dim = 5;
  constexpr std::int32_t tile_begin = 256;      // of the keys that share a tile with it
  constexpr std::int32_t row_tile_tokens = 48;  // at most
  std::size_t turn = 0;
  for (const dtype type : {dtype::f16, dtype::bf16}) {
    for (const bool is_k : {true, false}) {
      for (const std::int32_t head_dim : {64, 96, 128}) {
        ++turn;
        attention_case c = case_of("a bad value beside codes", head_dim, turn % 2 == 0 ? dtype::f16 : dtype::bf16,
                                   {{num_new, length}}, turn);
        const kv_code codes[] = {{dtype::e4m3, g::layer}, {dtype::i8, g::token_head}, {dtype::u8, g::token_head}};
        c = with_wide_plane(c, type, is_k, codes[turn % std::size(codes)]);
        attention_contents contents(c);
        const auto dims = static_cast<std::size_t>(head_dim);
        auto& given = is_k ? contents.seqs[0].k_given : contents.seqs[0].v_given;
        const auto at = static_cast<std::size_t>(bad_position * c.num_kv_heads + bad_head) * dims + bad_dim;
        given[at] = 0.0625f;  // not the row's largest: the row's power stays
        for (const tested_backend* tested : devices) {
          attention_output good;
          if (!prefill(*tested, c, contents, 0, good)) continue;
          for (const float value : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                                    -std::numeric_limits<float>::infinity()}) {
            attention_contents poisoned = contents;
            (is_k ? poisoned.seqs[0].k_given : poisoned.seqs[0].v_given)[at] = value;
            attention_output bad;
            REQUIRE(prefill(*tested, c, poisoned, 0, bad));
            std::size_t num_wrong = 0;
            std::size_t row = 0;
            for (std::int32_t t = 0; t < num_new; ++t) {
              for (std::int32_t h = 0; h < c.num_q_heads(); ++h, ++row) {
                const std::int32_t position = length - num_new + t;
                const bool is_head = h / c.group_size == bad_head;
                const bool sees = is_head && position >= bad_position;
                // On tensor cores a NaN in V reaches, in its own dim, rows before it whose row tile has its tile of
                // keys.
                const bool shares = is_head && position > tile_begin - row_tile_tokens;
                for (std::size_t d = 0; d < dims; ++d) {
                  const float* const got = &bad.out[row * dims + d];
                  const bool same = std::memcmp(&good.out[row * dims + d], got, sizeof(float)) == 0;
                  bool right = same;
                  if (is_k && sees) right = std::isnan(value) ? std::isnan(*got) : same || !std::isnan(value);
                  if (!is_k && d == bad_dim && sees) right = !std::isfinite(*got);
                  if (!is_k && d == bad_dim && !sees && shares) right = same || !std::isfinite(*got);
                  num_wrong += right ? 0U : 1U;
                }
              }
            }
            CHECK_MESSAGE(num_wrong == 0, num_wrong, " outputs, ", value, " in ", (is_k ? "K" : "V"), " [", describe(c),
                          "]");
          }
        }
      }
    }
  }
}

TEST_CASE("prefill of more work tiles than SMs over a wide plane beside codes agrees with the oracle") {
  const auto devices = devices_with_prefill();
  if (devices.empty()) return skip(no_kernel);
  std::size_t turn = 0;
  std::size_t num_compared = 0;
  for (const bool is_k : {true, false}) {
    for (const dtype type : {dtype::f16, dtype::bf16}) {
      ++turn;
      // Four tiles each, and several hundred row tiles: CTAs take one after another.
      attention_case c = case_of("more work tiles than SMs", turn % 2 == 0 ? 96 : 128, dtype::bf16,
                                 std::vector<batch_seq>(9, {70, 400}), turn);
      c.num_kv_heads = 8;
      c = with_wide_plane(c, type, is_k, {dtype::e4m3, turn == 3 ? g::layer : g::token_head});
      const attention_contents contents(c);
      num_compared += check_prefill(devices, c, contents, turn);
    }
  }
  CHECK(num_compared > 0);
}

TEST_CASE("a plan shares out steps of a wide plane beside codes, and they agree with the oracle") {
  const auto devices = devices_with_prefill();
  if (devices.empty()) return skip(no_kernel);
  std::size_t turn = 0;
  for (const bool is_k : {true, false}) {
    for (const dtype type : {dtype::f16, dtype::bf16}) {
      for (const std::int32_t head_dim : {64, 96, 128, 256}) {
        attention_case c = case_of("several new tokens", head_dim, dtype::bf16,
                                   {{5, 500}, {64, 200}, {70, 300}, {1, 333}, {2, 2}, {130, 130}}, ++turn);
        c.aligned = turn % 3 != 0;
        c.deterministic = turn % 4 == 0;
        const std::string problem = check_attention(
            with_wide_plane(c, type, is_k, {dtype::e4m3, turn % 2 == 0 ? g::token_head : g::layer}), devices, turn);
        CHECK_MESSAGE(problem.empty(), problem);
      }
    }
  }
}

}  // namespace

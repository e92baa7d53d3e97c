// SPDX-License-Identifier: Apache-2.0
// What an attention kernel must get right, one axis at a time, on every ISA and device.
#include <doctest/doctest.h>

#include "conformance/attention_tables.hpp"
#include "support/sanitized.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

/// Every n-th case.
std::vector<attention_case> every(std::size_t n, const std::vector<attention_case>& cases) {
  std::vector<attention_case> chosen;
  for (std::size_t i = 0; i < cases.size(); i += n) chosen.push_back(cases[i]);
  return chosen;
}

void check_all(const std::vector<attention_case>& cases) {
  for (std::size_t n = 0; n < cases.size(); n += BIFOLIO_CASE_STEP * sanitized_stride(2)) {
    const std::string problem = check_attention(cases[n], n);
    CHECK_MESSAGE(problem.empty(), problem);
  }
}

}  // namespace

TEST_CASE("one token attends to itself and returns its value bit for bit") {
  for (const dtype type : dtypes) {
    const attention_case c{.what = "one token", .q_type = type, .kv_type = type, .out_type = type, .seqs = {{1, 1}}};
    const attention_contents contents(c);
    for (const tested_backend* tested : one_per_family(0)) {
      const attention_output got = run_attention(*tested, c, contents);
      for (std::size_t h = 0; h < 4; ++h) {
        for (std::size_t i = 0; i < 64; ++i) {
          REQUIRE_MESSAGE(got.out[h * 64 + i] == contents.seqs[0].v[h / 2 * 64 + i], tested->name);
        }
      }
    }
  }
}

TEST_CASE("decode agrees with the oracle") { check_all(decode_cases()); }

TEST_CASE("prefill and chunked prefill agree with the oracle") { check_all(prefill_cases()); }

TEST_CASE("sequences without queries or without keys cost nothing and disturb nobody") { check_all(empty_cases()); }

TEST_CASE("every head_dim agrees with the oracle") { check_all(head_dim_cases()); }

TEST_CASE("V of another head_dim than K, or part of K, agrees with the oracle in every layout and with every option") {
  check_all(plane_cases());
}

TEST_CASE("every block_size agrees with the oracle") { check_all(block_size_cases()); }

TEST_CASE("every number of query heads per KV head agrees with the oracle") { check_all(group_cases()); }

TEST_CASE("every length agrees with the oracle") { check_all(length_cases()); }

TEST_CASE("every pairing of q, KV and output dtypes agrees with the oracle") { check_all(dtype_cases()); }

TEST_CASE("every layout agrees with the oracle") { check_all(layout_cases()); }

TEST_CASE("every option, alone, agrees with the oracle") { check_all(option_cases()); }

TEST_CASE("extreme values agree with the oracle") { check_all(value_cases()); }

TEST_CASE("V may be K's memory") {
  for (const arrangement layout : all_arrangements) {
    for (const dtype type : dtypes) {
      attention_case c{.what = "V is K",
                       .q_type = type,
                       .kv_type = type,
                       .out_type = type,
                       .layout = layout,
                       .seqs = {{1, 70}, {200, 210}, {1, 1}, {20, 20}, {1, 600}}};
      attention_contents contents(c);
      for (attention_contents::sequence& seq : contents.seqs) seq.v = seq.k;
      const attention_expectation expectation(c, contents);
      for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type))) {
        attention_call call(*tested, c, contents, {{1, 0, 0}, 0, 0, 0, 0, 0, 0, 0});
        call.params.kv.v = call.params.kv.k;
        call.params.kv.layout.v = call.params.kv.layout.k;
        call.plan();
        const std::optional<error> refusal = find_problem(call.planned, call.params);
        CHECK_MESSAGE(!refusal.has_value(), tested->name, ": ", refusal->what());
        if (call.run() != errc::ok) continue;
        std::string problem;
        const attention_output got = call.read(problem);
        problem += expectation.problem_of(got, tested->numbers_for(type, type, type, c.head_dim));
        CHECK_MESSAGE(problem.empty(), tested->name, ": ", problem, " [", describe(c), "]");
      }
    }
  }
}

TEST_CASE("the scale may be negative or 0 for shapes of the tensor-core kernels too") {
  for (const dtype type : dtypes) {
    for (const std::int32_t head_dim : {64, 128}) {
      for (const bool negative : {true, false}) {
        // Scores of this scale are all 0 in float32, as with a scale of 0.
        const attention_case c{.what = negative ? "negative scale" : "scale 0",
                               .head_dim = head_dim,
                               .q_type = type,
                               .kv_type = type,
                               .out_type = type,
                               .seqs = {{300, 300}, {1, 200}, {130, 400}},
                               .scale = negative ? -0.7f : 1e-38f};
        const attention_contents contents(c);
        const attention_expectation expectation(c, contents);
        for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type))) {
          attention_call call(*tested, c, contents, {{1, 0, 0}, 0, 0, 0, 0, 0, 0, 0});
          if (!negative) call.params.scale = 0;
          call.plan();
          REQUIRE(call.run() == errc::ok);
          std::string problem;
          const attention_output got = call.read(problem);
          problem += expectation.problem_of(got, tested->numbers_for(type, type, type, head_dim));
          CHECK_MESSAGE(problem.empty(), tested->name, ": ", problem, " [", describe(c), "]");
        }
      }
    }
  }
}

TEST_CASE("every implementation, forced by name, agrees with the oracle or says why it declines") {
  std::vector<attention_case> cases;
  for (const std::vector<attention_case>& table :
       {every(2, decode_cases()), every(2, prefill_cases()), every(3, layout_cases()),
        every(5, half_precision_option_cases()), every(9, half_precision_shape_cases()), every(7, x_split_cases())}) {
    cases.insert(cases.end(), table.begin(), table.end());
  }
  cases = every(BIFOLIO_CASE_STEP, cases);
  struct record {
    const tested_backend* tested;
    std::string name;
    std::size_t num_served = 0;
    std::string reason{};  // why it declined a case
  };
  std::vector<record> records;
  for (const tested_backend* tested : one_per_family(1)) {
    for (const std::string& name : tested->get().explain({})) records.push_back({tested, name});
  }
  for (std::size_t n = 0; n < cases.size(); ++n) {
    const attention_case& c = cases[n];
    const attention_contents contents(c);
    const attention_expectation expected(c, contents);
    for (record& r : records) {
      const tested_backend& tested = *r.tested;
      attention_call call(tested, c, contents, placement_in_turn(c, n));
      call.spec.implementation = r.name;
      try {
        call.plan();
      } catch (const error& refused) {
        REQUIRE_MESSAGE(refused.code() == errc::unsupported, tested.name, ": ", refused.what());
        CHECK_MESSAGE(std::string(refused.what()).find(r.name) != std::string::npos, refused.what());
        r.reason = refused.what();
        continue;
      }
      const errc code = call.run();
      if (code == errc::unsupported) {
        CHECK_MESSAGE(call.untouched(), tested.name, ", ", r.name, " [", describe(c), "]");
        r.reason = "the strides, alignment or options of the calls";
        continue;
      }
      REQUIRE_MESSAGE(code == errc::ok, tested.name, ", ", r.name, " [", describe(c), "]");
      ++r.num_served;
      std::string problem;
      const attention_output got = call.read(problem);
      problem += expected.problem_of(got, tested.numbers_for(c.q_type, c.kv_type, c.out_type, c.head_dim));
      CHECK_MESSAGE(problem.empty(), tested.name, ", ", r.name, ": ", problem, " [", describe(c), "]");
    }
  }
  for (std::size_t i = 0; i < records.size(); ++i) {
    const record& r = records[i];
    const bool is_last = i + 1 == records.size() || records[i + 1].tested != r.tested;
    if (is_last) CHECK_MESSAGE(r.num_served == cases.size(), r.tested->name, ": ", r.reason);
    // An implementation that this device cannot run is skipped by its reason.
    if (r.num_served == 0) MESSAGE(r.tested->name, " never took ", r.name, ": ", r.reason);
    CHECK((r.num_served > 0 || !r.reason.empty()));
  }
}

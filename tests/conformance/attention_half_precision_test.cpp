// SPDX-License-Identifier: Apache-2.0
// The shapes, layouts and alignments that GPUs have kernels of their own for: f16 and bf16 of head_dim 64, 128 and 256,
// and x_split. On a machine without such a device the CPU computes a part of the cases.
#include <doctest/doctest.h>

#include <algorithm>

#include "conformance/attention_tables.hpp"
#include "support/sanitized.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

void check_for_devices(const std::vector<attention_case>& cases) {
  const bool all = std::ranges::any_of(all_backends(), [](const tested_backend& tested) { return !tested.is_host; });
  const std::size_t step = all ? 1 : 11 * sanitized_stride(3);
  for (std::size_t n = 0; n < cases.size(); n += step) {
    const std::string problem = check_attention(cases[n], n / step);
    CHECK_MESSAGE(problem.empty(), problem);
  }
}

void check_prefill_borders(dtype type) {
  std::vector<attention_case> cases = prefill_border_cases();
  std::erase_if(cases, [type](const attention_case& c) { return c.q_type != type; });
  std::vector<const tested_backend*> with_prefill;
  for (const tested_backend& tested : all_backends()) {
    const std::vector<std::string> said = tested.get().explain({});
    if (!tested.is_host && !said.empty() && said[0] == "prefill") with_prefill.push_back(&tested);
  }
  if (with_prefill.empty()) return check_for_devices(cases);
  for (std::size_t n = 0; n < cases.size(); ++n) {
    const attention_case& c = cases[n];
    CAPTURE(describe(c));
    const attention_contents contents(c);
    const attention_expectation expected(c, contents);
    for (const tested_backend* tested : with_prefill) {
      attention_call call(*tested, c, contents, placement_in_turn(c, n));
      call.spec.implementation = "prefill";
      try {
        call.plan();
      } catch (const error& refused) {
        // Only a device that has no such kernel may refuse.
        CHECK_MESSAGE(std::string(refused.what()).find("compute capability") != std::string::npos, refused.what());
        continue;
      }
      REQUIRE(call.run() == errc::ok);
      std::string problem;
      const attention_output got = call.read(problem);
      problem += expected.problem_of(got, tested->numbers_for(c.q_type, c.kv_type, c.out_type, c.head_dim));
      CHECK_MESSAGE(problem.empty(), problem);
    }
  }
}

}  // namespace

TEST_CASE("every option, alone, agrees with the oracle in 16-bit types of the usual head sizes") {
  check_for_devices(half_precision_option_cases());
}

TEST_CASE("extreme values agree with the oracle in 16-bit types of the usual head sizes") {
  check_for_devices(half_precision_value_cases());
}

TEST_CASE("every length agrees with the oracle in 16-bit types of the usual head sizes") {
  check_for_devices(half_precision_length_cases());
}

TEST_CASE("every block size, group, layout and mixed dtype agrees with the oracle in 16-bit types") {
  check_for_devices(half_precision_shape_cases());
}

TEST_CASE("every multiple of 8 as head_dim, and float32, agree with the oracle") {
  check_for_devices(padded_head_dim_cases());
}

TEST_CASE("prompts in deterministic plans agree with the oracle in every type and compiled width") {
  check_for_devices(deterministic_prompt_cases());
}

TEST_CASE("batches of equal lengths agree with the oracle in 16-bit types") {
  check_for_devices(half_precision_batch_cases());
}

TEST_CASE("windows and transforms of logits at the borders of tiles agree with the oracle in 16-bit types") {
  check_for_devices(half_precision_transform_cases());
}

// A test case for each type, so that they can run side by side.
TEST_CASE("the prefill kernel, forced, agrees with the oracle on both sides of every border in f16") {
  check_prefill_borders(dtype::f16);
}

TEST_CASE("the prefill kernel, forced, agrees with the oracle on both sides of every border in bf16") {
  check_prefill_borders(dtype::bf16);
}

TEST_CASE("the prefill kernel, forced, agrees with the oracle on both sides of every border in f32") {
  check_prefill_borders(dtype::f32);
}

TEST_CASE("the x_split layout agrees with the oracle at every shape and launch of its decode kernel") {
  check_for_devices(x_split_cases());
}

TEST_CASE("a decode over x_split has the same bits whether its partitions share a CTA or not") {
  // On a GPU a small batch shares out the partitions of 512 positions (v2). A large one does not (v1): its 1280 thread
  // blocks keep up to 350 SMs busy.
  for (const dtype type : dtypes) {
    attention_case few{.what = "x_split in a small batch",
                       .num_kv_heads = 8,
                       .group_size = 4,
                       .head_dim = 128,
                       .q_type = type,
                       .kv_type = type,
                       .out_type = type,
                       .layout = arrangement::x_split,
                       .seqs = {{1, 1100, 0}, {1, 700, 1}},
                       .alibi = true,
                       .sinks = true,
                       .aligned = true};
    attention_case many = few;
    many.what = "x_split in a large batch";
    for (std::int32_t n = 2; n < 160; ++n) many.seqs.push_back({1, 1 + n % 9, n});
    const attention_contents few_contents(few);
    const attention_contents many_contents(many);
    for (const tested_backend* tested : one_per_family(static_cast<std::size_t>(type))) {
      CAPTURE(tested->name);
      const auto run = [&](const attention_case& c, const attention_contents& contents, std::string& kernel) {
        attention_call call(*tested, c, contents, {{c.seed, 0, 0}, 0, 0, 0, 0});
        call.plan();
        REQUIRE(call.run() == errc::ok);
        kernel = tested->get().describe(call.planned, call.params).at(0);
        std::string problem;
        attention_output output = call.read(problem);
        CHECK_MESSAGE(problem.empty(), problem);
        return output;
      };
      std::string kernel_of_few;
      std::string kernel_of_many;
      const attention_output alone = run(few, few_contents, kernel_of_few);
      attention_output together = run(many, many_contents, kernel_of_many);
      together.out.resize(alone.out.size());
      together.lse.resize(alone.lse.size());
      const std::string difference = bit_difference(alone, together);
      CHECK_MESSAGE(difference.empty(), difference);
      if (!tested->is_host) {
        CHECK(kernel_of_few.ends_with("v2"));
        CHECK(kernel_of_many.ends_with("v1"));
      }
    }
  }
}

// SPDX-License-Identifier: Apache-2.0
// The shapes, layouts and alignments that GPUs have kernels of their own for: f16 and bf16 of head_dim 64, 128 and 256,
// and x_split. On a machine without such a device the CPU computes a part of the cases.
#include <doctest/doctest.h>

#include <algorithm>

#include "conformance/attention_tables.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

void check_for_devices(const std::vector<attention_case>& cases) {
  const bool all = std::ranges::any_of(all_backends(), [](const tested_backend& tested) { return !tested.is_host; });
  const std::size_t step = all ? 1 : 11;
  for (std::size_t n = 0; n < cases.size(); n += step) {
    const std::string problem = check_attention(cases[n], n / step);
    CHECK_MESSAGE(problem.empty(), problem);
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

TEST_CASE("the x_split layout agrees with the oracle at every shape and launch of its decode kernel") {
  check_for_devices(x_split_cases());
}

// SPDX-License-Identifier: Apache-2.0
// Everything with everything: pairs of all axes, and random combinations.
#include <doctest/doctest.h>

#include "conformance/attention_tables.hpp"
#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::test;

TEST_CASE("every pair of shapes, dtypes, layouts, batches and options agrees with the oracle") {
  const std::vector<attention_case> cases = covering_cases(test_seed());
  for (std::size_t n = 0; n < cases.size(); ++n) {
    const std::string problem = check_attention(cases[n], n);
    CHECK_MESSAGE(problem.empty(), problem);
  }
}

TEST_CASE("random combinations of everything agree with the oracle") {
  const std::vector<attention_case> cases = random_cases(test_seed(), 120);
  for (std::size_t n = 0; n < cases.size(); ++n) {
    const std::string problem = check_attention(cases[n], n);
    CHECK_MESSAGE(problem.empty(), problem);
  }
}

TEST_CASE("random combinations of everything with planes of any head_dim agree with the oracle") {
  const std::vector<attention_case> cases = random_plane_cases(test_seed(), 60);
  for (std::size_t n = 0; n < cases.size(); ++n) {
    const std::string problem = check_attention(cases[n], n);
    CHECK_MESSAGE(problem.empty(), problem);
  }
}

TEST_CASE("random batches in 16-bit types of the usual head sizes agree with the oracle") {
  const std::vector<attention_case> cases = half_precision_cases(test_seed(), 60);
  for (std::size_t n = 0; n < cases.size(); ++n) {
    const std::string problem = check_attention(cases[n], n);
    CHECK_MESSAGE(problem.empty(), problem);
  }
}

TEST_CASE("random cases with steep ALiBi slopes stay within the bound") {
  const std::vector<attention_case> cases = steep_cases(test_seed(), 400);
  for (std::size_t n = 0; n < cases.size(); ++n) {
    const std::string problem = check_attention(cases[n], n);
    CHECK_MESSAGE(problem.empty(), problem);
  }
}

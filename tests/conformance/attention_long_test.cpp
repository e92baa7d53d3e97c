// SPDX-License-Identifier: Apache-2.0
// Contexts and numbers of cases that take minutes.
#include <doctest/doctest.h>

#include "conformance/attention_tables.hpp"
#include "support/random.hpp"

using namespace bifolio;
using namespace bifolio::test;

TEST_CASE("the error bound holds over 16 k and 128 k keys") {
  const std::vector<attention_case> cases = long_cases(test_seed());
  for (std::size_t n = 0; n < cases.size(); ++n) {
    const std::string problem = check_attention(cases[n], n);
    CHECK_MESSAGE(problem.empty(), problem);
  }
}

TEST_CASE("many random combinations of everything agree with the oracle") {
  for (std::uint64_t round = 1; round <= 4; ++round) {
    const std::vector<attention_case> cases = random_cases(test_seed() + round, 400);
    for (std::size_t n = 0; n < cases.size(); ++n) {
      const std::string problem = check_attention(cases[n], n);
      CHECK_MESSAGE(problem.empty(), problem);
    }
  }
}

TEST_CASE("many random batches in 16-bit types agree with the oracle") {
  for (std::uint64_t round = 1; round <= 4; ++round) {
    const std::vector<attention_case> cases = half_precision_cases(test_seed() + round, 150);
    for (std::size_t n = 0; n < cases.size(); ++n) {
      const std::string problem = check_attention(cases[n], n);
      CHECK_MESSAGE(problem.empty(), problem);
    }
  }
}

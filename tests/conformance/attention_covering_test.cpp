// SPDX-License-Identifier: Apache-2.0
// Everything with everything: pairs of all axes, and random combinations.
#include <doctest/doctest.h>

#include "conformance/attention_tables.hpp"
#include "support/random.hpp"
#include "support/sanitized.hpp"

using namespace bifolio;
using namespace bifolio::test;

namespace {

void check_all(const std::vector<attention_case>& cases) {
  for (std::size_t n = 0; n < cases.size(); n += sanitized_stride(3)) {
    const std::string problem = check_attention(cases[n], n);
    CHECK_MESSAGE(problem.empty(), problem);
  }
}

int times_runs(int everyday) { return everyday * static_cast<int>(num_test_runs()); }

}  // namespace

TEST_CASE("every pair of shapes, dtypes, layouts, batches and options agrees with the oracle") {
  check_all(covering_cases(test_seed()));
}

TEST_CASE("random combinations of everything agree with the oracle") {
  check_all(random_cases(test_seed(), times_runs(120)));
}

TEST_CASE("random combinations of everything with planes of any head_dim agree with the oracle") {
  check_all(random_plane_cases(test_seed(), times_runs(60)));
}

TEST_CASE("random batches in 16-bit types of the usual head sizes agree with the oracle") {
  check_all(half_precision_cases(test_seed(), times_runs(60)));
}

TEST_CASE("random cases with steep ALiBi slopes stay within the bound") { check_all(steep_cases(test_seed(), 400)); }

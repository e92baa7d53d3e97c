// SPDX-License-Identifier: Apache-2.0
// Skips one case and passes or fails another; the tests of this folder look at the exit code.
#include <doctest/doctest.h>

#include <cstdlib>

#include "support/skip.hpp"

TEST_CASE("a case that cannot run here") { return bifolio::test::skip("to see that it is said"); }

TEST_CASE("a case that fails when BIFOLIO_PROBE_FAILS is set") { CHECK(std::getenv("BIFOLIO_PROBE_FAILS") == nullptr); }

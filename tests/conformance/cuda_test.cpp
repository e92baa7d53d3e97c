// SPDX-License-Identifier: Apache-2.0
// Says whether the suite ran on a CUDA device. The cases themselves are those of every backend.
#include <doctest/doctest.h>

#include "support/backends.hpp"
#include "support/skip.hpp"

using namespace bifolio;
using namespace bifolio::test;

TEST_CASE("the CUDA backend is among the backends under test") {
  for (const tested_backend& tested : all_backends()) {
    if (tested.get().where().type != device_type::cuda) continue;
    MESSAGE(tested.get().description());
    CHECK(tested.get().health() == errc::ok);
    return;
  }
  skip("no CUDA backend here: not in this build, or no device");
}

// SPDX-License-Identifier: Apache-2.0
#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include <cstdio>

#include "support/skip.hpp"

namespace bifolio::test {
namespace {

int skips = 0;

}  // namespace

void skip(std::string_view reason) {
  ++skips;
  std::printf("SKIPPED: %.*s\n", static_cast<int>(reason.size()), reason.data());
  std::fflush(stdout);
}

int num_skips() noexcept { return skips; }

}  // namespace bifolio::test

int main(int argc, char** argv) {
  constexpr int skipped = 77;  // BIFOLIO_SKIP_RETURN_CODE of cmake/BifolioTests.cmake
  doctest::Context context(argc, argv);
  const int result = context.run();
  if (context.shouldExit() || result != 0) return result;
  return bifolio::test::num_skips() > 0 ? skipped : 0;
}

// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <cstdlib>

#include "fuzz_target.hpp"

namespace bifolio::fuzz {

void flaw(std::string_view what) {
  std::fprintf(stderr, "flaw: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}

}  // namespace bifolio::fuzz

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The examples say what they expect, and end with exit code 1 when it is not so.

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

/// `line` is the caller's; the builtin, because Clang 14 has no std::source_location.
inline void expect(bool holds, const char* what, int line = __builtin_LINE()) {
  if (!holds) throw std::runtime_error("line " + std::to_string(line) + ": expected that " + what);
}

inline int run_example(void (*run)()) {
  try {
    run();
    return 0;
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
  }
}

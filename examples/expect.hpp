// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The examples say what they expect, and stop when it is not so.

#include <source_location>
#include <stdexcept>
#include <string>

inline void expect(bool holds, const char* what, std::source_location where = std::source_location::current()) {
  if (!holds) throw std::runtime_error("line " + std::to_string(where.line()) + ": expected that " + what);
}

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bifolio/c/bifolio.h>
#include <doctest/doctest.h>

#include <cstddef>
#include <string>

namespace bifolio::test {

inline std::string last_error() { return bifolio_last_error(); }

/// A struct as its _init function fills it.
template <class Struct>
Struct made(bifolio_status (*init)(Struct*, std::size_t)) {
  Struct result;
  REQUIRE(init(&result, sizeof result) == BIFOLIO_OK);
  return result;
}

}  // namespace bifolio::test

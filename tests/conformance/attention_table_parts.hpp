// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What several tables of cases are made of.

#include <functional>
#include <vector>

#include "conformance/attention_case.hpp"

namespace bifolio::test {

/// Decodes, a chunk and a prefill, short enough for the oracle.
[[nodiscard]] std::vector<batch_seq> usual_batch();

struct named_option {
  const char* name;
  std::function<void(attention_case&)> apply;
};

/// Each option alone, and all at once.
[[nodiscard]] std::vector<named_option> all_options();

}  // namespace bifolio::test

// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "report.hpp"

namespace bifolio::bench {

struct prefix_rows_options {
  std::int64_t blocks;
  std::int32_t block_size;
  std::int32_t rounds;
  std::uint64_t seed;
  double latency_ns;  ///< of memory
};

/// What the prefix cache costs: keys, publishing, look-ups, allocation by eviction, bytes. A pool full of cached
/// chains.
void add_prefix_rows(const prefix_rows_options& options, report& out);

}  // namespace bifolio::bench

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What one access to memory costs here that no cache answers: the unit of what the cache logic does at random places.

#include <cstdint>

namespace bifolio::bench {

/// Nanoseconds from one load to the next, each at a place that the one before it named: all cache lines of `num_bytes`
/// in a random cycle, in memory as the block pool has it (with its pages). The median of several passes, in CPU time of
/// the thread.
[[nodiscard]] double memory_latency_ns(std::int64_t num_bytes, std::uint64_t seed);

}  // namespace bifolio::bench

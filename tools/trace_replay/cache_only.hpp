// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The library's prefix cache alone on a trace: no scheduler, no time, a pool whose blocks are the trace's.
///
/// Requests come one after another in the order of the file, and each ends before the next begins. The ids of a request
/// are looked up from the first to the first that is not cached; the hits are pinned; for the rest blocks are allocated
/// from the pool, which evicts by the policy; then all blocks are released, the last one first.
/// Every id counts, that of a partly filled last block too, unless `full_blocks_only`.
///
/// In the usual trace an id identifies everything before it as well, so blocks are published as a chain of one-token
/// blocks whose tokens are the ids. In a trace where that does not hold each id identifies itself, and ids that are
/// cached after the first miss are dropped and computed again.

#include <cstdint>

#include "eviction.hpp"
#include "measurements.hpp"
#include "progress.hpp"
#include "trace.hpp"

namespace trace_replay {

struct cache_only_options {
  std::int64_t num_blocks = 0;  ///< 0: as many as there are different ids
  policy_kind policy = policy_kind::lru;
  std::int64_t num_kept = 1;  ///< see make_policy
  bool full_blocks_only = false;
  std::int64_t trace_block_size = 512;  ///< tokens of an id's block
};

struct cache_only_result {
  std::int64_t num_blocks = 0;
  std::int64_t num_requests = 0;
  std::int64_t num_refused = 0;  ///< larger than the whole pool; looked up, not kept
  std::int64_t lookups = 0;      ///< ids
  std::int64_t hits = 0;
  std::int64_t evictions = 0;
  std::int64_t cached_blocks = 0;  ///< at the end
  double wall_seconds = 0;
  timeline over_time;
};

/// Throws `input_error` for a trace without ids or a pool that cannot be made, `bifolio::error`.
[[nodiscard]] cache_only_result replay_cache(const trace& what, const cache_only_options& options,
                                             progress_bar& progress);

}  // namespace trace_replay

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Counters as plain structs; each is one consistent snapshot of its owner.

#include <cstdint>

namespace bifolio::inline v0_2 {

/// Of a `kv_cache_manager`.
struct cache_stats {
  std::int64_t num_blocks = 0;
  std::int64_t num_free_blocks = 0;
  std::int64_t num_used_blocks = 0;   ///< = num_blocks − num_free_blocks
  std::int64_t peak_used_blocks = 0;  ///< since construction
  std::int64_t num_sequences = 0;     ///< open now
  std::int64_t num_tokens = 0;        ///< Σ over open sequences of tokens with slots, shared ones counted each time
  std::int64_t num_table_entries =
      0;  ///< Σ over open sequences of blocks in use; minus num_used_blocks = blocks saved by sharing
  std::int64_t num_allocated_blocks = 0;  ///< blocks taken since construction
  std::int64_t num_copied_blocks = 0;     ///< copy-on-write pairs since construction
  std::int64_t num_forks = 0;             ///< since construction
  std::int64_t num_host_blocks = 0;
  std::int64_t num_free_host_blocks = 0;
  std::int64_t num_swapped_sequences = 0;   ///< swapped out now; counted in num_sequences and num_tokens too
  std::int64_t num_swapped_out_blocks = 0;  ///< copied since construction
  std::int64_t num_swapped_in_blocks = 0;   ///< copied since construction
  friend constexpr bool operator==(const cache_stats&, const cache_stats&) = default;
};

/// Of a `prefix_cache`. Blocks are full blocks.
struct prefix_stats {
  std::int64_t num_lookups = 0;           ///< prompts looked up
  std::int64_t num_looked_up_blocks = 0;  ///< full blocks of those prompts
  std::int64_t num_hit_blocks = 0;        ///< of these, found
  std::int64_t num_published_blocks = 0;  ///< registered, duplicates not included
  std::int64_t num_duplicate_blocks = 0;  ///< computed although their contents were cached
  std::int64_t num_evicted_blocks = 0;    ///< contents lost because their block was handed out
  std::int64_t num_cached_blocks = 0;     ///< registered now
  friend constexpr bool operator==(const prefix_stats&, const prefix_stats&) = default;
};

/// Of a `scheduler`. Counters count since construction unless they say "now".
struct scheduler_stats {
  std::int64_t num_waiting = 0;           ///< now: sequences without blocks, preempted ones included
  std::int64_t num_running = 0;           ///< now: sequences with blocks of the device
  std::int64_t num_swapped = 0;           ///< now: sequences with blocks of the host
  std::int64_t num_steps = 0;             ///< committed
  std::int64_t num_scheduled_tokens = 0;  ///< computed in committed steps, recomputation included
  std::int64_t num_cached_tokens = 0;     ///< found in the prefix cache instead of being computed
  std::int64_t num_sampled_tokens = 0;    ///< appended to outputs
  std::int64_t num_draft_tokens = 0;      ///< computed as drafts
  std::int64_t num_accepted_drafts = 0;   ///< of these, kept
  std::int64_t num_preemptions = 0;       ///< of sequences, by recomputation or swapping
  std::int64_t num_swap_outs = 0;         ///< of these, by swapping
  std::int64_t num_swap_ins = 0;          ///< sequences that came back
  std::int64_t num_failed_swaps = 0;      ///< sequences computed again because their copies failed
  std::int64_t num_finished = 0;          ///< sequences that ended by length or by a stop of the caller
  std::int64_t num_aborted = 0;           ///< sequences that ended by `abort`
  friend constexpr bool operator==(const scheduler_stats&, const scheduler_stats&) = default;
};

}  // namespace bifolio::inline v0_2

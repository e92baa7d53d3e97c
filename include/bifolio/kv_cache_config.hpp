// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The configuration of a `kv_cache_manager`, and what its calls return.

#include <bifolio/content_key.hpp>
#include <bifolio/error.hpp>
#include <bifolio/eviction_policy.hpp>
#include <bifolio/layer_groups.hpp>
#include <bifolio/memory_resource.hpp>
#include <bifolio/prefix_cache.hpp>
#include <bifolio/step.hpp>
#include <bifolio/types.hpp>
#include <cstdint>
#include <optional>
#include <vector>

namespace bifolio::inline v0_2 {

class copy_audit;  // bifolio/copy_audit.hpp

struct prefix_caching_options {
  bool enabled = false;
  std::optional<hash_seed> seed{};          ///< default: a random one; set it to replay recorded plans
  std::int32_t key_bits = 128;              ///< fewer only to test collisions
  bool record_events = false;               ///< for `drain_events`
  bool record_tokens = false;               ///< with record_events: also `stored_contents`
  cache_event_hook hook{};                  ///< told of each event of the first group; needs no record_events
  const eviction_policy* policy = nullptr;  ///< borrowed; default: priority_policy()
  /// A sequence that computed a block which is cached already replaces its own block by the cached one. Off, tables
  /// only ever grow at their end.
  bool deduplicate = false;
};

struct kv_cache_config {
  std::int32_t block_size = 16;     ///< tokens, ≥ 1
  std::int64_t num_blocks = 0;      ///< 1 … max_num_blocks; see num_blocks_for_memory (cache_engine.hpp)
  double watermark = 0.01;          ///< fraction of the blocks that admission leaves free for growth, in [0, 1)
  std::int32_t sliding_window = 0;  ///< tokens that a token attends to, itself included; 0 = all
  /// Sequences open at once, 1 … 2^24; 152 bytes each, with prefix caching 56 + 4 · block_size more.
  std::int32_t max_sequences = 1024;
  std::int32_t max_seq_len = 1 << 20;  ///< tokens of one sequence, 1 … 2^30
  /// Written to table entries that no kernel reads: right of the length, and left of the sliding window.
  std::int32_t table_padding = padding_entry;
  /// Generation of the first handle. Two managers with different numbers do not take each other's handles for their
  /// own. 0: a number that no other manager of the process has. Set it to replay recorded plans.
  std::uint32_t first_generation = 0;
  prefix_caching_options prefix{};
  std::int64_t num_host_blocks = 0;   ///< for sequences that are swapped out, 0 … max_num_blocks
  memory_resource* memory = nullptr;  ///< for records and tables, borrowed; default: default_host_memory()
  copy_audit* audit = nullptr;        ///< for debugging, borrowed; see copy_audit.hpp
  /// Layer groups, at most max_layer_groups. Empty: one, described by the fields above. Else block_size, num_blocks,
  /// sliding_window and num_host_blocks above are those of the first group, whatever they were set to, and the
  /// watermark is the same fraction of each pool. The first group is full or window; with prefix caching and more than
  /// one group it is full. (A model without full attention gives it blocks of 0 bytes: it is then an index of texts.)
  std::vector<group_config> groups{};
};

struct allocate_result {
  seq_id seq = invalid_seq;  ///< valid if ok
  alloc_status status = alloc_status::later;
};

struct append_result {
  alloc_status status = alloc_status::later;
  /// Of the first group (`kv_cache_manager::drain_copies` has those of others): carry it out before the new slots are
  /// written; src is invalid_block when there is none.
  block_copy copy{};
  [[nodiscard]] bool has_copy() const noexcept { return copy.src != invalid_block; }
};

struct open_result {
  seq_id seq = invalid_seq;  ///< valid if ok
  alloc_status status = alloc_status::later;
  std::int64_t num_cached_tokens = 0;  ///< leading tokens found in the cache, committed; < the prompt's length
  block_copy copy{};  ///< as in `append_result`: a prompt cached to its very end shares all blocks but the last
  /// Tokens of the encoder's output whose K and V were found: all or 0. Else the first step stores them.
  std::int64_t num_cached_cross_tokens = 0;
  [[nodiscard]] bool has_copy() const noexcept { return copy.src != invalid_block; }
};

struct admission {
  alloc_status status = alloc_status::later;
  std::int64_t num_cached_tokens = 0;
};

/// A call that is planned; see `kv_cache_manager::reserve_host_memory`.
struct host_demand {
  seq_id seq = invalid_seq;     ///< an open sequence, or invalid_seq for one that allocate or fork will open
  std::int64_t num_tokens = 0;  ///< its tokens after that, lookahead included
};

}  // namespace bifolio::inline v0_2

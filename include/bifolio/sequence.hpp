// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What the manager keeps of one sequence: how many tokens have slots, how many of those are computed, and the block
/// table. It owns nothing by itself; `kv_cache_manager` keeps the invariants.

#include <bifolio/block_table.hpp>
#include <cstdint>

namespace bifolio {

/// Two cache lines; an append in place touches the first alone, and a sequence of up to 23 blocks has nothing else.
struct alignas(64) sequence {
  std::uint32_t generation;    ///< odd while the sequence is open, even while the record is free
  std::int32_t num_tokens;     ///< tokens with slots; while the record is free: the next free record
  std::int32_t num_committed;  ///< leading tokens whose K and V are final, ≤ num_tokens
  bool tail_may_be_shared;     ///< false: the block of position num_tokens has no other user, no need to look
  block_table table;           ///< covers num_tokens and reserved lookahead slots
};
static_assert(sizeof(sequence) == 128);

}  // namespace bifolio

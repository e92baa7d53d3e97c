// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace bifolio::inline v0_2::detail {

/// What the manager keeps of a sequence next to its block table: how many tokens have slots, how many of those are
/// computed, and up to which position it may write.
///
/// 16 bytes, all that an append in place touches. The block tables are in an array of their own, so that the records of
/// 100,000 sequences take 1.6 MB. With the table in the record, appends in place in random order took 22 ns instead of
/// 3.4 (`bifolio_bench manager` on a busy Zen 5 machine, 2026-11-20).
struct sequence {
  std::uint32_t generation;    ///< odd while the sequence is open, even while the record is free
  std::int32_t num_tokens;     ///< tokens with slots; while the record is free: the next free record
  std::int32_t num_committed;  ///< leading tokens whose K and V are final, ≤ num_tokens
  /// The slots of positions from num_tokens up to here are the sequence's own. 0: the block of the next position may
  /// have other users, which an append must check. −1: swapped out; the table names host blocks.
  std::int32_t writable_end;
};
static_assert(sizeof(sequence) == 16);

}  // namespace bifolio::inline v0_2::detail

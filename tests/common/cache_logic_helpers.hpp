// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Small words for tests of pool, prefix cache and manager.

#include <doctest/doctest.h>

#include <algorithm>
#include <bifolio/kv_cache_manager.hpp>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace bifolio::test {

/// The code that `call` is refused with, in a sentence and not a word; `ok` when it is not.
template <class Call>
errc code_of(Call call) {
  try {
    call();
  } catch (const error& refused) {
    CHECK(std::string(refused.what()).size() > 20);
    return refused.code();
  }
  return errc::ok;
}

inline std::vector<token_id> tokens_of(const std::vector<int>& ids) {
  std::vector<token_id> tokens;
  for (const int id : ids) tokens.push_back(token_id{id});
  return tokens;
}

inline std::vector<int> ids_of(const std::vector<block_id>& blocks) {
  std::vector<int> ids;
  for (const block_id block : blocks) ids.push_back(to_index(block));
  return ids;
}

/// All free blocks, next to be handed out first.
inline std::vector<int> free_order(const block_pool& pool) {
  std::vector<block_id> order(static_cast<std::size_t>(pool.num_blocks()));
  order.resize(static_cast<std::size_t>(pool.peek_free(order)));
  return ids_of(order);
}

/// All entries of a sequence's table; −1 for those that the sliding window gave back.
inline std::vector<int> table_of(const kv_cache_manager& manager, seq_id seq) {
  std::vector<int> result;
  for (std::int64_t i = 0; i < manager.num_table_blocks(seq); ++i) {
    result.push_back(to_index(manager.block_at(seq, i)));
  }
  return result;
}

/// What differs between two batches in what a kernel may read, or in what is poison; empty when nothing does. One may
/// have wider rows than the other.
inline std::string difference(const step_batch& a, const step_batch& b, std::int32_t table_padding = padding_entry) {
  if (a.query_start_loc != b.query_start_loc) return "query_start_loc differs";
  if (a.seq_lens != b.seq_lens) return "seq_lens differs";
  if (a.slot_mapping != b.slot_mapping) return "slot_mapping differs";
  for (const step_batch* one : {&a, &b}) {
    const auto stride = static_cast<std::size_t>(one->block_table_stride);
    if (one->block_tables.size() != one->seq_lens.size() * stride) return "a table has entries outside its rows";
  }
  for (std::size_t row = 0; row < a.seq_lens.size(); ++row) {
    const auto entry = [&](const step_batch& of, std::int64_t i) {
      if (i >= of.block_table_stride) return table_padding;
      return of.block_tables[row * static_cast<std::size_t>(of.block_table_stride) + static_cast<std::size_t>(i)];
    };
    for (std::int64_t i = 0; i < std::max(a.block_table_stride, b.block_table_stride); ++i) {
      if (entry(a, i) != entry(b, i))
        return "entry " + std::to_string(i) + " of row " + std::to_string(row) + " differs";
    }
  }
  return {};
}

/// The set of cached blocks, as events tell it.
class event_replay {
 public:
  /// Carries on with `events`; says what is wrong with them, or with the set afterwards, where the cache holds `held`.
  std::string add(std::span<const cache_event> events, const prefix_cache& cache, const std::vector<int>& held) {
    for (const cache_event& event : events) {
      if (event.what == cache_event::kind::cleared) {
        cached_.clear();
      } else if (event.what == cache_event::kind::removed) {
        const auto at = cached_.find(to_index(event.block));
        if (at == cached_.end() || !(at->second == event.key)) return "an event removes what was not stored";
        cached_.erase(at);
      } else if (!cached_.emplace(to_index(event.block), event.key).second) {
        return "an event stores into a block that holds something";
      }
    }
    if (cached_.size() != held.size()) return "events give another number of cached blocks";
    for (const int b : held) {
      const auto at = cached_.find(b);
      if (at == cached_.end() || !(at->second == cache.chain_at(block_id{b}).key)) return "events give other blocks";
    }
    return {};
  }

 private:
  std::map<int, content_key> cached_;  // by block
};

}  // namespace bifolio::test

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What `trace_replay --cache-only` must count, by a list and a map of ids.

#include <bifolio/types.hpp>
#include <cstdint>
#include <list>
#include <map>
#include <span>
#include <vector>

namespace bifolio::test {

class lru_oracle {
 public:
  explicit lru_oracle(std::int64_t num_blocks) : num_blocks_(num_blocks) {}

  void replay(std::span<const token_id> ids) {
    lookups += static_cast<std::int64_t>(ids.size());
    std::size_t num_hits = 0;
    while (num_hits < ids.size() && places_.contains(to_index(ids[num_hits]))) ++num_hits;
    hits += static_cast<std::int64_t>(num_hits);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto found = places_.find(to_index(ids[i]));
      if (found == places_.end()) continue;
      order_.erase(found->second);  // pinned, or dropped after the first miss
      places_.erase(found);
    }
    std::size_t num_kept = ids.size();
    if (static_cast<std::int64_t>(ids.size()) > num_blocks_) {
      ++refused;
      num_kept = num_hits;  // what was pinned is given back
    }
    while (static_cast<std::int64_t>(order_.size() + num_kept) > num_blocks_) {
      places_.erase(order_.front());
      order_.pop_front();
      ++evictions;
    }
    for (std::size_t i = num_kept; i-- > 0;) {
      order_.push_back(to_index(ids[i]));
      places_[to_index(ids[i])] = std::prev(order_.end());
    }
  }

  std::int64_t lookups = 0;
  std::int64_t hits = 0;
  std::int64_t evictions = 0;
  std::int64_t refused = 0;
  [[nodiscard]] std::int64_t num_cached() const { return static_cast<std::int64_t>(order_.size()); }

 private:
  std::int64_t num_blocks_;
  std::list<std::int32_t> order_;  // least recently used first
  std::map<std::int32_t, std::list<std::int32_t>::iterator> places_;
};

}  // namespace bifolio::test

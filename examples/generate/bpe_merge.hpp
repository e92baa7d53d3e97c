// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The merging of a byte-pair encoding, whatever says which pairs merge.

#include <cstdint>
#include <limits>
#include <queue>
#include <vector>

namespace generate {

/// What two adjacent ids become. Lower ranks merge first.
struct bpe_join {
  static constexpr std::int32_t none = -1;

  std::int32_t id = none;
  double rank = 0;
};

/// Merges the adjacent pair of the lowest rank, the leftmost on a tie, until no pair joins; join(left, right) gives a
/// `bpe_join`. n ids take O(n log n) steps: candidates wait in a heap; one whose pair has changed since is known by
/// what the pair makes now, and is dropped.
template <class Join>
void merge_pairs(std::vector<std::int32_t>& ids, const Join& join) {
  constexpr std::size_t end = std::numeric_limits<std::size_t>::max();
  /// A list in the text's order, linked by index. A merged pair stays at the place of its left half.
  struct symbol {
    std::int32_t id = bpe_join::none;
    std::int32_t joined = bpe_join::none;  ///< what it makes with the next one; none at the end, and once merged away
    std::size_t previous = 0;
    std::size_t next = 0;
  };
  struct candidate {
    double rank = 0;
    std::size_t left = 0;
    std::int32_t joined = bpe_join::none;
    /// Lower: merged later.
    bool operator<(const candidate& other) const noexcept {
      return rank != other.rank ? rank > other.rank : left > other.left;
    }
  };
  std::vector<symbol> symbols(ids.size());
  const auto look = [&](std::size_t i) {
    symbol& left = symbols[i];
    const bpe_join found = left.next == end ? bpe_join{} : join(left.id, symbols[left.next].id);
    left.joined = found.id;
    return candidate{found.rank, i, found.id};
  };
  for (std::size_t i = 0; i < ids.size(); ++i) {
    symbols[i] = {ids[i], bpe_join::none, i == 0 ? end : i - 1, i + 1 < ids.size() ? i + 1 : end};
  }
  std::vector<candidate> first;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    if (const candidate found = look(i); found.joined != bpe_join::none) first.push_back(found);
  }
  std::priority_queue<candidate> waiting({}, std::move(first));
  while (!waiting.empty()) {
    const candidate best = waiting.top();
    waiting.pop();
    symbol& left = symbols[best.left];
    if (left.joined != best.joined) continue;
    symbol& right = symbols[left.next];
    right.joined = bpe_join::none;
    left.id = best.joined;
    left.next = right.next;
    if (left.next != end) symbols[left.next].previous = best.left;
    if (const candidate found = look(best.left); found.joined != bpe_join::none) waiting.push(found);
    if (left.previous == end) continue;
    if (const candidate found = look(left.previous); found.joined != bpe_join::none) waiting.push(found);
  }
  ids.clear();
  for (std::size_t i = symbols.empty() ? end : 0; i != end; i = symbols[i].next) ids.push_back(symbols[i].id);
}

}  // namespace generate

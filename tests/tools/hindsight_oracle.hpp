// SPDX-License-Identifier: Apache-2.0
#pragma once

/// What snapshots of states and windows could be worth to a trace, if whoever places them knew its future.
///
/// No placement finds more than the first group has at the time. With hindsight a snapshot is left exactly where a
/// later request's text departs from the cached one, by the last request before that whose prompt passes there, and is
/// kept until then. So the first group's hits are found whole, as long as there are as many snapshots as are waited for
/// at once.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "trace.hpp"

namespace bifolio::test {

struct hindsight {
  std::int64_t num_tokens = 0;     ///< found by all requests together
  std::int64_t num_snapshots = 0;  ///< the most that are kept at once, one per group
};

/// `first_hits`: of each request in the order of the trace, the tokens that the first group alone has.
inline hindsight best_placement(const trace_replay::trace& what, std::span<const std::int64_t> first_hits,
                                std::int64_t trace_block_size) {
  std::vector<std::size_t> order(what.requests.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return what.requests[a].arrival_us < what.requests[b].arrival_us;
  });
  hindsight result;
  std::unordered_map<std::int32_t, std::size_t> last_passed;  // by id, which names all before it as well
  std::vector<std::pair<std::size_t, int>> changes;           // of the number that is kept
  for (std::size_t turn = 0; turn < order.size(); ++turn) {
    const auto ids = what.ids_of(what.requests[order[turn]]);
    const std::int64_t hit = first_hits[order[turn]];
    result.num_tokens += hit;
    if (hit > 0) {
      const auto id = static_cast<std::int32_t>(ids[static_cast<std::size_t>((hit - 1) / trace_block_size)]);
      changes.emplace_back(last_passed.at(id), 1);
      changes.emplace_back(turn, -1);
    }
    for (const token_id id : ids) last_passed[static_cast<std::int32_t>(id)] = turn;
  }
  std::sort(changes.begin(), changes.end());  // what ends with a request makes room for what begins with it
  std::int64_t kept = 0;
  for (const auto& [turn, change] : changes) {
    kept += change;
    result.num_snapshots = std::max(result.num_snapshots, kept);
  }
  return result;
}

}  // namespace bifolio::test

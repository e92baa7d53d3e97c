// SPDX-License-Identifier: Apache-2.0
/// prefix_cache's check and digest: the whole index read once, for tests and for looking into a running server.

#include <bifolio/prefix_cache.hpp>
#include <unordered_set>

#include "common/base/hash.hpp"
#include "common/cache/prefix_state.hpp"

namespace bifolio::inline v0_2 {

std::string prefix_cache::check() const {
  std::int64_t num_cached = 0;
  std::unordered_set<std::uint64_t> serials;
  for (std::int64_t b = 0; b < pool_->num_blocks(); ++b) {
    const block_id block{static_cast<std::int32_t>(b)};
    const std::string name = "block " + std::to_string(b);
    if (!holds(block)) {
      if (pool_->level(block) != 0) return name + " is not cached and stands above level 0";
      continue;
    }
    ++num_cached;
    if (pool_->level(block) == 0) return name + " is cached and stands at level 0";
    const detail::prefix_index::contents& contents = index_.of(block);
    if (contents.serial == 0 || contents.serial >= next_serial_) return name + " has a serial that was never given";
    if (!serials.insert(contents.serial).second) return name + " has another block's serial";
    const extras_id extras = extras_of_.empty() ? no_extras : extras_of_[static_cast<std::size_t>(b)];
    const block_id found = find(contents.key, contents.parent, index_.tokens(block), extras);
    if (found == invalid_block) return name + " is cached and not found by its key";
    if (found != block) return name + " is cached and block " + std::to_string(to_index(found)) + " is found for it";
  }
  if (num_cached != stats_.num_cached_blocks) {
    return std::to_string(num_cached) + " blocks are cached, the counter says " +
           std::to_string(stats_.num_cached_blocks);
  }
  if (tracker_) {
    if (std::string problem = tracker_->check(num_cached); !problem.empty()) return problem;
  }
  return index_.check(num_cached);
}

std::uint64_t prefix_cache::digest() const noexcept {
  detail::digest_builder hash;
  for (std::int64_t b = 0; b < pool_->num_blocks(); ++b) {
    const block_id block{static_cast<std::int32_t>(b)};
    if (!holds(block)) continue;
    const detail::prefix_index::contents& contents = index_.of(block);
    hash.add(static_cast<std::uint64_t>(b));
    hash.add(contents.key.low);
    hash.add(contents.key.high);
    hash.add(contents.serial);
    hash.add(contents.parent);
  }
  // Reserving room drops hints of contents that are gone and orders the others anew; a sum is the same before and
  // after.
  std::uint64_t hints = 0;
  for (const expiry& timer : expiries_) {
    if (!is_live(timer)) continue;
    detail::digest_builder hint;
    hint.add(static_cast<std::uint64_t>(timer.at));
    hint.add(timer.serial);
    hints += hint.value();
  }
  hash.add(hints);
  hash.add(next_serial_);
  hash.add(static_cast<std::uint64_t>(now_));
  hash.add(events_.size());
  if (tracker_) hash.add(tracker_->digest());
  return hash.value();
}

}  // namespace bifolio::inline v0_2

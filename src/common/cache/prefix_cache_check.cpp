// SPDX-License-Identifier: Apache-2.0
/// prefix_cache's check and digest: the whole index read once, for tests and for looking into a running server.

#include <bifolio/prefix_cache.hpp>
#include <unordered_set>

#include "common/base/hash.hpp"

namespace bifolio {

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
    const entry& contents = entry_of(block);
    if (contents.serial == 0 || contents.serial >= next_serial_) return name + " has a serial that was never given";
    if (!serials.insert(contents.serial).second) return name + " has another block's serial";
    const extras_id extras = extras_of_.empty() ? no_extras : extras_of_[static_cast<std::size_t>(b)];
    const block_id found = find(contents.key, contents.parent, token_row(block), extras);
    if (found == invalid_block) return name + " is cached and not found by its key";
    if (found != block) return name + " is cached and block " + std::to_string(to_index(found)) + " is found for it";
  }
  if (num_cached != stats_.num_cached_blocks) {
    return std::to_string(num_cached) + " blocks are cached, the counter says " +
           std::to_string(stats_.num_cached_blocks);
  }
  std::int64_t num_filled = 0;
  std::uint64_t num_passed = 0;
  for (std::uint64_t at = 0; at < num_buckets_; ++at) {
    const bucket& slots = buckets_[at];
    num_passed += slots.num_passed();
    for (std::uint32_t i = 0; i < bucket::num_slots; ++i) {
      if (slots.tags[i] == 0) continue;
      ++num_filled;
      const std::uint64_t home = home_of(slots.tags[i]);
      num_passed -= at >= home ? at - home : at + num_buckets_ - home;
    }
  }
  if (num_passed != 0) return "the buckets' counts of entries that went on are off";
  if (num_filled != num_cached) {
    return "the index has " + std::to_string(num_filled) + " entries for " + std::to_string(num_cached) + " blocks";
  }
  return {};
}

std::uint64_t prefix_cache::digest() const noexcept {
  detail::digest_builder hash;
  for (std::int64_t b = 0; b < pool_->num_blocks(); ++b) {
    const block_id block{static_cast<std::int32_t>(b)};
    if (!holds(block)) continue;
    const entry& contents = entry_of(block);
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
  return hash.value();
}

}  // namespace bifolio

// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bifolio/eviction_policy.hpp>
#include <vector>

#include "common/base/hash.hpp"
#include "common/base/refuse.hpp"
#include "common/cache/ghost_queue.hpp"

namespace bifolio::inline v0_2 {
namespace {

/// The queues are levels of the pool, so that a release puts a block where it belongs. A parked block is one whose turn
/// came while blocks after it in a chain were cached.
constexpr block_level small_level = 2;
constexpr block_level main_level = 3;
constexpr block_level parked_level = 4;

constexpr std::uint8_t most_hits = 3;            // counted, algorithm 1
constexpr std::uint8_t hits_for_main_queue = 2;  // "freq > 1"

class s3_fifo_tracker final : public eviction_tracker {
 public:
  s3_fifo_tracker(idle_queues queues, double small_fraction)
      : queues_(queues),
        small_target_(std::max<std::int64_t>(
            1, static_cast<std::int64_t>(small_fraction * static_cast<double>(queues.num_blocks())))),
        blocks_(static_cast<std::size_t>(queues.num_blocks())),
        ghosts_(std::max<std::int64_t>(1, queues.num_blocks() - small_target_)) {}

  [[nodiscard]] block_level inserted(block_id block, const content_key& key, block_id parent, const retention_hint&,
                                     std::int64_t) noexcept override {
    state& added = of(block);
    added.queue = ghosts_.take(key.low) ? main_level : small_level;
    added.num_hits = 0;
    added.is_parked = false;
    added.num_children = 0;
    added.parent = parent;
    if (parent != invalid_block) {
      added.parent_generation = of(parent).generation;
      ++of(parent).num_children;
    }
    ++num_in(added.queue);
    return added.queue;
  }

  void hit(block_id block) noexcept override {
    state& found = of(block);
    if (found.num_hits < most_hits) ++found.num_hits;
    if (found.is_parked) unpark(block, reuse_order::last);
  }

  void removed(block_id block, const content_key& key, removal_reason reason) noexcept override {
    state& gone = of(block);
    if (gone.queue == small_level && reason == removal_reason::evicted) ghosts_.push(key.low);
    --num_in(gone.queue);
    gone.queue = 0;
    ++gone.generation;
    if (!has_parent(gone)) return;
    state& parent = of(gone.parent);
    if (--parent.num_children == 0 && parent.is_parked) unpark(gone.parent, reuse_order::first);
  }

  // Each turn of the loop uses up a hit (a move to the main queue, a reinsertion) or parks a block, which an insertion,
  // a hit or an eviction made possible.
  [[nodiscard]] block_id victim() noexcept override {
    for (;;) {
      const block_id first_small = queues_.front(small_level);
      const block_id first_main = queues_.front(main_level);
      if (first_small == invalid_block && first_main == invalid_block) return queues_.front(parked_level);
      const bool from_small =
          first_main == invalid_block || (first_small != invalid_block && num_small_ >= small_target_);
      const block_id block = from_small ? first_small : first_main;
      state& due = of(block);
      if (from_small && due.num_hits >= hits_for_main_queue) {
        due.queue = main_level;
        due.num_hits = 0;
        --num_small_;
        ++num_main_;
        queues_.move(block, main_level, reuse_order::last);
      } else if (!from_small && due.num_hits > 0) {
        --due.num_hits;
        queues_.move(block, main_level, reuse_order::last);
      } else if (due.num_children > 0) {
        due.is_parked = true;
        queues_.move(block, parked_level, reuse_order::last);
      } else {
        return block;
      }
    }
  }

  [[nodiscard]] std::string check(std::int64_t num_cached) const override {
    std::int64_t num_small = 0, num_main = 0;
    std::vector<std::uint32_t> num_children(blocks_.size(), 0);
    for (std::size_t b = 0; b < blocks_.size(); ++b) {
      const state& at = blocks_[b];
      if (at.queue == 0) continue;
      ++(at.queue == small_level ? num_small : num_main);
      const std::string name = "block " + std::to_string(b);
      const block_level level = queues_.level(block_id{static_cast<std::int32_t>(b)});
      if (level != (at.is_parked ? parked_level : at.queue)) return name + " is at another level than its queue's";
      if (at.num_hits > most_hits) return name + " counts too many hits";
      if (has_parent(at)) ++num_children[static_cast<std::size_t>(to_index(at.parent))];
    }
    if (num_small != num_small_ || num_main != num_main_ || num_small + num_main != num_cached) {
      return "S3-FIFO counts " + std::to_string(num_small_) + " + " + std::to_string(num_main_) + " blocks, " +
             std::to_string(num_small) + " + " + std::to_string(num_main) + " of " + std::to_string(num_cached) +
             " cached ones are in its queues";
    }
    for (std::size_t b = 0; b < blocks_.size(); ++b) {
      if (blocks_[b].queue == 0) continue;
      if (blocks_[b].num_children != num_children[b]) {
        return "block " + std::to_string(b) + " counts the blocks after it wrong";
      }
      if (blocks_[b].is_parked && num_children[b] == 0) return "block " + std::to_string(b) + " is parked for nothing";
    }
    return {};
  }

  [[nodiscard]] std::uint64_t digest() const noexcept override {
    detail::digest_builder hash;
    for (const state& at : blocks_) {
      hash.add(at.queue);
      if (at.queue == 0) continue;
      hash.add(at.num_hits);
      hash.add(at.num_children);
      hash.add(at.is_parked);
      hash.add(has_parent(at) ? static_cast<std::uint64_t>(to_index(at.parent)) : UINT64_MAX);
    }
    ghosts_.for_each([&](std::uint64_t fingerprint) { hash.add(fingerprint); });
    return hash.value();
  }

 private:
  struct state {
    std::uint32_t generation = 0;  ///< of the contents
    std::uint32_t parent_generation = 0;
    block_id parent = invalid_block;  ///< meant only while it has this generation
    std::uint32_t num_children = 0;   ///< cached blocks with this one as parent
    std::uint8_t num_hits = 0;
    block_level queue = 0;  ///< small_level or main_level; 0: not cached
    bool is_parked = false;
  };

  [[nodiscard]] state& of(block_id block) noexcept { return blocks_[static_cast<std::uint32_t>(block)]; }
  [[nodiscard]] bool has_parent(const state& child) const noexcept {
    return child.parent != invalid_block &&
           blocks_[static_cast<std::uint32_t>(child.parent)].generation == child.parent_generation;
  }
  [[nodiscard]] std::int64_t& num_in(block_level queue) noexcept {
    return queue == small_level ? num_small_ : num_main_;
  }
  void unpark(block_id block, reuse_order order) noexcept {
    of(block).is_parked = false;
    queues_.move(block, of(block).queue, order);
  }

  idle_queues queues_;
  std::int64_t small_target_;  // blocks
  std::int64_t num_small_ = 0;
  std::int64_t num_main_ = 0;
  std::vector<state> blocks_;
  detail::ghost_queue ghosts_;
};

class s3_fifo final : public eviction_policy {
 public:
  explicit s3_fifo(double small_fraction) : small_fraction_(small_fraction) {}
  [[nodiscard]] block_level level(const retention_hint&, std::int64_t) const noexcept override { return small_level; }
  [[nodiscard]] std::unique_ptr<eviction_tracker> make_tracker(idle_queues queues) const override {
    return std::make_unique<s3_fifo_tracker>(queues, small_fraction_);
  }

 private:
  double small_fraction_;
};

}  // namespace

std::unique_ptr<eviction_policy> make_s3_fifo_policy(double small_fraction) {
  if (!(small_fraction > 0 && small_fraction < 1)) {
    detail::refuse(errc::invalid_argument, "small_fraction ", small_fraction, " is not above 0 and below 1");
  }
  return std::make_unique<s3_fifo>(small_fraction);
}

const eviction_policy& s3_fifo_policy() noexcept {
  static const s3_fifo policy(0.1);
  return policy;
}

}  // namespace bifolio::inline v0_2

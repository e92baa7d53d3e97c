// SPDX-License-Identifier: Apache-2.0
#pragma once

/// S3-FIFO (Yang et al., SOSP 2023, algorithm 1) said with maps and a deque, in the form that make_s3_fifo_policy
/// promises: queues of idle blocks in the order of release, and no block before those that follow it in a chain. Keys
/// are spelled out. Everything is searched for, nothing counted ahead.

#include <algorithm>
#include <cstddef>
#include <deque>
#include <map>
#include <string>

#include "reference/pool_oracle.hpp"

namespace bifolio::test {

class s3_fifo_oracle {
 public:
  s3_fifo_oracle(pool_oracle& pool, double small_fraction)
      : pool_(&pool),
        small_target_(std::max<std::size_t>(1, static_cast<std::size_t>(small_fraction * total()))),
        num_ghosts_(std::max<std::size_t>(1, static_cast<std::size_t>(pool.num_blocks()) - small_target_)) {}

  /// `key`: everything from the chain's first token on; `parent`: −1 when what comes before is not cached.
  void inserted(int b, const std::string& key, int parent) {
    const auto ghost = std::find(ghosts_.rbegin(), ghosts_.rend(), key);
    const bool was_ghost = ghost != ghosts_.rend();
    if (was_ghost) *ghost = gap;
    blocks_[b] = {key, parent, was_ghost, false, 0};
    pool_->set_level(b, was_ghost ? main_queue : small_queue);
  }
  void hit(int b) {
    one_block& found = blocks_.at(b);
    found.hits = std::min(3, found.hits + 1);
    found.waits_outside = false;
    pool_->set_level(b, found.in_main ? main_queue : small_queue);
  }
  void removed(int b, bool evicted) {
    const one_block gone = blocks_.at(b);
    if (evicted && !gone.in_main) {
      ghosts_.push_back(gone.key);
      if (ghosts_.size() > num_ghosts_) ghosts_.pop_front();
    }
    blocks_.erase(b);
    for (auto& [other, block] : blocks_) {
      if (block.parent == b) block.parent = -1;
    }
    if (gone.parent < 0 || num_children(gone.parent) > 0) return;
    one_block& parent = blocks_.at(gone.parent);
    if (!parent.waits_outside) return;
    parent.waits_outside = false;
    place(gone.parent, parent.in_main ? main_queue : small_queue, false);
  }
  int victim() {
    while (true) {
      const int in_small = pool_->front(small_queue);
      const int in_main = pool_->front(main_queue);
      if (in_small < 0 && in_main < 0) return pool_->front(outside);
      bool small_is_due = num_small() >= small_target_;
      if (in_small < 0) small_is_due = false;
      if (in_main < 0) small_is_due = true;
      const int b = small_is_due ? in_small : in_main;
      one_block& due = blocks_.at(b);
      if (small_is_due && due.hits > 1) {
        due.hits = 0;
        due.in_main = true;
        ++num_promoted;
        place(b, main_queue, true);
      } else if (!small_is_due && due.hits > 0) {
        --due.hits;
        ++num_reinserted;
        place(b, main_queue, true);
      } else if (num_children(b) > 0) {
        due.waits_outside = true;
        ++num_parked;
        place(b, outside, true);
      } else {
        return b;
      }
    }
  }
  [[nodiscard]] bool has_children(int b) const { return num_children(b) > 0; }

  int num_promoted = 0, num_reinserted = 0, num_parked = 0;

 private:
  struct one_block {
    std::string key;
    int parent = -1;
    bool in_main = false;
    bool waits_outside = false;
    int hits = 0;
  };
  static constexpr int small_queue = 2, main_queue = 3, outside = 4;
  static constexpr const char* gap = "taken";

  [[nodiscard]] double total() const { return static_cast<double>(pool_->num_blocks()); }
  void place(int b, int level, bool at_back) {
    if (pool_->is_free(b)) {
      pool_->requeue(b, level, at_back);
    } else {
      pool_->set_level(b, level);
    }
  }
  [[nodiscard]] std::size_t num_small() const {
    return static_cast<std::size_t>(
        std::count_if(blocks_.begin(), blocks_.end(), [](const auto& item) { return !item.second.in_main; }));
  }
  [[nodiscard]] std::size_t num_children(int b) const {
    return static_cast<std::size_t>(
        std::count_if(blocks_.begin(), blocks_.end(), [b](const auto& item) { return item.second.parent == b; }));
  }

  pool_oracle* pool_;
  std::size_t small_target_, num_ghosts_;
  std::map<int, one_block> blocks_;
  std::deque<std::string> ghosts_;
};

}  // namespace bifolio::test

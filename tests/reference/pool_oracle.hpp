// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The block pool said with lists: one list of free ids per level, one list of released ids per open fence, one user
/// count per block. Everything a caller may do is within its contract here; the tests of refusals are elsewhere.

#include <cstdint>
#include <deque>
#include <list>
#include <utility>
#include <vector>

namespace bifolio::test {

class pool_oracle {
 public:
  explicit pool_oracle(std::int64_t num_blocks)
      : users_(static_cast<std::size_t>(num_blocks), 0), levels_(users_.size(), 0), places_(users_.size()) {
    for (int b = 0; b < num_blocks; ++b) push(b, true);
  }

  [[nodiscard]] std::int64_t num_blocks() const { return static_cast<std::int64_t>(users_.size()); }
  [[nodiscard]] std::int64_t num_free() const { return num_free_; }
  [[nodiscard]] int users(int b) const { return users_[index(b)]; }
  [[nodiscard]] int level(int b) const { return levels_[index(b)]; }
  [[nodiscard]] bool is_free(int b) const { return places_[index(b)].fence < 0 && users(b) == 0; }
  [[nodiscard]] std::size_t num_fences() const { return fences_.size(); }
  [[nodiscard]] std::int64_t num_waiting() const {
    std::int64_t count = 0;
    for (const auto& [number, blocks] : fences_) count += static_cast<std::int64_t>(blocks.size());
    return count;
  }
  /// The block that `take` would give; −1 when none is free.
  [[nodiscard]] int next() const {
    for (const std::list<int>& queue : queues_) {
      if (!queue.empty()) return queue.front();
    }
    return -1;
  }
  /// All free blocks, next to be handed out first.
  [[nodiscard]] std::vector<int> order() const {
    std::vector<int> all;
    for (const std::list<int>& queue : queues_) all.insert(all.end(), queue.begin(), queue.end());
    return all;
  }

  int take() {
    const int b = next();
    leave(b);
    users_[index(b)] = 1;
    return b;
  }
  /// One user more, whatever state the block is in.
  void add_user(int b) {
    if (users_[index(b)]++ == 0) leave(b);
  }
  void drop(int b, bool to_back) {
    if (--users_[index(b)] > 0) return;
    if (fences_.empty()) {
      push(b, to_back);
    } else {
      auto& [number, blocks] = fences_.back();
      places_[index(b)] = {blocks.insert(blocks.end(), b), number};
    }
  }
  void set_level(int b, int level) {
    if (levels_[index(b)] == level) return;
    const bool moves = is_free(b);
    if (moves) leave(b);
    levels_[index(b)] = level;
    if (moves) push(b, true);
  }
  /// A free block to an end of a level's queue, also of its own level's.
  void requeue(int b, int level, bool to_back) {
    leave(b);
    levels_[index(b)] = level;
    push(b, to_back);
  }
  [[nodiscard]] int front(int level) const {
    const std::list<int>& queue = queues_[index(level)];
    return queue.empty() ? -1 : queue.front();
  }
  std::int64_t open_fence() {
    fences_.push_back({++last_fence_, {}});
    return last_fence_;
  }
  void retire() {
    std::list<int> blocks = std::move(fences_.front().second);
    fences_.pop_front();
    for (const int b : blocks) push(b, true);
  }

 private:
  struct place {
    std::list<int>::iterator at{};
    std::int64_t fence = -1;  ///< number of the fence it waits for; −1: none
  };
  static std::size_t index(int b) { return static_cast<std::size_t>(b); }
  std::list<int>& queue_of(int b) { return queues_[index(levels_[index(b)])]; }
  void push(int b, bool to_back) {
    std::list<int>& queue = queue_of(b);
    places_[index(b)] = {queue.insert(to_back ? queue.end() : queue.begin(), b), -1};
    ++num_free_;
  }
  void leave(int b) {
    place& from = places_[index(b)];
    if (from.fence < 0) {
      queue_of(b).erase(from.at);
      --num_free_;
      return;
    }
    for (auto& [number, blocks] : fences_) {
      if (number == from.fence) blocks.erase(from.at);
    }
    from.fence = -1;
  }

  std::vector<int> users_, levels_;
  std::vector<place> places_;  // of blocks without users
  std::vector<std::list<int>> queues_ = std::vector<std::list<int>>(8);
  std::deque<std::pair<std::int64_t, std::list<int>>> fences_;
  std::int64_t num_free_ = 0;
  std::int64_t last_fence_ = 0;
};

}  // namespace bifolio::test

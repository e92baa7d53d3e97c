// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The cache manager said with maps and vectors: one plain list of block ids per sequence, one user count per block,
/// one queue of free ids. No sharing of tables, no shortcuts, no handles to reuse. It predicts every answer and every
/// block id of the production manager, because the eviction order is part of the contract.

#include <algorithm>
#include <bifolio/error.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace bifolio::test {

class manager_oracle {
 public:
  struct one_sequence {
    std::vector<int> blocks;  ///< −1: given back by the sliding window
    std::int64_t num_tokens = 0;
    std::int64_t num_committed = 0;
  };
  using handle = std::uint64_t;

  struct answer {
    alloc_status status = alloc_status::ok;
    handle opened = 0;
    std::optional<std::pair<int, int>> copy;
  };

  explicit manager_oracle(const kv_cache_config& config) : config_(config), users_(to_size(config.num_blocks), 0) {
    for (int b = 0; b < config.num_blocks; ++b) free_.push_back(b);
  }

  [[nodiscard]] const std::map<handle, one_sequence>& sequences() const { return sequences_; }
  [[nodiscard]] const std::deque<int>& free_blocks() const { return free_; }
  [[nodiscard]] const std::vector<int>& users() const { return users_; }

  answer allocate(std::int64_t num_tokens) {
    const std::int64_t needed = div_up(num_tokens);
    if (needed > config_.num_blocks) return {alloc_status::never, 0, {}};
    if (needed > num_free() || num_open() == config_.max_sequences) return {alloc_status::later, 0, {}};
    one_sequence& opened = sequences_[++last_handle_];
    for (std::int64_t i = 0; i < needed; ++i) opened.blocks.push_back(take());
    opened.num_tokens = num_tokens;
    return {alloc_status::ok, last_handle_, {}};
  }

  alloc_status can_allocate(std::int64_t num_tokens, std::int64_t step_tokens) const {
    std::int64_t needed = div_up(num_tokens);
    if (config_.sliding_window > 0) {
      // Try every offset of the live run within a block, at its longest.
      const std::int64_t step = step_tokens == 0 ? num_tokens : std::min(step_tokens, num_tokens);
      const std::int64_t longest = config_.sliding_window - 1 + step;
      std::int64_t most = 0;
      for (std::int64_t start = 0; start < config_.block_size; ++start) {
        most = std::max(most, (start + longest - 1) / config_.block_size + 1);
      }
      needed = std::min(needed, most);
    }
    needed += static_cast<std::int64_t>(config_.watermark * static_cast<double>(config_.num_blocks));
    if (needed > config_.num_blocks) return alloc_status::never;
    return needed <= num_free() && num_open() < config_.max_sequences ? alloc_status::ok : alloc_status::later;
  }

  answer append(handle h, std::int64_t num_tokens, std::int64_t num_lookahead) {
    one_sequence& one = sequences_.at(h);
    if (num_tokens + num_lookahead == 0) return {};
    const std::int64_t covered = std::max<std::int64_t>(div_up(one.num_tokens + num_tokens + num_lookahead),
                                                        static_cast<std::int64_t>(one.blocks.size()));
    const std::size_t tail = to_size(one.num_tokens / config_.block_size);
    const bool copies = one.num_tokens % config_.block_size != 0 && users_[to_size(one.blocks[tail])] > 1;
    const std::int64_t fresh = covered - static_cast<std::int64_t>(one.blocks.size()) + (copies ? 1 : 0);
    const std::int64_t live = covered - std::count(one.blocks.begin(), one.blocks.end(), -1);
    if (live > config_.num_blocks) return {alloc_status::never, 0, {}};
    if (fresh > num_free()) return {alloc_status::later, 0, {}};
    answer result;
    if (copies) {
      const int old = one.blocks[tail];
      one.blocks[tail] = take();
      --users_[to_size(old)];
      result.copy = {old, one.blocks[tail]};
    }
    while (static_cast<std::int64_t>(one.blocks.size()) < covered) one.blocks.push_back(take());
    one.num_tokens += num_tokens;
    return result;
  }

  void commit(handle h, std::int64_t num_tokens) {
    one_sequence& one = sequences_.at(h);
    one.num_committed += num_tokens;
    if (config_.sliding_window == 0) return;
    for (std::size_t i = 0; i < one.blocks.size(); ++i) {
      // The next token is at position num_committed and sees sliding_window − 1 before it.
      const std::int64_t last_position = static_cast<std::int64_t>(i + 1) * config_.block_size - 1;
      if (one.blocks[i] >= 0 && last_position < one.num_committed - config_.sliding_window + 1) {
        drop(one.blocks[i], false);
        one.blocks[i] = -1;
      }
    }
  }

  answer fork(handle h) {
    if (num_open() == config_.max_sequences) return {alloc_status::later, 0, {}};
    one_sequence copy = sequences_.at(h);
    copy.blocks.resize(to_size(div_up(copy.num_tokens)));
    for (const int b : copy.blocks) {
      if (b >= 0) ++users_[to_size(b)];
    }
    sequences_[++last_handle_] = std::move(copy);
    return {alloc_status::ok, last_handle_, {}};
  }

  /// Whether the window kept what the first `num_tokens` need.
  [[nodiscard]] bool can_truncate(handle h, std::int64_t num_tokens) const {
    const one_sequence& one = sequences_.at(h);
    if (config_.sliding_window == 0) return true;
    const std::int64_t first_seen = std::max<std::int64_t>(0, num_tokens - config_.sliding_window + 1);
    const auto block = to_size(first_seen / config_.block_size);
    return block >= one.blocks.size()
               ? std::count(one.blocks.begin(), one.blocks.end(), -1) <= first_seen / config_.block_size
               : one.blocks[block] >= 0;
  }

  void truncate(handle h, std::int64_t num_tokens) {
    one_sequence& one = sequences_.at(h);
    shrink(one, to_size(div_up(num_tokens)));
    one.num_tokens = num_tokens;
    one.num_committed = std::min(one.num_committed, num_tokens);
  }

  void free(handle h) {
    shrink(sequences_.at(h), 0);
    sequences_.erase(h);
  }

 private:
  static std::size_t to_size(std::int64_t n) { return static_cast<std::size_t>(n); }
  [[nodiscard]] std::int64_t num_free() const { return static_cast<std::int64_t>(free_.size()); }
  [[nodiscard]] std::int64_t num_open() const { return static_cast<std::int64_t>(sequences_.size()); }
  [[nodiscard]] std::int64_t div_up(std::int64_t tokens) const {
    return tokens / config_.block_size + (tokens % config_.block_size != 0 ? 1 : 0);
  }
  int take() {
    const int b = free_.front();
    free_.pop_front();
    users_[to_size(b)] = 1;
    return b;
  }
  void drop(int b, bool contents_stay_useful) {
    if (--users_[to_size(b)] > 0) return;
    if (contents_stay_useful) {
      free_.push_back(b);
    } else {
      free_.push_front(b);
    }
  }
  // The last block first; what was computed to the block's end goes to the back of the queue.
  void shrink(one_sequence& one, std::size_t size) {
    while (one.blocks.size() > size) {
      const std::size_t i = one.blocks.size() - 1;
      const bool full = static_cast<std::int64_t>(i + 1) * config_.block_size <= one.num_committed;
      if (one.blocks[i] >= 0) drop(one.blocks[i], full);
      one.blocks.pop_back();
    }
  }

  kv_cache_config config_;
  std::map<handle, one_sequence> sequences_;
  std::deque<int> free_;
  std::vector<int> users_;
  handle last_handle_ = 0;
};

}  // namespace bifolio::test

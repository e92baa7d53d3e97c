// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The prefix cache said with maps: contents are named by the contents before them, their tokens and their extra keys,
/// all spelled out; nothing is hashed, so nothing can collide. Two contents are the same only if what precedes them
/// was cached all the time in between: contents whose predecessor was forgotten are not found any more, though they
/// keep their block.

#include <bifolio/prefix_cache.hpp>
#include <bifolio/stats.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "reference/pool_oracle.hpp"
#include "reference/s3_fifo_oracle.hpp"

namespace bifolio::test {

class prefix_oracle {
 public:
  /// What the next block follows: contents that were published, or (negative) the start of a scope.
  using node = std::int64_t;
  /// Extra keys of a prompt: of block i as text; none where there is no entry.
  using extra_texts = std::map<std::int64_t, std::string>;

  /// With an oracle of its policy it evicts what that one says, and gives no priorities.
  prefix_oracle(pool_oracle& pool, int block_size, s3_fifo_oracle* policy = nullptr)
      : pool_(&pool), block_size_(static_cast<std::size_t>(block_size)), policy_(policy) {}

  node root(const std::string& scope) { return -1 - roots_.try_emplace(scope, roots_.size()).first->second; }

  struct found {
    std::vector<int> blocks;
    std::vector<node> names;
    node end = 0;
  };
  [[nodiscard]] found match(const std::string& scope, const std::vector<int>& tokens, const extra_texts& extras) {
    found result{{}, {}, root(scope)};
    for (std::size_t i = 0; (i + 1) * block_size_ <= tokens.size(); ++i) {
      const auto at = by_contents_.find(name_of(result.end, &tokens[i * block_size_], extras, i));
      if (at == by_contents_.end()) break;
      result.blocks.push_back(at->second.block);
      result.end = at->second.self;
      result.names.push_back(result.end);
    }
    return result;
  }
  void count_lookup(std::size_t num_blocks, std::size_t num_hits) {
    ++stats_.num_lookups;
    stats_.num_looked_up_blocks += static_cast<std::int64_t>(num_blocks);
    stats_.num_hit_blocks += static_cast<std::int64_t>(num_hits);
  }

  struct published {
    node end = 0;
    int duplicate_of = -1;
  };
  /// `tokens`: a whole block of them. The level is the hint's, or the normal one when the hint is over.
  published publish(int block, node after, const int* tokens, const extra_texts& extras, std::size_t index,
                    const retention_hint& hint) {
    name contents = name_of(after, tokens, extras, index);
    if (const auto at = by_contents_.find(contents); at != by_contents_.end()) {
      if (at->second.block != block) {
        unregister(block);
        ++stats_.num_duplicate_blocks;
        return {at->second.self, at->second.block};
      }
      return {at->second.self, -1};
    }
    unregister(block);
    const node self = ++last_node_;
    const auto parent = by_node_.find(after);
    const int parent_block = parent == by_node_.end() ? -1 : parent->second;
    paths_[self] = paths_[after] + "|" + (after < 0 ? std::to_string(after) : "") + std::get<2>(contents) + ":";
    for (const int token : std::get<1>(contents)) paths_[self] += std::to_string(token) + ",";
    by_block_[block] = by_contents_.emplace(std::move(contents), entry{self, block}).first;
    by_node_[self] = block;
    ++stats_.num_published_blocks;
    ++stats_.num_cached_blocks;
    if (policy_ != nullptr) {
      policy_->inserted(block, paths_[self], parent_block);
      return {self, -1};
    }
    int level = hint.priority < retention_hint::lowest    ? retention_hint::lowest
                : hint.priority > retention_hint::highest ? retention_hint::highest
                                                          : hint.priority;
    if (hint.expires_at != 0) {
      if (hint.expires_at <= now_) {
        level = retention_hint::normal;
      } else if (level != retention_hint::normal) {
        expiries_.insert({hint.expires_at, -self, block});
      }
    }
    pool_->set_level(block, level);
    return {self, -1};
  }
  [[nodiscard]] bool holds(int block) const { return by_block_.count(block) != 0; }
  [[nodiscard]] std::vector<int> held() const {
    std::vector<int> blocks;
    for (const auto& [block, at] : by_block_) blocks.push_back(block);
    return blocks;
  }
  [[nodiscard]] const std::vector<int>& tokens_of(int block) const { return std::get<1>(by_block_.at(block)->first); }

  void hit(int block) {
    if (policy_ != nullptr) policy_->hit(block);
  }
  /// The block that is registered for these tokens after `after`; −1: none.
  [[nodiscard]] int find_after(node after, const std::vector<int>& tokens) const {
    const auto at = by_contents_.find({after, tokens, {}});
    return at == by_contents_.end() ? -1 : at->second.block;
  }
  /// Called with contents that are lost.
  std::function<void(node)> on_removal;

  void unregister(int block, bool evicted = false) {
    const auto at = by_block_.find(block);
    if (at == by_block_.end()) return;
    if (on_removal) on_removal(at->second->second.self);
    by_node_.erase(at->second->second.self);
    by_contents_.erase(at->second);
    by_block_.erase(at);
    pool_->set_level(block, 0);
    --stats_.num_cached_blocks;
    if (evicted) ++stats_.num_evicted_blocks;
    if (policy_ != nullptr) policy_->removed(block, evicted);
  }
  int take() {
    if (policy_ != nullptr && pool_->front(0) < 0) unregister(policy_->victim(), true);
    const int block = pool_->take();
    unregister(block, true);
    return block;
  }

  bool reset() {
    for (const auto& [block, at] : by_block_) {
      if (pool_->users(block) != 0) return false;
    }
    while (!by_block_.empty()) unregister(by_block_.begin()->first);
    return true;
  }
  /// Of hints that are due at the same time, the last published loses its priority first: the tail of a sequence goes
  /// before its head.
  void advance_clock(std::int64_t now) {
    if (now > now_) now_ = now;
    while (!expiries_.empty() && std::get<0>(*expiries_.begin()) <= now_) {
      const auto [when, newest, block] = *expiries_.begin();
      expiries_.erase(expiries_.begin());
      const auto at = by_block_.find(block);
      if (at != by_block_.end() && at->second->second.self == -newest) pool_->set_level(block, retention_hint::normal);
    }
  }
  [[nodiscard]] std::int64_t now() const { return now_; }
  [[nodiscard]] const prefix_stats& stats() const { return stats_; }

 private:
  using name = std::tuple<node, std::vector<int>, std::string>;
  struct entry {
    node self;
    int block;
  };
  [[nodiscard]] name name_of(node after, const int* tokens, const extra_texts& extras, std::size_t index) const {
    const auto extra = extras.find(static_cast<std::int64_t>(index));
    return {after, std::vector<int>(tokens, tokens + block_size_),
            extra == extras.end() ? std::string() : extra->second};
  }

  pool_oracle* pool_;
  std::size_t block_size_;
  s3_fifo_oracle* policy_;
  std::map<node, int> by_node_;        // of cached contents
  std::map<node, std::string> paths_;  // from the chain's first token on
  std::map<std::string, std::int64_t> roots_;
  std::map<name, entry> by_contents_;
  std::map<int, std::map<name, entry>::iterator> by_block_;
  std::set<std::tuple<std::int64_t, node, int>> expiries_;
  node last_node_ = 0;
  std::int64_t now_ = 0;
  prefix_stats stats_;
};

}  // namespace bifolio::test

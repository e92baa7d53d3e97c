// SPDX-License-Identifier: Apache-2.0
#pragma once

/// The cache manager said with maps and vectors: one plain list of block ids per sequence, one user count per block,
/// queues of free ids, contents spelled out instead of hashed. No sharing of tables, no shortcuts, no handles to reuse.
/// It predicts every answer, every block id, every pair to copy and all statistics of the production manager, because
/// the eviction order is part of the contract.

#include <algorithm>
#include <bifolio/error.hpp>
#include <bifolio/kv_cache_manager.hpp>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "reference/pool_oracle.hpp"
#include "reference/prefix_oracle.hpp"

namespace bifolio::test {

/// A prompt with all it depends on as text: equal texts are equal contents.
struct oracle_prompt {
  std::vector<int> tokens;
  std::string scope;
  prefix_oracle::extra_texts extras;  ///< by block
  retention_hint hint;
};

class manager_oracle {
 public:
  struct one_sequence {
    std::vector<int> blocks;  ///< −1: given back by the sliding window
    std::int64_t num_tokens = 0;
    std::int64_t num_committed = 0;
    bool swapped = false;  ///< `blocks` are the host's
    bool publishes = true;
    std::vector<prefix_oracle::node> names;     ///< of the published blocks
    std::size_t num_evicted_prefix_blocks = 0;  ///< of these, blocks that came back from the host
    std::vector<int> tokens;                    ///< the committed ones
    oracle_prompt prompt;                       ///< its scope, extra keys and hint
  };
  using handle = std::uint64_t;
  using pair = std::pair<int, int>;

  /// What an append does with a tail that others read, or that is registered.
  struct tail_choice {
    bool copies = false;
    bool unregisters = false;
  };
  struct answer {
    alloc_status status = alloc_status::ok;
    handle opened = 0;
    std::optional<pair> copy;
    std::int64_t num_cached = 0;
    tail_choice tail{};  ///< of an append that only asks
  };

  /// `name_size`: tokens of what a block is registered for; those of a block, but for groups that follow another.
  explicit manager_oracle(const kv_cache_config& config, int name_size = 0)
      : config_(config),
        pool_(config.num_blocks),
        host_(config.num_host_blocks),
        prefix_(pool_, name_size > 0 ? name_size : config.block_size),
        on_host_(to_size(config.num_blocks), -1),
        on_device_(to_size(config.num_host_blocks), -1) {
    stats_.num_blocks = config.num_blocks;
    stats_.num_host_blocks = config.num_host_blocks;
  }

  [[nodiscard]] const std::map<handle, one_sequence>& sequences() const { return sequences_; }
  [[nodiscard]] const pool_oracle& pool() const { return pool_; }
  [[nodiscard]] const pool_oracle& host() const { return host_; }
  [[nodiscard]] const prefix_oracle& prefix() const { return prefix_; }

  // --- opening

  answer allocate(std::int64_t num_tokens) {
    const std::int64_t needed = div_up(num_tokens);
    if (needed > config_.num_blocks) return {alloc_status::never, 0, {}, 0};
    if (needed > pool_.num_free() || is_full()) return {alloc_status::later, 0, {}, 0};
    one_sequence& opened = sequences_[++last_handle_];
    for (std::int64_t i = 0; i < needed; ++i) opened.blocks.push_back(take());
    opened.num_tokens = num_tokens;
    note_peak();
    return {alloc_status::ok, last_handle_, {}, 0};
  }

  [[nodiscard]] alloc_status can_allocate(std::int64_t num_tokens, std::int64_t step_tokens,
                                          std::int64_t num_promised = 0) const {
    return admit(peak_blocks(num_tokens, step_tokens), 0, num_promised);
  }

  answer can_open(const oracle_prompt& prompt, std::int64_t step_tokens, std::int64_t num_promised) {
    const hits found = look_up(prompt);
    // What is shared with those who use it now costs nothing.
    std::int64_t shared = 0;
    for (const int b : found.kept) shared += b >= 0 && !pool_.is_free(b) ? 1 : 0;
    const std::int64_t peak = peak_blocks(static_cast<std::int64_t>(prompt.tokens.size()), step_tokens);
    return {admit(peak, shared, num_promised), 0, {}, found.num_tokens};
  }

  answer open(const oracle_prompt& prompt, std::int64_t num_new_tokens) {
    const hits found = look_up(prompt);
    const auto length = static_cast<std::int64_t>(prompt.tokens.size());
    const std::int64_t num_tokens = std::min(length, found.num_tokens + std::min(num_new_tokens, length));
    const std::int64_t size = div_up(num_tokens);
    const std::int64_t fresh = size - static_cast<std::int64_t>(found.kept.size());
    std::int64_t idle = found.source >= 0 && pool_.is_free(found.source) ? 1 : 0;
    std::int64_t live = fresh;
    for (const int b : found.kept) {
      live += b >= 0 ? 1 : 0;
      idle += b >= 0 && pool_.is_free(b) ? 1 : 0;
    }
    if (live > config_.num_blocks) return {alloc_status::never, 0, {}, 0};
    if (fresh + idle > pool_.num_free() || is_full()) return {alloc_status::later, 0, {}, 0};
    answer result{alloc_status::ok, ++last_handle_, {}, found.num_tokens};
    one_sequence& opened = sequences_[last_handle_];
    opened.blocks = found.kept;
    for (const int b : found.kept) {
      if (b >= 0) pool_.add_user(b);
    }
    if (found.source >= 0) {
      pool_.add_user(found.source);
      opened.blocks.push_back(take());
      result.copy = {found.source, opened.blocks.back()};
      pool_.drop(found.source, true);
      ++stats_.num_copied_blocks;
    }
    while (static_cast<std::int64_t>(opened.blocks.size()) < size) opened.blocks.push_back(take());
    opened.num_tokens = num_tokens;
    opened.num_committed = found.num_tokens;
    opened.tokens.assign(prompt.tokens.begin(), prompt.tokens.begin() + found.num_tokens);
    opened.names = found.names;
    opened.prompt = prompt;
    if (config_.prefix.enabled) prefix_.count_lookup(to_size(length / config_.block_size), found.num_hits);
    note_peak();
    return result;
  }

  // --- growing, committing, shrinking

  /// `chosen`: the answer of a call before that only asked, when other groups were changed since.
  answer append(handle h, std::int64_t num_tokens, std::int64_t num_lookahead, bool only_ask = false,
                const tail_choice* chosen = nullptr) {
    one_sequence& one = sequences_.at(h);
    if (num_tokens + num_lookahead == 0) return {};
    const std::int64_t covered = std::max<std::int64_t>(div_up(one.num_tokens + num_tokens + num_lookahead),
                                                        static_cast<std::int64_t>(one.blocks.size()));
    const std::size_t tail = to_size(one.num_tokens / config_.block_size);
    const std::int64_t grown = covered - static_cast<std::int64_t>(one.blocks.size());
    const bool in_block = one.num_tokens % config_.block_size != 0;
    const bool shared = in_block && pool_.users(one.blocks[tail]) > 1;
    bool copies = shared || (in_block && prefix_.holds(one.blocks[tail]));
    // Nobody else to wait for: better to lose a name than to stop.
    bool unregisters = copies && !shared && grown + 1 > pool_.num_free();
    if (unregisters) copies = false;
    if (chosen != nullptr) copies = chosen->copies;
    if (chosen != nullptr) unregisters = chosen->unregisters;
    const std::int64_t live = covered - std::count(one.blocks.begin(), one.blocks.end(), -1);
    if (live > config_.num_blocks) return {alloc_status::never, 0, {}, 0};
    if (grown + (copies ? 1 : 0) > pool_.num_free()) return {alloc_status::later, 0, {}, 0};
    answer result;
    if (only_ask) result.tail = {copies, unregisters};
    if (only_ask) return result;
    if (unregisters) prefix_.unregister(one.blocks[tail]);
    if (copies) {
      const int old = one.blocks[tail];
      one.blocks[tail] = take();
      pool_.drop(old, true);
      result.copy = {old, one.blocks[tail]};
      ++stats_.num_copied_blocks;
    } else if (in_block) {
      unlink(one.blocks[tail]);  // it is written from here on
    }
    while (static_cast<std::int64_t>(one.blocks.size()) < covered) one.blocks.push_back(take());
    one.num_tokens += num_tokens;
    note_peak();
    return result;
  }

  void commit(handle h, std::int64_t num_tokens) {
    one_sequence& one = sequences_.at(h);
    one.num_committed += num_tokens;
    if (num_tokens > 0) one.publishes = false;
    slide(one);
  }

  /// `published(i, node)` is called for each block that the sequence registered or found registered.
  template <class Published = void (*)(std::size_t, prefix_oracle::node)>
  void commit(
      handle h, const std::vector<int>& tokens, Published published = [](std::size_t, prefix_oracle::node) {}) {
    one_sequence& one = sequences_.at(h);
    one.num_committed += static_cast<std::int64_t>(tokens.size());
    one.tokens.insert(one.tokens.end(), tokens.begin(), tokens.end());
    const auto size = to_size(config_.block_size);
    while (config_.prefix.enabled && one.publishes && (one.names.size() + 1) * size <= one.tokens.size()) {
      const std::size_t i = one.names.size();
      const prefix_oracle::node after = i == 0 ? prefix_.root(one.prompt.scope) : one.names.back();
      const auto got =
          prefix_.publish(one.blocks[i], after, &one.tokens[i * size], one.prompt.extras, i, one.prompt.hint);
      one.names.push_back(got.end);
      last_name_[one.blocks[i]] = got.end;
      published(i, got.end);
      if (config_.prefix.deduplicate && got.duplicate_of >= 0 && pool_.users(one.blocks[i]) == 1) {
        pool_.add_user(got.duplicate_of);
        pool_.drop(one.blocks[i], true);
        one.blocks[i] = got.duplicate_of;
      }
    }
    slide(one);
    note_peak();
  }

  answer fork(handle h) {
    if (is_full()) return {alloc_status::later, 0, {}, 0};
    one_sequence copy = sequences_.at(h);
    copy.blocks.resize(to_size(div_up(copy.num_tokens)));
    for (const int b : copy.blocks) {
      if (b >= 0) pool_.add_user(b);
    }
    sequences_[++last_handle_] = std::move(copy);
    ++stats_.num_forks;
    return {alloc_status::ok, last_handle_, {}, 0};
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
    shrink(one, to_size(div_up(num_tokens)), pool_);
    one.num_tokens = num_tokens;
    one.num_committed = std::min(one.num_committed, num_tokens);
    if (num_tokens % config_.block_size != 0) unlink(one.blocks.back());  // it will be written
    if (!one.publishes) return;
    one.tokens.resize(to_size(one.num_committed));
    const std::size_t whole = one.tokens.size() / to_size(config_.block_size);
    if (whole >= one.names.size()) return;
    // Back after where it came back from the host (or, but for the window's edge, past what the window kept).
    const bool in_block = one.tokens.size() % to_size(config_.block_size) != 0;
    const auto known = [&](std::size_t i) { return i >= one.num_evicted_prefix_blocks && one.blocks[i] >= 0; };
    if ((whole > 0 && !known(whole - 1)) || (in_block && !known(whole))) {
      one.publishes = false;
      return;
    }
    one.names.resize(whole);
    if (whole > 0) one.names.back() = last_name_.at(one.blocks[whole - 1]);
    one.num_evicted_prefix_blocks = std::min(one.num_evicted_prefix_blocks, whole);
  }

  void free(handle h) {
    one_sequence& one = sequences_.at(h);
    shrink(one, 0, one.swapped ? host_ : pool_);
    sequences_.erase(h);
  }

  // --- swapping, fences

  alloc_status swap_out(const std::vector<handle>& seqs, std::vector<pair>& copies) {
    const std::int64_t needed = blocks_to_move(seqs, on_host_, host_);
    if (needed > config_.num_host_blocks) return alloc_status::never;
    if (needed > host_.num_free()) return alloc_status::later;
    for (const handle h : seqs) {
      one_sequence& one = sequences_.at(h);
      std::vector<int> moved(one.blocks.begin(), one.blocks.begin() + div_up(one.num_tokens));
      for (int& b : moved) {
        if (b < 0) continue;
        int& copy = on_host_[to_size(b)];
        if (copy >= 0) {
          host_.add_user(copy);
        } else {
          copy = host_.take();
          unlink_host(copy);
          on_device_[to_size(copy)] = b;
          on_host_[to_size(b)] = copy;
          copies.emplace_back(b, copy);
          ++stats_.num_swapped_out_blocks;
        }
        b = copy;
      }
      shrink(one, 0, pool_);
      one.blocks = std::move(moved);
      one.swapped = true;
    }
    for (const handle h : seqs) {
      for (const int b : unfinished(h)) unlink_host(b);
    }
    return alloc_status::ok;
  }

  [[nodiscard]] std::int64_t blocks_to_swap_in(const std::vector<handle>& seqs) const {
    return blocks_to_move(seqs, on_device_, pool_);
  }

  alloc_status swap_in(const std::vector<handle>& seqs, std::vector<pair>& copies) {
    const std::int64_t needed = blocks_to_swap_in(seqs);
    if (needed > config_.num_blocks) return alloc_status::never;
    if (needed > pool_.num_free()) return alloc_status::later;
    for (const handle h : seqs) {
      one_sequence& one = sequences_.at(h);
      std::vector<int> moved = one.blocks;
      for (int& b : moved) {
        if (b < 0) continue;
        int copy = on_device_[to_size(b)];
        if (copy >= 0) {
          pool_.add_user(copy);
        } else {
          copy = take();
          on_device_[to_size(b)] = copy;
          on_host_[to_size(copy)] = b;
          copies.emplace_back(b, copy);
          ++stats_.num_swapped_in_blocks;
        }
        b = copy;
      }
      shrink(one, 0, host_);
      one.blocks = std::move(moved);
      one.swapped = false;
      one.num_evicted_prefix_blocks = one.names.size();
    }
    for (const handle h : seqs) {
      for (const int b : unfinished(h)) unlink(b);
    }
    note_peak();
    return alloc_status::ok;
  }

  /// Of pairs that a swap has just given.
  void forget_copies(const std::vector<pair>& copies, bool out) {
    for (const auto& [src, dst] : copies) {
      const int b = out ? src : dst;
      if (on_host_[to_size(b)] == (out ? dst : src)) unlink(b);
    }
  }

  std::int64_t open_fence() {
    if (config_.num_host_blocks > 0) host_.open_fence();
    return pool_.open_fence();
  }
  void retire() {
    pool_.retire();
    if (config_.num_host_blocks > 0) host_.retire();
  }

  bool reset_prefix_cache() { return !config_.prefix.enabled || prefix_.reset(); }
  void advance_clock(std::int64_t now) {
    if (config_.prefix.enabled) prefix_.advance_clock(now);
  }

  [[nodiscard]] cache_stats stats() const {
    cache_stats now = stats_;
    now.num_free_blocks = pool_.num_free();
    now.num_used_blocks = config_.num_blocks - pool_.num_free();
    now.num_free_host_blocks = config_.num_host_blocks > 0 ? host_.num_free() : 0;
    for (const auto& [h, one] : sequences_) {
      ++now.num_sequences;
      now.num_tokens += one.num_tokens;
      now.num_swapped_sequences += one.swapped ? 1 : 0;
      if (!one.swapped) {
        now.num_table_entries +=
            static_cast<std::int64_t>(one.blocks.size()) - std::count(one.blocks.begin(), one.blocks.end(), -1);
      }
    }
    return now;
  }

 protected:
  static std::size_t to_size(std::int64_t n) { return static_cast<std::size_t>(n); }
  [[nodiscard]] bool is_full() const { return static_cast<std::int64_t>(sequences_.size()) == config_.max_sequences; }
  [[nodiscard]] std::int64_t div_up(std::int64_t tokens) const {
    return tokens / config_.block_size + (tokens % config_.block_size != 0 ? 1 : 0);
  }
  void note_peak() {
    stats_.peak_used_blocks = std::max(stats_.peak_used_blocks, config_.num_blocks - pool_.num_free());
  }

  [[nodiscard]] std::int64_t peak_blocks(std::int64_t num_tokens, std::int64_t step_tokens) const {
    const std::int64_t whole = div_up(num_tokens);
    if (config_.sliding_window == 0) return whole;
    // Try every offset of the live run within a block, at its longest.
    const std::int64_t step = step_tokens == 0 ? num_tokens : std::min(step_tokens, num_tokens);
    const std::int64_t longest = config_.sliding_window - 1 + step;
    std::int64_t most = 0;
    for (std::int64_t start = 0; start < config_.block_size; ++start) {
      most = std::max(most, (start + longest - 1) / config_.block_size + 1);
    }
    return std::min(whole, most);
  }
  [[nodiscard]] alloc_status admit(std::int64_t peak, std::int64_t shared, std::int64_t num_promised) const {
    const auto watermark = static_cast<std::int64_t>(config_.watermark * static_cast<double>(config_.num_blocks));
    if (peak + watermark > config_.num_blocks) return alloc_status::never;
    const std::int64_t needed = std::max<std::int64_t>(0, peak - shared) + watermark + num_promised;
    return needed <= pool_.num_free() && !is_full() ? alloc_status::ok : alloc_status::later;
  }

  struct hits {
    std::vector<int> kept;  ///< −1: no later token attends to it
    std::vector<prefix_oracle::node> names;
    int source = -1;  ///< a block that is copied because the prompt's last token is in it
    std::int64_t num_tokens = 0;
    std::size_t num_hits = 0;
  };
  hits look_up(const oracle_prompt& prompt) {
    hits result;
    if (!config_.prefix.enabled) return result;
    const prefix_oracle::found found = prefix_.match(prompt.scope, prompt.tokens, prompt.extras);
    const auto bs = to_size(config_.block_size);
    std::size_t kept = found.blocks.size();
    if (kept * bs < prompt.tokens.size()) {
      result.num_tokens = static_cast<std::int64_t>(kept * bs);
    } else {
      const int last = found.blocks[--kept];
      result.num_tokens = static_cast<std::int64_t>(prompt.tokens.size()) - 1;
      std::int64_t idle = 0;
      for (std::size_t i = first_seen(result.num_tokens); i < found.blocks.size(); ++i) {
        idle += pool_.is_free(found.blocks[i]) ? 1 : 0;
      }
      if (bs > 1 && (idle < pool_.num_free() || !pool_.is_free(last))) {
        result.source = last;
      } else {
        result.num_tokens = static_cast<std::int64_t>(kept * bs);
      }
    }
    result.num_hits = kept + (result.source >= 0 ? 1 : 0);
    for (std::size_t i = 0; i < kept; ++i) {
      result.kept.push_back(i < first_seen(result.num_tokens) ? -1 : found.blocks[i]);
      result.names.push_back(found.names[i]);
    }
    return result;
  }
  /// First block that is visible to the token at position `num_committed`.
  [[nodiscard]] std::size_t first_seen(std::int64_t num_committed) const {
    if (config_.sliding_window == 0) return 0;
    return to_size(std::max<std::int64_t>(0, num_committed - config_.sliding_window + 1) / config_.block_size);
  }
  /// Blocks with tokens before `kept_to` go to the back of the queue.
  void slide(one_sequence& one, std::int64_t kept_to = 0) {
    for (std::size_t i = 0; i < std::min(first_seen(one.num_committed), one.blocks.size()); ++i) {
      if (one.blocks[i] < 0) continue;
      pool_.drop(one.blocks[i], static_cast<std::int64_t>(i) < div_up(kept_to));
      one.blocks[i] = -1;
    }
  }

  int take() {
    const int b = config_.prefix.enabled ? prefix_.take() : pool_.take();
    unlink(b);
    ++stats_.num_allocated_blocks;
    return b;
  }
  // The last block first; what was computed to the block's end goes to the back of the queue.
  void shrink(one_sequence& one, std::size_t size, pool_oracle& pool) {
    while (one.blocks.size() > size) {
      const std::size_t i = one.blocks.size() - 1;
      const bool full = static_cast<std::int64_t>(i + 1) * config_.block_size <= one.num_committed;
      if (one.blocks[i] >= 0) pool.drop(one.blocks[i], full);
      one.blocks.pop_back();
    }
  }

  void unlink(int b) {
    if (b < 0) return;
    int& copy = on_host_[to_size(b)];
    if (copy < 0) return;
    on_device_[to_size(copy)] = -1;
    copy = -1;
  }
  void unlink_host(int b) { unlink(on_device_[to_size(b)]); }
  /// Blocks of a sequence that are not full of committed tokens.
  [[nodiscard]] std::vector<int> unfinished(handle h) const {
    const one_sequence& one = sequences_.at(h);
    std::vector<int> blocks;
    for (std::size_t i = to_size(one.num_committed / config_.block_size); i < one.blocks.size(); ++i) {
      if (one.blocks[i] >= 0) blocks.push_back(one.blocks[i]);
    }
    return blocks;
  }
  [[nodiscard]] std::int64_t blocks_to_move(const std::vector<handle>& seqs, const std::vector<int>& copy_of,
                                            const pool_oracle& to) const {
    std::set<int> moving;
    for (const handle h : seqs) {
      const one_sequence& one = sequences_.at(h);
      for (std::int64_t i = 0; i < div_up(one.num_tokens); ++i) {
        const int b = one.blocks[to_size(i)];
        if (b >= 0 && (copy_of[to_size(b)] < 0 || to.is_free(copy_of[to_size(b)]))) moving.insert(b);
      }
    }
    return static_cast<std::int64_t>(moving.size());
  }

  kv_cache_config config_;
  std::map<handle, one_sequence> sequences_;
  pool_oracle pool_, host_;
  prefix_oracle prefix_;
  std::vector<int> on_host_, on_device_;  ///< the block of the other pool with the same contents; −1: none
  /// Of a block: when its contents were forgotten and a fork that shares it has published it anew, that is its name.
  std::map<int, prefix_oracle::node> last_name_;
  cache_stats stats_;
  handle last_handle_ = 0;
};

}  // namespace bifolio::test
